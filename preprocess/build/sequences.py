"""The events of a bucket -> sequences: one row per user, events in time order, rows in the order of the dataset."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, user_hash
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.build.grouping import count_duplicates, encode_users, first_at_or_after, gather, order_events

_MAX_EVENTS = int(np.iinfo(np.int32).max)  # of a bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Rows as ranges of events: filters, splits and windows only change the ranges and copy no events.

    user_ids         7        3
    begins, ends     0..2     2..5       offsets in `order`
    order            4 1      0 2 3      indices of events, oldest first
    events[name]     [e0 e1 e2 e3 e4]    in file order
    """

    user_ids: NDArray[np.int64]
    """User of each row: [rows]."""
    begins: NDArray[np.int64]
    """Offset in `order` of each row's first event: [rows]."""
    ends: NDArray[np.int64]
    """Offset in `order` after each row's last event: [rows]."""
    order: NDArray[np.int32]
    """Indices of events, those of a user adjacent and oldest first: [events]."""
    events: Mapping[str, NDArray[np.int64]]
    """item_id, action, timestamp_ms and extra columns, in file order: [events] each."""
    windows: NDArray[np.int32]
    """Index of each row among those of its user: [rows]."""
    num_targets: NDArray[np.int32]
    """Number of last events of each row that are to be predicted; 0 if the split does not say: [rows]."""

    def __len__(self) -> int:
        return len(self.user_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of events of each row: int64 [rows]."""
        return self.ends - self.begins

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> "Sequences":
        """Return the rows selected by a mask [rows] or by indices."""
        return replace(
            self,
            user_ids=self.user_ids[rows],
            begins=self.begins[rows],
            ends=self.ends[rows],
            windows=self.windows[rows],
            num_targets=self.num_targets[rows],
        )

    def values(self, name: str) -> NDArray[np.int64]:
        """Return the values of a column for the events of all rows, concatenated: [sum(lengths)]."""
        return gather(self.events[name], self.order, self.begins, self.ends)

    def first_at_or_after(self, boundary_ms: int) -> NDArray[np.int64]:
        """Return the offset in `order` of each row's first event at or after a time, else its end: int64 [rows]."""
        return first_at_or_after(self.begins, self.ends, self.order, self.events[TIMESTAMP_MS], boundary_ms)


def build_sequences(columns: Columns) -> tuple[Sequences, int]:
    """Group the events of a bucket by user, oldest first; events of the same time stay in file order.

    Args:
        columns: the events of the bucket, in file order.

    Returns:
        The sequences, ordered by (user_hash(user_id), user_id), and the number of events that repeat another.

    Raises:
        DataError: there are more events than an int32 can number.

    """
    if len(columns[USER_ID]) > _MAX_EVENTS:
        raise DataError(
            f"{len(columns[USER_ID]):,} events are of users whose hashes begin alike, more than {_MAX_EVENTS:,}; "
            "preprocess fewer events at once"
        )
    users, codes = encode_users(columns[USER_ID], np.uint64(secrets.randbits(64)))
    ranks = np.empty(len(users), dtype=np.int32)
    sorted_users = np.lexsort((users, user_hash(users)))
    ranks[sorted_users] = np.arange(len(users), dtype=np.int32)
    times = columns[TIMESTAMP_MS]
    offsets, order = order_events(ranks[codes], times, len(users))
    duplicates = count_duplicates(offsets, order, times, columns[ITEM_ID], columns[ACTION])
    sequences = Sequences(
        user_ids=users[sorted_users],
        begins=offsets[:-1],
        ends=offsets[1:],
        order=order,
        events={name: values for name, values in columns.items() if name != USER_ID},
        windows=np.zeros(len(users), dtype=np.int32),
        num_targets=np.zeros(len(users), dtype=np.int32),
    )
    return sequences, duplicates
