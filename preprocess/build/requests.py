"""Timed slices of histories, for replaying inference traffic: when a user asks, and how much is known by then."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import TIMESTAMP_MS
from evenrank.preprocess.build.sequences import Sequences

_DAY_MS = 86_400_000
_SCHEMA = pa.schema(
    [pa.field(name, pa.int64(), nullable=False) for name in ("user_id", "request_ts_ms", "history_end")]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRule:
    """When a user makes a request: at the first event, and then at each event this long after the last request's."""

    seconds: float
    by_date: bool = False  # history, and requests, begin anew with each day, in UTC

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 1e9:
            raise ConfigError(f"requests must be above 0 seconds and below 10^9 apart, got {self.seconds:g}")


class RequestWriter:
    """Writes `requests.parquet`: user_id, request_ts_ms, history_end, each int64; rows as users come, then by time.

    `history_end` is how many of the user's events come before that of the request; with `by_date`, of that day's.
    """

    def __init__(self, path: Path, rule: RequestRule) -> None:
        self._rule = rule
        self._writer = pq.ParquetWriter(path, _SCHEMA, compression="zstd")

    def append(self, sequences: Sequences) -> None:
        """Write the requests of some users' whole histories."""
        times = sequences.values(TIMESTAMP_MS)
        rows, request_times, history_ends = find_requests(
            np.concatenate(([0], np.cumsum(sequences.lengths))),
            times,
            round(self._rule.seconds * 1000),
            _DAY_MS if self._rule.by_date else 0,
        )
        columns = [sequences.user_ids[rows], request_times, history_ends]
        self._writer.write_table(pa.table([pa.array(column) for column in columns], schema=_SCHEMA))

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()


@compiled
def find_requests(
    offsets: NDArray[np.int64], times: NDArray[np.int64], gap: int, day: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the requests of sequences.

    Args:
        offsets: int64 [rows + 1], where each row's events begin.
        times: int64 [events], ascending within a row.
        gap: the least time from one request to the next of a row, in the unit of `times`.
        day: after how long history begins anew, counted from time 0; 0: never.

    Returns:
        The row, the time and the number of events before it, of each request: int64 [requests] each.

    """
    rows = np.empty(len(times), dtype=np.int64)
    request_times = np.empty(len(times), dtype=np.int64)
    history_ends = np.empty(len(times), dtype=np.int64)
    count = 0
    for row in range(len(offsets) - 1):
        begin = offsets[row]
        last = -1
        for event in range(offsets[row], offsets[row + 1]):
            if day > 0 and event > begin and times[event] // day != times[begin] // day:
                begin, last = event, -1
            if last < 0 or times[event] - times[last] >= gap:
                rows[count], request_times[count], history_ends[count] = row, times[event], event - begin
                count += 1
                last = event
    return rows[:count].copy(), request_times[:count].copy(), history_ends[:count].copy()
