"""One bucket's events -> sequences: a row per user, events in time order, rows in the order of the contract."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, user_hash
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.build.grouping import count_duplicates, encode_users, first_at_or_after, gather, order_events


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Rows that point into events: filters, splits and windows change where they point, and copy nothing.

    user_ids         7        3
    begins, ends     0..2     2..5       places in `order`
    order            4 1      0 2 3      numbers of events, oldest first
    events[name]     [e0 e1 e2 e3 e4]    in file order
    """

    user_ids: NDArray[np.int64]  # [rows]
    begins: NDArray[np.int64]  # [rows]
    ends: NDArray[np.int64]  # [rows]
    order: NDArray[np.int32]  # [events]
    events: Mapping[str, NDArray[np.int64]]  # item_id, action, timestamp_ms, extra columns: [events]
    windows: NDArray[np.int32]  # [rows]: number of the row among those of its user, from 0
    num_targets: NDArray[
        np.int32
    ]  # [rows]: how many of the last events are to be predicted; 0 where all rows are alike

    def __len__(self) -> int:
        return len(self.user_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events of each row: int64 [rows]."""
        return self.ends - self.begins

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> "Sequences":
        """Return some rows: by a mask [rows], or by their numbers."""
        return replace(
            self,
            user_ids=self.user_ids[rows],
            begins=self.begins[rows],
            ends=self.ends[rows],
            windows=self.windows[rows],
            num_targets=self.num_targets[rows],
        )

    def values(self, name: str) -> NDArray[np.int64]:
        """Return a column of all rows' events, one row behind the other: [sum(lengths)]."""
        return gather(self.events[name], self.order, self.begins, self.ends)

    def first_at_or_after(self, boundary_ms: int) -> NDArray[np.int64]:
        """Return the place of each row's first event at or after a time, `ends` if there is none: int64 [rows]."""
        return first_at_or_after(self.begins, self.ends, self.order, self.events[TIMESTAMP_MS], boundary_ms)


def build_sequences(columns: Columns) -> tuple[Sequences, int]:
    """Group a bucket's events by user, oldest first, those of one time in file order.

    Args:
        columns: the bucket's events in file order.

    Returns:
        The sequences, in the order of (user_hash(user_id), user_id), and how many events are duplicates of others.

    """
    users, codes = encode_users(columns[USER_ID])
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
