"""Read and summarize the log that `JsonLines` writes. Needs no torch: logs are read on machines without GPUs too."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.dataloader.balance.metrics import LogRecord, parse_record


class BalanceLog(NamedTuple):
    """The records of a log, and the number of lines that are none, such as the last one of a job that was killed."""

    records: list[LogRecord]
    skipped: int


def read_json_lines(path: Path) -> BalanceLog:
    """Read a log. Lines that cannot be read are skipped and counted; unknown fields are ignored."""
    remedy = "give a file that on_step=JsonLines(FILE) wrote"
    if path.exists() and not path.is_file():  # a pipe would never end
        raise DataError(f"{path} is not a regular file; {remedy}")
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from error
    records, first_error = [], ""
    for number, line in enumerate(lines, 1):
        try:
            records.append(parse_record(line))
        except ValueError as error:
            first_error = first_error or f"line {number} is not a record of balancing metrics: {error}"
    if lines and not records:
        raise DataError(f"{path} has no record; {first_error}; {remedy}")
    return BalanceLog(records, len(lines) - len(records))


def describe_log(records: Sequence[LogRecord]) -> str:
    """Return the numbers of steps and ranks; several numbers of ranks if the job was resumed on another number."""
    steps = int(cumulative_steps(records)[-1])
    counts = [count for count, _ in groupby(len(record.before) for record in records)]
    ranks = ", then ".join(f"{count:,}" for count in counts)
    return f"{steps:,} step{'s' * (steps != 1)} on {ranks} rank{'s' * (counts[-1] != 1)}"


def cumulative_steps(records: Sequence[LogRecord]) -> NDArray[np.float64]:
    """Return how many steps of the job had been logged at each record: float64 [records], ascending.

    Each writer counts from 1, so where a job was resumed its steps are added to those before.
    """
    seen = column(records, "seen")
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
