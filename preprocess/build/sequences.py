"""The events of a bucket -> sequences: one row per user, events in time order, rows in the order of the dataset.

Also timed prefixes of them, for replaying inference traffic: when users make requests, and their history by then. The
compiled loops run without the GIL.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import DataError
from evenrank.datasets.event_statistics import DURATIONS_MS
from evenrank.datasets.schema import ACTION, ITEM_ID, REQUEST_COLUMNS, TIMESTAMP_MS, USER_ID, user_hash
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.config import RequestRule
from evenrank.preprocess.read.keys import encode_keys, random_seed

REQUEST_SCHEMA = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in REQUEST_COLUMNS])
_MAX_EVENTS = int(np.iinfo(np.int32).max)  # of a bucket


@compiled
def order_events(
    codes: NDArray[np.int32], times: NDArray[np.int64], num_users: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Sort events by user (0..num_users-1), then by time; the sort is stable.

    Return offsets, int64 [users + 1], and order, int32 [events]: order[offsets[u] : offsets[u + 1]] are the indices of
    the events of user u, oldest first.
    """
    offsets = np.zeros(num_users + 1, dtype=np.int64)
    offsets[1:] = np.cumsum(np.bincount(codes, minlength=num_users))
    order = np.empty(len(codes), dtype=np.int32)
    next_position = offsets[:-1].copy()
    for event in range(len(codes)):
        order[next_position[codes[event]]] = event
        next_position[codes[event]] += 1
    for user in range(num_users):
        begin, end = offsets[user], offsets[user + 1]
        for position in range(begin + 1, end):
            if times[order[position]] < times[order[position - 1]]:
                events_of_user = order[begin:end].copy()
                order[begin:end] = events_of_user[np.argsort(times[events_of_user], kind="mergesort")]
                break
    return offsets, order


@compiled
def gather(
    column: NDArray[Any], order: NDArray[np.int32], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[Any]:
    """Concatenate column[order[begins[i] : ends[i]]] over all rows i."""
    values = np.empty(np.sum(ends - begins), dtype=column.dtype)
    position = 0
    for row in range(len(begins)):
        for offset in range(begins[row], ends[row]):
            values[position] = column[order[offset]]
            position += 1
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Rows as ranges of events: filters, splits and windows only change the ranges and copy no events.

    user_keys        7        3          from which `user_ids` follow
    begins, ends     0..2     2..5       offsets in `order`
    order            4 1      0 2 3      indices of events, oldest first
    events[name]     [e0 e1 e2 e3 e4]    in file order
    """

    user_keys: NDArray[np.int64]  # [rows]
    user_ids: NDArray[np.int64]  # [rows]
    begins: NDArray[np.int64]  # [rows]
    ends: NDArray[np.int64]  # [rows]
    order: NDArray[np.int32]  # [events]
    events: Mapping[str, NDArray[Any]]  # item_id, action, timestamp_ms and extra columns: [events] each
    windows: NDArray[np.int32]  # index of each row among those of its user: [rows]
    num_targets: NDArray[np.int32]  # number of last events of each row that are to be predicted: [rows]

    def __len__(self) -> int:
        return len(self.user_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of events of each row: int64 [rows]."""
        return self.ends - self.begins

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> "Sequences":
        """Return the rows selected by a mask [rows] or by indices."""
        per_row = ("user_keys", "user_ids", "begins", "ends", "windows", "num_targets")
        return replace(self, **{name: getattr(self, name)[rows] for name in per_row})

    def take_events(self, places: NDArray[np.bool_]) -> "Sequences":
        """Return the rows with the events selected by a mask of their places in `order`: [events]."""
        places_before = np.concatenate(([0], np.cumsum(places)))
        begins, ends = places_before[self.begins], places_before[self.ends]
        return replace(self, order=self.order[places], begins=begins, ends=ends)

    def values(self, name: str) -> NDArray[Any]:
        """Return the values of a column for the events of all rows, concatenated: [sum(lengths)]."""
        return gather(self.events[name], self.order, self.begins, self.ends)


def build_sequences(
    columns: Columns, user_ids: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> tuple[Sequences, int]:
    """Group the events of a bucket by the key of their user, oldest first; those of the same time stay in file order.

    `user_ids` returns the ids of users, given their keys.

    Returns:
        The sequences, ordered by (user_hash(key), key), and the number of events that repeat another.
    """
    num_events = len(columns[USER_ID])
    if num_events > _MAX_EVENTS:
        raise DataError(
            f"{num_events:,} events are of users whose hashes begin alike, more than {_MAX_EVENTS:,}; preprocess fewer "
            "events at once"
        )
    users, codes = encode_keys(columns[USER_ID], random_seed())
    ranks = np.empty(len(users), dtype=np.int32)
    sorted_users = np.lexsort((users, user_hash(users)))
    ranks[sorted_users] = np.arange(len(users), dtype=np.int32)
    offsets, order = order_events(ranks[codes], columns[TIMESTAMP_MS], len(users))
    sequences = Sequences(
        user_keys=users[sorted_users],
        user_ids=user_ids(users[sorted_users]),
        begins=offsets[:-1],
        ends=offsets[1:],
        order=order,
        events={name: values for name, values in columns.items() if name != USER_ID},
        windows=np.zeros(len(users), dtype=np.int32),
        num_targets=np.zeros(len(users), dtype=np.int32),
    )
    return sequences, _count_duplicates(offsets, order, columns[TIMESTAMP_MS], columns[ITEM_ID], columns[ACTION])


@compiled
def _count_duplicates(
    offsets: NDArray[np.int64],
    order: NDArray[np.int32],
    times: NDArray[np.int64],
    items: NDArray[np.int64],
    actions: NDArray[np.int32],
) -> int:
    """Count events that repeat another one with the same user, time, item and action."""
    count = 0
    for user in range(len(offsets) - 1):
        begin = offsets[user]
        for end in range(begin + 1, offsets[user + 1] + 1):
            if end < offsets[user + 1] and times[order[end]] == times[order[begin]]:
                continue
            if end - begin > 1:
                tied = [(items[event], actions[event]) for event in order[begin:end]]
                count += len(tied) - len(set(tied))
            begin = end
    return count


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
