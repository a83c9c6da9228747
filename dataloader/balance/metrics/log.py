"""The log of a job's balancing as JSON lines: first the run, then a record of every few steps.

    {"run": {"id": "5f0c...", "started": "2026-11-24T09:30:00Z", "ranks": 8, "versions": {...}, "options": {...}}}
    {"epoch": 0, "step": 99, "seen": 100, "steps": 100, "idle_after": 0.1, ..., "before": [9, 2], "after": [6, 5], ...}

W is the number of ranks, B the rows of each. Reading needs no torch: logs are read on machines without GPUs too.
Unknown fields are ignored, and lines that are not records are skipped, such as the incomplete last line of a job that
was killed.
"""

import dataclasses
import json
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.core import files
from evenrank.core.errors import DataError
from evenrank.core.optional_imports import installed_versions
from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, StepMetrics, shown_numbers, summarize

_FIRST = ("epoch", "step", "seen")
_LARGEST = 1 << 63  # loads are int64, and no other number is larger; sums of these do not overflow float64
_FLOATS = ("rank_squares", "compute_seconds", "wait_seconds")  # the arrays that are not int64
_OPTIONAL = ("compute_seconds", "wait_seconds")
_PACKAGES = ("evenrank", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")
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

    @classmethod
    def begin(cls, ranks: int, options: Mapping[str, Any]) -> Self:
        """Return the record of a run that begins now."""
        versions = {"python": platform.python_version(), **installed_versions(*_PACKAGES)}
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(id=secrets.token_hex(8), started=started, ranks=ranks, versions=versions, options=options)

    def to_json(self) -> dict[str, Any]:
        """Return the record as an object of JSON."""
        return {RUN: dataclasses.asdict(self)}


class BalanceLog(NamedTuple):
    """A log: the run, its records, and the number of lines that are none, such as the last one of a killed job."""

    run: RunRecord | None
    records: list[LogRecord]
    skipped: int

    def describe(self) -> str:
        """Return the numbers of steps and ranks, of a log with records."""
        steps, ranks = self.records[-1].seen, len(self.records[-1].before)
        return f"{steps:,} step{'s' * (steps != 1)} on {ranks:,} rank{'s' * (ranks != 1)}"


def read_json_lines(path: Path) -> BalanceLog:
    """Read a log; lines that cannot be read are counted."""
    with files.open_regular(path) as file:
        lines = [line for line in file.read().split(b"\n") if line.strip()]
    parsed: list[LogRecord | RunRecord] = []
    first_error = ""
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(parse_line(line))
        except ValueError as error:
            first_error = first_error or f"line {number} is not a record of balancing metrics: {error}"
    if lines and not parsed:
        raise DataError(f"{path} has no record; {first_error}; give a file that on_step=JsonLines(FILE) wrote")
    runs = [record for record in parsed if isinstance(record, RunRecord)]
    if len(runs) > 1:
        raise DataError(
            f"{path} has records of {len(runs)} runs, {runs[0].id} and {runs[1].id}; give one file for each run"
        )
    records = [record for record in parsed if isinstance(record, LogRecord)]
    return BalanceLog(runs[0] if runs else None, records, len(lines) - len(parsed))


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
    if values["seen"] < 1:
        raise ValueError("'seen' is below 1")
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
    if value is None and key in _OPTIONAL:
        return None
    if kind in _SCALARS and _SCALARS[kind](value):
        return kind(value)
    if kind not in _SCALARS and isinstance(value, list) and value:
        element = float if key in _FLOATS else int
        if all(map(_SCALARS[element], value)):
            return np.array(value, dtype=element)
    raise ValueError(f"{key!r} is {json.dumps(value)[:40]}")


_SCALARS: dict[type, Callable[[Any], bool]] = {
    bool: lambda value: type(value) is bool,
    int: lambda value: type(value) is int and 0 <= value < _LARGEST,
    float: lambda value: type(value) in (int, float) and 0 <= value <= _LARGEST,
}
