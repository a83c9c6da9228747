"""Read and summarize the log that `JsonLines` writes. Needs no torch: logs are read on machines without GPUs too."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.dataloader.balance.metrics import LogRecord, log_key


def read_json_lines(path: Path) -> list[LogRecord]:
    """Read a log. An incomplete last line, of a job that was killed or is still writing, is skipped.

    Returns:
        The records in the order of the lines.

    Raises:
        DataError: there is no such file, or a line is not a record. Unknown fields are ignored.

    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; give a file that on_step=JsonLines(FILE) wrote"
        ) from error
    *complete, rest = lines
    records = [_record(line, f"{path}, line {number}") for number, line in enumerate(complete, 1)]
    if rest.endswith(b"}"):  # only its newline is missing
        records.append(_record(rest, f"{path}, line {len(lines)}"))
    return records


def cumulative_steps(records: Sequence[LogRecord]) -> NDArray[np.int64]:
    """Return how many steps of the job had been logged at each record: int64 [records], ascending.

    Each writer counts from 1, so where a job was resumed its steps are added to those before.
    """
    seen = np.array([record.seen for record in records], dtype=np.int64)
    resumed = np.flatnonzero(np.diff(seen) <= 0) + 1
    offsets = np.zeros_like(seen)
    offsets[resumed] = seen[resumed - 1]
    return seen + np.cumsum(offsets)


def column(records: Sequence[LogRecord], field: str) -> NDArray[np.float64]:
    """Return the values of a field: float64 [records]."""
    return np.array([getattr(record, field) for record in records], dtype=np.float64)


def typical_record(records: Sequence[LogRecord]) -> LogRecord:
    """Return the record with the median imbalance before balancing."""
    imbalance = [int(record.before.max()) / max(record.lower_bound, 1) for record in records]
    return records[int(np.argsort(imbalance, kind="stable")[(len(records) - 1) // 2])]


def _record(line: bytes, where: str) -> LogRecord:
    """Parse a line; `where` names it in the error message."""
    try:
        entry = _parse_json(line)
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


def _parse_json(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # json would call every line "line 1"
        raise ValueError("it is not JSON") from error


def _value(entry: dict[str, Any], field: "dataclasses.Field[Any]") -> Any:
    key = log_key(field)
    if key not in entry:
        raise ValueError(f"{key!r} is missing")
    value = entry[key]
    if field.type is int:
        is_valid = _is_count(value)
    elif field.type is float:
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    else:
        is_valid = isinstance(value, list) and len(value) > 0 and all(_is_count(load) for load in value)
        value = np.array(value, dtype=np.int64) if is_valid else value
    if not is_valid:
        raise ValueError(f"{key!r} is {json.dumps(value)[:40]}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
