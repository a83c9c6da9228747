"""Read and summarize the log that `JsonLines` writes. Needs no torch: logs are read on machines without GPUs too."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.dataloader.balance.metrics.log_record import LogRecord, RunRecord, parse_line


class BalanceLog(NamedTuple):
    """A log: the run, its records, and the number of lines that are none, such as the last one of a killed job."""

    run: RunRecord | None
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
    parsed: list[LogRecord | RunRecord] = []
    first_error = ""
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(parse_line(line))
        except ValueError as error:
            first_error = first_error or f"line {number} is not a record of balancing metrics: {error}"
    if lines and not parsed:
        raise DataError(f"{path} has no record; {first_error}; {remedy}")
    runs = [record for record in parsed if isinstance(record, RunRecord)]
    if len(runs) > 1:
        raise DataError(
            f"{path} has records of {len(runs)} runs, {runs[0].id} and {runs[1].id}; give one file for each run"
        )
    records = [record for record in parsed if isinstance(record, LogRecord)]
    return BalanceLog(runs[0] if runs else None, records, len(lines) - len(parsed))


def describe_log(records: Sequence[LogRecord]) -> str:
    """Return the numbers of steps and ranks."""
    steps, ranks = records[-1].seen, len(records[-1].before)
    return f"{steps:,} step{'s' * (steps != 1)} on {ranks:,} rank{'s' * (ranks != 1)}"


def column(records: Sequence[LogRecord], field: str) -> NDArray[np.float64]:
    """Return the values of a field: float64 [records]."""
    return np.array([getattr(record, field) for record in records], dtype=np.float64)


def typical_record(records: Sequence[LogRecord]) -> LogRecord:
    """Return the record with the median imbalance before balancing."""
    imbalance = [int(record.before.max()) / max(record.lower_bound, 1) for record in records]
    return records[int(np.argsort(imbalance, kind="stable")[(len(records) - 1) // 2])]
