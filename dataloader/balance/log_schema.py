"""The schema of the JSON log that `writers.JsonLines` writes, one record per line, and its parser.

{"epoch": 0, "step": 99, "seen": 100, "steps": 10, "ratio_before": 1.4, ..., "before": [9, 2], "after": [6, 5], ...}

A line summarizes the last few steps (`MetricsSummary`) and has the loads of the last of them. Readers ignore unknown
fields, and skip lines that are not records, such as the incomplete last line of a job that was killed.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.metrics import MetricsSummary, StepMetrics, summarize

_FIRST = ("epoch", "step", "seen")
_LARGEST = 1 << 63  # loads are int64, and no other number is larger; sums of these do not overflow float64


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord(MetricsSummary):
    """A line of the log: the last few steps summarized, and the loads of the last of them. W is the number of ranks."""

    epoch: int
    """Epoch of the last step."""

    step: int
    """Number of the last step, which restarts at 0 with each epoch and after each resume."""

    seen: int
    """Steps that the writer had seen, the last one included."""

    before: NDArray[np.int64]
    """[W]: load of each rank in the last step before balancing."""

    after: NDArray[np.int64]
    """[W]: load of each rank in the last step after balancing."""

    lower_bound: int
    """Lower bound of the heaviest load in the last step."""

    @classmethod
    def of(cls, steps: Sequence[StepMetrics], *, seen: int) -> Self:
        """Return the record of at least one step."""
        last, summary = steps[-1], summarize(steps)
        return cls(
            **{entry.name: getattr(summary, entry.name) for entry in dataclasses.fields(summary)},
            epoch=int(last.epoch),
            step=int(last.step),
            seen=seen,
            before=last.before,
            after=last.after,
            lower_bound=int(last.lower_bound),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as an object of JSON: numbers and lists of integers."""
        values = {log_key(entry): getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {
            key: values[key].tolist() if isinstance(values[key], np.ndarray) else values[key]
            for key in sorted(values, key=lambda key: key not in _FIRST)
        }


def log_key(entry: "dataclasses.Field[Any]") -> str:
    """Return the key in the log of a field of `LogRecord`."""
    return entry.metadata.get("log_key") or entry.name


def parse_record(line: bytes) -> LogRecord | None:
    """Parse a line of a log; None: it is not a record. Unknown fields are ignored."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fields = dataclasses.fields(LogRecord)
    if not isinstance(entry, dict) or not all(_is_valid(entry.get(log_key(field)), field.type) for field in fields):
        return None
    if entry["steps"] < 1 or len(entry["before"]) != len(entry["after"]):
        return None
    return LogRecord(**{field.name: _converted(entry[log_key(field)], field.type) for field in fields})


def _is_valid(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < _LARGEST
    if kind is float:
        return type(value) in (int, float) and 0 <= value <= _LARGEST
    return isinstance(value, list) and len(value) > 0 and all(_is_valid(load, int) for load in value)


def _converted(value: Any, kind: Any) -> Any:
    return kind(value) if kind in (int, float) else np.array(value, dtype=np.int64)
