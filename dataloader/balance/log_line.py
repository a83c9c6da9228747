"""A line for people in the log: what balancing did in a step.

epoch 0 step 100: load max-min 1.2e9 -> 3.4e6 (imbalance 41.2% -> 0.2%, 1.352 -> 1.001 x lower bound), moved 12,345
of 98,765 tokens, plan 1.2 ms, exchange 0.4 ms
"""

import logging

from evenrank.dataloader.balance.metrics import StepMetrics

_log = logging.getLogger("evenrank")


def log_line(metrics: StepMetrics) -> str:
    """Describe a step in one line: before balancing -> after balancing.

    Loads are in units of the cost. The imbalance is (max - min) / max, the part of the step that the lightest rank
    waits for the heaviest. The lower bound is that of the heaviest load.
    """
    spreads = [int(loads.max() - loads.min()) for loads in (metrics.before, metrics.after)]
    imbalances = [
        spread / max(int(loads.max()), 1)
        for spread, loads in zip(spreads, (metrics.before, metrics.after), strict=True)
    ]
    return (
        f"epoch {metrics.epoch} step {metrics.step}: "
        f"load max-min {_short(spreads[0])} -> {_short(spreads[1])} "
        f"(imbalance {imbalances[0]:.1%} -> {imbalances[1]:.1%}, "
        f"{metrics.ratio_before:.3f} -> {metrics.ratio_after:.3f} x lower bound), "
        f"moved {metrics.moved_tokens:,} of {metrics.tokens:,} tokens, "
        f"plan {1e3 * metrics.plan_seconds:.1f} ms, exchange {1e3 * metrics.exchange_seconds:.1f} ms"
    )


class StepLogger:
    """Logs a line for every few steps through the logger `evenrank`, at the level INFO.

    Steps are counted from 0 over all epochs, as they are handed out.

    Lines are visible although Python logs only warnings by default: unless the logger `evenrank` has a level, it gets
    the level INFO before the first line, and if neither it nor the root logger has a handler, one that writes to
    standard error.

    Args:
        every: steps from one line to the next, at least 1; there is a line for the steps 0, every, 2 * every, ...
        window: (start, stop): there are lines for the steps start..stop-1 only; None: for all steps.

    """

    def __init__(self, *, every: int, window: tuple[int, int] | None = None) -> None:
        self._every = every
        self._window = window
        self._seen = 0  # steps

    def __call__(self, metrics: StepMetrics) -> None:
        """Take the metrics of the next step."""
        number = self._seen
        self._seen += 1
        if number % self._every == 0 and (self._window is None or self._window[0] <= number < self._window[1]):
            _make_visible()
            _log.info("%s", log_line(metrics))


def _make_visible() -> None:
    # The root logger often has a handler that nobody asked for, because a library has called `logging.info`.
    if _log.level == logging.NOTSET and _log.getEffectiveLevel() > logging.INFO:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        _log.addHandler(handler)


def _short(load: int) -> str:
    """Return 99999 as 99,999 and 123456 as 1.2e5."""
    if load < 100_000:
        return f"{load:,}"
    mantissa, exponent = f"{load:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
