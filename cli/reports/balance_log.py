"""The log that `JsonLines` wrote, read back and summed up. Needs no torch: logs are read where there are no GPUs."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord:
    """One line: the last few steps summed up, and the loads of the last of them. W is the number of ranks."""

    epoch: int  # of the last step
    step: int  # its number, which starts again with each epoch, and where a job was resumed
    seen: int  # steps that the writer had seen, with the last one
    steps: int  # that are summed up, at least 1
    ratio_before: float  # mean over them, of the heaviest rank's load to the lower bound
    ratio_after: float  # likewise, balanced
    worst_after: float
    speedup: float  # the cost model's expectation
    heaviest_before: float  # the heaviest rank's load, mean a step
    heaviest_after: float
    samples: float  # of all ranks, mean a step
    moved_samples: float  # part of them
    tokens: float  # of all ranks, mean a step
    moved_tokens: float  # part of them
    bytes: float  # of all ranks, mean a step
    moved_bytes: float  # bytes, mean a step
    bytes_between_hosts: float  # of those, mean a step
    gather_seconds: float  # mean a step, as are the others
    plan_seconds: float
    exchange_seconds: float
    waited_seconds: float
    before: NDArray[np.int64]  # [W]: load of each rank in the last step
    after: NDArray[np.int64]  # [W]: likewise, balanced
    lower_bound: int  # of the last step


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSummary:
    """All records together, each with the weight of its steps; fields as those of LogRecord."""

    records: int
    ratio_before: float
    ratio_after: float
    worst_after: float
    speedup: float
    samples: float
    moved_samples: float
    tokens: float
    moved_tokens: float
    bytes: float
    moved_bytes: float
    bytes_between_hosts: float
    gather_seconds: float
    plan_seconds: float
    exchange_seconds: float
    waited_seconds: float


def read_json_lines(path: Path) -> list[LogRecord]:
    """Read a log in the order of its lines. A torn last line, of a job that was killed or still writes, is left out.

    Raises:
        DataError: there is no such file, or a line is not a record; fields that are not known do not matter.

    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; give a file that on_step=JsonLines(FILE) wrote"
        ) from error
    *whole, rest = lines  # what is behind the last end of a line is torn, unless it can be read
    records = [_record(line, f"{path}, line {number}") for number, line in enumerate(whole, 1)]
    if rest.endswith(b"}"):
        records.append(_record(rest, f"{path}, line {len(lines)}"))
    return records


def places(records: Sequence[LogRecord]) -> NDArray[np.int64]:
    """Return how many steps the log had seen at each record: int64 [records], ascending.

    Writers count from 1, so where a job was resumed its steps are added to those before.
    """
    seen = np.array([record.seen for record in records], dtype=np.int64)
    resumed = np.flatnonzero(np.diff(seen) <= 0) + 1
    offsets = np.zeros_like(seen)
    offsets[resumed] = seen[resumed - 1]
    return seen + np.cumsum(offsets)


def column(records: Sequence[LogRecord], field: str) -> NDArray[np.float64]:
    """Return one field of every record: float64 [records]."""
    return np.array([getattr(record, field) for record in records], dtype=np.float64)


def sum_up(records: Sequence[LogRecord]) -> LogSummary:
    """Sum up a log of at least one record; exact where each step is in one record (`window` equal to `every`)."""
    steps = column(records, "steps")

    def mean(field: str) -> float:
        return float(np.average(column(records, field), weights=steps))

    def part(moved: str, of: str) -> float:
        weights = steps * column(records, of)
        return float(np.average(column(records, moved), weights=weights)) if weights.any() else 0.0

    after = mean("heaviest_after")
    return LogSummary(
        records=len(records),
        ratio_before=mean("ratio_before"),
        ratio_after=mean("ratio_after"),
        worst_after=float(column(records, "worst_after").max()),
        speedup=mean("heaviest_before") / after if after else 1.0,
        samples=mean("samples"),
        moved_samples=part("moved_samples", "samples"),
        tokens=mean("tokens"),
        moved_tokens=part("moved_tokens", "tokens"),
        bytes=mean("bytes"),
        moved_bytes=mean("moved_bytes"),
        bytes_between_hosts=mean("bytes_between_hosts"),
        gather_seconds=mean("gather_seconds"),
        plan_seconds=mean("plan_seconds"),
        exchange_seconds=mean("exchange_seconds"),
        waited_seconds=mean("waited_seconds"),
    )


def typical(records: Sequence[LogRecord]) -> LogRecord:
    """Return the record whose loads were as far out of balance as the median, which neither flatters nor frightens."""
    imbalance = [int(record.before.max()) / max(record.lower_bound, 1) for record in records]
    return records[int(np.argsort(imbalance, kind="stable")[(len(records) - 1) // 2])]


def _record(line: bytes, where: str) -> LogRecord:
    try:
        entry = _parsed(line)
        if not isinstance(entry, dict):
            raise ValueError("it is not an object")
        values = {field.name: _value(entry, field) for field in dataclasses.fields(LogRecord)}
        if values["steps"] < 1:
            raise ValueError("'steps' is below 1")
        if len(values["before"]) != len(values["after"]):
            raise ValueError("'before' and 'after' differ in length")
    except ValueError as error:
        raise DataError(
            f"{where} is not a record of balancing metrics: {error}; give a file that on_step=JsonLines(FILE) wrote"
        ) from error
    return LogRecord(**values)


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # Python's own words would tell of another line 1
        raise ValueError("it is not JSON") from error


def _value(entry: dict[str, Any], field: "dataclasses.Field[Any]") -> Any:
    if field.name not in entry:
        raise ValueError(f"{field.name!r} is missing")
    value = entry[field.name]
    if field.type is int:
        ok = _is_count(value)
    elif field.type is float:
        ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    else:
        ok = isinstance(value, list) and len(value) > 0 and all(_is_count(load) for load in value)
        value = np.array(value, dtype=np.int64) if ok else value
    if not ok:
        raise ValueError(f"{field.name!r} is {json.dumps(value)[:40]}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
