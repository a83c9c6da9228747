"""Metrics as lines of the log for people: `BalanceConfig(log_every=...)`."""

import dataclasses
import logging

from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, summarize

_log = logging.getLogger("evenrank")


def log_line(metrics: StepMetrics, *, with_loads: bool = False) -> str:
    """Describe a step in one line, before balancing -> after balancing.

    epoch 0 step 100: idle 31.2% -> 0.1%, speed-up 1.35x, 1.352 -> 1.001 x lower bound, moved 312 of 4,210 tokens, ...

    Idle is the share of rank time that waits for the heaviest rank, by the cost, and the lower bound is that of the
    heaviest load. With loads, those of all ranks follow, in units of the cost.
    """
    summary = summarize([dataclasses.replace(metrics, is_balanced=True)])
    line = (
        f"epoch {metrics.epoch} step {metrics.step}: idle {summary.idle_before:.1%} -> {summary.idle_after:.1%}, "
        f"speed-up {summary.speedup:.2f}x, {metrics.ratio_before:.3f} -> {metrics.ratio_after:.3f} x lower bound, "
        f"moved {metrics.moved_tokens:,} of {metrics.tokens:,} tokens, "
        f"plan {1e3 * metrics.plan_seconds:.1f} ms, exchange {1e3 * metrics.exchange_seconds:.1f} ms"
    )
    if with_loads:
        before, after = (" ".join(f"{load:.4g}" for load in loads) for loads in (metrics.before, metrics.after))
        line += f"; loads {before} -> {after}"
    return line if metrics.is_balanced else f"{line} (left unbalanced)"


class StepLogger:
    """Logs a line for the steps 0, every, 2 * every, ..., counted over all epochs, through the logger `evenrank`.

    With a window (start, stop), only for the steps start..stop-1. Lines are visible although Python logs only warnings
    by default: the logger gets the level INFO unless it has one, and a handler if there is none.
    """

    def __init__(self, *, every: int, window: tuple[int, int] | None = None, with_loads: bool = False) -> None:
        self._every = every
        self._with_loads = with_loads
        self._window = window
        self._seen = 0  # steps

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step."""
        number = self._seen
        self._seen += 1
        if number % self._every == 0 and (self._window is None or self._window[0] <= number < self._window[1]):
            _make_visible()
            _log.info("%s", log_line(metrics, with_loads=self._with_loads))


def _make_visible() -> None:
    # The root logger often has a handler that nobody asked for, because a library has called `logging.info`.
    if _log.level == logging.NOTSET and _log.getEffectiveLevel() > logging.INFO:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        _log.addHandler(handler)
