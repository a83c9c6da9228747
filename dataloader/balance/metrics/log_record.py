"""The log of a job's balancing as JSON lines: first the run, then a record of every few steps.

    {"run": {"id": "5f0c...", "started": "2026-11-24T09:30:00Z", "ranks": 8, "versions": {...}, "options": {...}}}
    {"epoch": 0, "step": 99, "seen": 100, "steps": 100, "idle_after": 0.1, ..., "before": [9, 2], "after": [6, 5], ...}

W is the number of ranks, B the rows of each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, StepMetrics, shown_numbers, summarize

_FIRST = ("epoch", "step", "seen")
RUN: Final = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord(MetricsSummary):
    """A line of the log: the last few steps summarized, and the numbers of each rank in the last one."""

    epoch: int
    step: int
    """Number of the last step, which restarts at 0 with each epoch and after each resume."""
    seen: int
    """Steps that the writer had seen, the last one included."""
    is_balanced: bool
    """See `StepMetrics`, also for all that follow; the arrays are [W] and `loaded_tokens` [B]."""
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    lower_bound: int
    rank_tokens: NDArray[np.int64]
    rank_squares: NDArray[np.float64]
    loaded_tokens: NDArray[np.int64]
    compute_seconds: NDArray[np.float64] | None = None
    wait_seconds: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, steps: Sequence[StepMetrics], *, seen: int) -> Self:
        """Return the record of at least one step."""
        summary, last = summarize(steps), steps[-1]
        own = [
            entry.name for entry in dataclasses.fields(cls) if not hasattr(summary, entry.name) and entry.name != "seen"
        ]
        return cls(**dataclasses.asdict(summary), **{name: getattr(last, name) for name in own}, seen=seen)

    def to_json(self) -> dict[str, Any]:
        """Return the record as an object of JSON: its fields, and the derived numbers that people look at."""
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
        return {name: values[name] for name in _FIRST} | shown_numbers(self) | values


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The first line of a log: what ran."""

    id: str
    """Random; the log of another run has another one."""
    started: str
    """Time in UTC, ISO 8601."""
    ranks: int
    versions: Mapping[str, str]
    """Of Python and of packages, by name."""
    options: Mapping[str, Any]
    """Of the balance, the data and the job, by name."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as an object of JSON."""
        return {RUN: dataclasses.asdict(self)}
