"""Filters of events and users (k-core, shortest and longest history), and windows of long histories."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenrank.core.value_counts import ValueCounts, count_values
from evenrank.datasets.schema import ITEM_ID, USER_ID
from evenrank.preprocess.build.events import Buckets
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.engine import Engine
from evenrank.preprocess.options import Filters
from evenrank.preprocess.read.keys import KeyTable, encode_keys, random_seed

_MAX_EVENTS = int(np.iinfo(np.int32).max)  # of a row
_UNKNOWN, _RARE, _LENGTH = 1, 2, 3  # reasons to leave out events


def drop_unknown(buckets: Buckets, known: Mapping[str, KeyTable], engine: Engine) -> int:
    """Leave out events whose values of some columns are not in a table, and return their number."""
    if not known:
        return 0
    dropped = engine.map(partial(_drop_unknown, buckets, known), range(len(buckets)), stage="finding unknown values")
    return sum(count for _, count in dropped)


def _drop_unknown(buckets: Buckets, known: Mapping[str, KeyTable], index: int) -> int:
    columns = buckets.read(index, known)
    are_known = [table.find(columns[name]) >= 0 for name, table in known.items()]
    return buckets.keep(index, np.logical_and.reduce(are_known), reason=_UNKNOWN)


def k_core(buckets: Buckets, filters: Filters, engine: Engine) -> int:
    """Remove users and items with too few events until none is left, and return the number of events removed.

    What remains is the largest set of events in which every user and every item has enough; it does not depend on the
    order of removal, nor on whether some were removed by a run that was killed.
    """
    if filters.min_user_events == filters.min_item_events == 1:
        return 0
    num_removed, num_before = 0, -1
    while num_removed != num_before:
        num_before, items = num_removed, ValueCounts()
        for _, (values, counts) in engine.map(
            partial(_count_items, buckets), range(len(buckets)), stage="k-core: counting items", keep=False
        ):
            items.add(values, counts)
        values, counts = items.result()
        frequent = KeyTable(values[counts >= filters.min_item_events])
        remove = partial(_remove_rare, buckets, frequent, filters.min_user_events)
        removed = engine.map(remove, range(len(buckets)), stage="k-core: leaving out events", keep=False)
        num_removed = sum(count for _, count in removed)
    return num_removed


def _count_items(buckets: Buckets, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return count_values(buckets.read(index, (ITEM_ID,))[ITEM_ID])


def _remove_rare(buckets: Buckets, frequent: KeyTable, min_user_events: int, index: int) -> int:
    """Leave out all events but those of frequent items, and of users with enough of them."""
    columns = buckets.read(index, (USER_ID, ITEM_ID))
    is_kept = frequent.find(columns[ITEM_ID]) >= 0
    # All events of a user are in one bucket.
    users, codes = encode_keys(columns[USER_ID], random_seed())
    events_of_user = np.bincount(codes[is_kept], minlength=len(users))
    return buckets.keep(index, is_kept & (events_of_user[codes] >= min_user_events), reason=_RARE)


def keep_lengths(buckets: Buckets, filters: Filters, engine: Engine) -> int:
    """Leave out users whose history is too short or too long, and return their number."""
    if filters.min_length == 1 and filters.max_length is None:
        return 0
    left_out = engine.map(partial(_keep_lengths, buckets, filters), range(len(buckets)), stage="leaving out users")
    return sum(count for _, count in left_out)


def _keep_lengths(buckets: Buckets, filters: Filters, index: int) -> int:
    users, codes = encode_keys(buckets.read(index, (USER_ID,))[USER_ID], random_seed())
    lengths = np.bincount(codes, minlength=len(users))
    keep = (lengths >= filters.min_length) & (lengths <= (filters.max_length or _MAX_EVENTS))
    buckets.keep(index, keep[codes], reason=_LENGTH)
    return len(np.unique(buckets.read(index, (USER_ID,), reason=_LENGTH)[USER_ID]))  # also of a run that was killed


def cut_windows(sequences: Sequences, filters: Filters) -> Sequences:
    """Cut the rows of users with more than `window` events into windows that start every `stride` events.

        8 events, window 4, stride 3:    0 1 2 3
                                               3 4 5 6
                                                     6 7

    The last window ends with the newest event and may be shorter. `windows` becomes the index of each row's window.
    """
    if filters.window is None:
        return sequences
    stride = filters.stride or filters.window
    lengths = sequences.lengths
    counts = 1 + np.maximum(0, -(-(lengths - filters.window) // stride))
    rows = np.repeat(np.arange(len(sequences)), counts)
    windows = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = sequences.take(rows)
    begins = cut.begins + windows * stride
    return replace(
        cut, begins=begins, ends=np.minimum(begins + filters.window, cut.ends), windows=windows.astype(np.int32)
    )
