"""The log of a job's balancing as JSON lines: first the run, then a record of every few steps.

    {"run": {"id": "5f0c...", "started": "2026-11-24T09:30:00Z", "ranks": 8, "versions": {...}, "options": {...}}}
    {"epoch": 0, "step": 99, "seen": 100, "steps": 100, "idle_after": 0.1, ..., "before": [9, 2], "after": [6, 5], ...}

Readers ignore unknown fields, and skip lines that are not records, such as the incomplete last line of a job that was
killed. W is the number of ranks, B the rows of each.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, StepMetrics, shown_numbers, summarize

_FIRST = ("epoch", "step", "seen")
_LARGEST = 1 << 63  # loads are int64, and no other number is larger; sums of these do not overflow float64
_FLOATS = ("rank_squares", "compute_seconds", "wait_seconds")  # the arrays that are not int64
_OPTIONAL = ("compute_seconds", "wait_seconds")
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


def parse_line(line: bytes) -> LogRecord | RunRecord:
    """Parse a line of a log; a ValueError says why it is not a record."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # json would call every line "line 1"
        raise ValueError("it is not JSON") from error
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    if RUN in entry:
        return _parse_run(entry[RUN])
    values = {field.name: _value(entry, field.name, field.type) for field in dataclasses.fields(LogRecord)}
    if values["steps"] + values["compared_steps"] < 1:
        raise ValueError("'steps' is below 1")
    of_ranks = [name for name in ("after", "rank_tokens", *_FLOATS) if values[name] is not None]
    if differing := [name for name in of_ranks if len(values[name]) != len(values["before"])]:
        raise ValueError(f"'before' and {differing[0]!r} differ in length")
    return LogRecord(**values)


def _parse_run(run: Any) -> RunRecord:
    kinds = {"id": str, "started": str, "ranks": int, "versions": dict, "options": dict}
    if not isinstance(run, dict) or any(not isinstance(run.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{RUN!r} is {json.dumps(run)[:40]}")
    return RunRecord(**{name: run[name] for name in kinds})


def _value(entry: dict[str, Any], key: str, kind: Any) -> Any:
    """Return the value of a field of the type `kind`: int, float, bool or an array."""
    if key not in entry:
        raise ValueError(f"{key!r} is missing")
    value: Any = entry[key]
    is_known = type(value) is bool if kind is bool else _is_count(value) if kind is int else value is None
    if is_known and (value is not None or key in _OPTIONAL):
        return value
    if kind is float and _is_number(value):
        return float(value)
    is_array = kind not in (bool, int, float) and isinstance(value, list) and len(value) > 0
    if is_array and all(map(_is_number if key in _FLOATS else _is_count, value)):
        return np.array(value, dtype=np.float64 if key in _FLOATS else np.int64)
    raise ValueError(f"{key!r} is {json.dumps(value)[:40]}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST  # type: ignore[operator]
