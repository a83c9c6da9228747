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
    step: int
    """Number of the last step, which restarts at 0 with each epoch and after each resume."""
    seen: int
    """Steps that the writer had seen, the last one included."""
    before: NDArray[np.int64]
    """[W]: load of each rank before balancing."""
    after: NDArray[np.int64]
    """[W]: load of each rank after balancing."""
    lower_bound: int
    """Lower bound of the heaviest load."""

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
        values |= {"before": self.before.tolist(), "after": self.after.tolist()}
        return {key: values[key] for key in sorted(values, key=lambda key: key not in _FIRST)}


def log_key(entry: "dataclasses.Field[Any]") -> str:
    """Return the key in the log of a field of `LogRecord`."""
    return entry.metadata.get("log_key") or entry.name


def parse_record(line: bytes) -> LogRecord:
    """Parse a line of a log; a ValueError says why it is not a record."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # json would call every line "line 1"
        raise ValueError("it is not JSON") from error
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    values = {field.name: _value(entry, log_key(field), field.type) for field in dataclasses.fields(LogRecord)}
    if values["steps"] < 1:
        raise ValueError("'steps' is below 1")
    if len(values["before"]) != len(values["after"]):
        raise ValueError("'before' and 'after' differ in length")
    return LogRecord(**values)


def _value(entry: dict[str, Any], key: str, kind: Any) -> Any:
    """Return the value of a field of the type `kind`: int, float, or an array of int64."""
    if key not in entry:
        raise ValueError(f"{key!r} is missing")
    value = entry[key]
    if kind is int and _is_count(value):
        return value
    if kind is float and type(value) in (int, float) and 0 <= value <= _LARGEST:
        return float(value)
    if kind not in (int, float) and isinstance(value, list) and value and all(_is_count(load) for load in value):
        return np.array(value, dtype=np.int64)
    raise ValueError(f"{key!r} is {json.dumps(value)[:40]}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST
