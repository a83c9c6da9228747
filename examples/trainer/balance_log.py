"""`BalanceLog`: what balancing did in each step of a job, and how long ranks waited for one another."""

import dataclasses
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from evenrank.dataloader.balance import BalanceConfig, StepMetrics
from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, combine, shown_numbers, summarize
from evenrank.dataloader.balance.metrics.writers import JsonLines
from evenrank.training import StepTimer
from trainer.config import TrainConfig
from trainer.world import World

_STEPS = 100  # balanced steps that a line of the job's log summarizes, or as many as its interval has
_COMPARED_STEPS = 10  # unbalanced steps, the same


class BalanceLog:
    """The log of a run's balancing, OUT/balance.jsonl, with measured times; a job that resumes gets balance-2.jsonl.

    Every rank must create one, and close it where no rank failed.

    Attributes:
        timer: takes the metrics of each step on rank 0, and measures the steps of each rank.

    Raises:
        DataError: the file cannot be written.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        every = config.log_every
        self._config = config
        self._is_first = world.rank == 0
        self._balanced: deque[MetricsSummary] = deque(maxlen=max(every, _STEPS))
        self._unbalanced: deque[MetricsSummary] = deque(maxlen=_COMPARED_STEPS)
        self._lines: JsonLines | None = None
        if self._is_first:
            options = {"job": dataclasses.asdict(config)}
            self._lines = JsonLines(Path(config.out) / "balance.jsonl", every=every, options=options)
        writers: list[Callable[[StepMetrics], None]] = []
        if self._lines is not None:
            writers = [self._lines, self._note]
        self.timer = StepTimer(*writers, device=world.device, every=every, group=world.data)

    def observe(self, balance: BalanceConfig) -> BalanceConfig:
        """Return how to balance steps that this log observes, of which some may stay unbalanced."""
        logs_loads = self._config.log_loads and self._is_first
        return dataclasses.replace(
            balance,
            on_step=self.timer,
            refit_every=self._config.refit_every,
            compare_every=self._config.compare_every,
            log_every=self._config.log_every if logs_loads else None,
            log_loads=logs_loads,
        )

    def measured(self) -> MetricsSummary:
        """Summarize the last 100 balanced and 10 unbalanced steps whose times are known on rank 0.

        Times are known up to two intervals of the log late.
        """
        return combine((*self._balanced, *self._unbalanced))

    def _note(self, metrics: StepMetrics) -> None:
        if metrics.compute_seconds is not None:
            (self._balanced if metrics.is_balanced else self._unbalanced).append(summarize([metrics]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.timer.__exit__(kind, error, trace)
        finally:
            if self._lines is not None:
                self._lines.close()


_MEASURED = ("measured_idle_after", "step_seconds", "measured_idle_before", "compared_step_seconds", "measured_speedup")


def measured_numbers(measured: MetricsSummary) -> dict[str, float]:
    """Return what was measured by name, as far as it was: idle shares, seconds of a step, speed-up."""
    known = shown_numbers(measured)
    return {name: known[name] for name in _MEASURED if name in known}


def measured_line(measured: MetricsSummary) -> str:
    """Return it as a part of a line of the log, such as `idle 2.1 % of 14.2 ms | unbalanced 25.4 % of 18.6 ms, ...`.

    Empty if nothing was measured.
    """
    numbers = measured_numbers(measured)
    parts = [
        f"{name} {100 * numbers[idle]:.1f} % of {1e3 * numbers[seconds]:.1f} ms"
        for name, idle, seconds in (
            ("idle", "measured_idle_after", "step_seconds"),
            ("unbalanced", "measured_idle_before", "compared_step_seconds"),
        )
        if idle in numbers
    ]
    if "measured_speedup" in numbers:
        parts[-1] += f", speed-up {numbers['measured_speedup']:.2f}x"
    return " | ".join(parts)
