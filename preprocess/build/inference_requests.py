"""Timed prefixes of histories, for replaying inference traffic: when users make requests, and their history by then."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.schema import REQUEST_COLUMNS, TIMESTAMP_MS
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.options import RequestRule

REQUEST_SCHEMA = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in REQUEST_COLUMNS])


def request_table(sequences: Sequences, rule: RequestRule) -> pa.Table:
    """Return the requests of users in their order, then in time order, given their whole histories.

    `history_end` is the number of the user's events before the event of the request; with `by_date`, the number of
    those on the same day.
    """
    offsets = np.concatenate(([0], np.cumsum(sequences.lengths)))
    gap_ms, day_ms = round(rule.seconds * 1000), DURATIONS_MS["d"] if rule.by_date else 0
    rows, times, history_ends = find_requests(offsets, sequences.values(TIMESTAMP_MS), gap_ms, day_ms)
    columns = [sequences.user_ids[rows], times, history_ends]
    return pa.table([pa.array(column) for column in columns], schema=REQUEST_SCHEMA)


@compiled
def find_requests(
    offsets: NDArray[np.int64], times: NDArray[np.int64], gap: int, day: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the requests of rows with the events offsets[row] : offsets[row + 1], whose times ascend.

    Two requests of a row are at least a `gap` apart, in the unit of `times`. Histories start anew at the multiples of a
    `day`, unless it is 0. Return each request's row, time, and number of events before it: int64 [requests] each.
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
