"""What is left out, and what is cut: k-core, shortest and longest history, windows of one long user."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import ITEM_ID, USER_ID
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.build.sequences import Sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """What stays. Lengths are events of a user."""

    min_user_events: int = 1  # k-core: users with fewer events go, with their events, ...
    min_item_events: int = 1  # ... and items with fewer events, until nothing changes
    min_length: int = 1  # users with fewer events, once the k-core is found, go
    max_length: int | None = None  # users with more go; None: nobody does
    window: int | None = None  # rows of at most so many events of a user; None: one row per user
    stride: int | None = None  # events from one window's beginning to the next; None: as many as a window has

    def __post_init__(self) -> None:
        for name in ("min_user_events", "min_item_events", "min_length", "max_length", "window", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ConfigError(f"max_length must not be below min_length, got {self.max_length} and {self.min_length}")
        if self.stride is not None and self.window is None:
            raise ConfigError("stride goes with window; give both")
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ConfigError(f"stride must not be above window ({self.window}), or events are lost; got {self.stride}")


def k_core(buckets: Buckets, filters: Filters) -> list[NDArray[np.bool_]] | None:
    """Find the events that are left once no user and no item has too few.

    Users and items are removed in turn until nothing changes; the result, the largest such set, does not depend on the
    order in which that is done.

    Returns:
        Per bucket, bool [events]; None if no filter asks for it.

    """
    if filters.min_user_events == 1 and filters.min_item_events == 1:
        return None
    items = np.unique(np.concatenate([np.unique(buckets.read(n, (ITEM_ID,))[ITEM_ID]) for n in range(len(buckets))]))
    kept = [np.ones(len(buckets.read(n, (USER_ID,))[USER_ID]), dtype=bool) for n in range(len(buckets))]
    left, before = sum(int(mask.sum()) for mask in kept), -1
    while left != before:
        before = left
        counts = np.zeros(len(items), dtype=np.int64)
        for number, mask in enumerate(kept):
            item_ids = buckets.read(number, (ITEM_ID,))[ITEM_ID]
            counts += np.bincount(np.searchsorted(items, item_ids[mask]), minlength=len(items))
        for number, mask in enumerate(kept):
            columns = buckets.read(number, (USER_ID, ITEM_ID))
            mask &= counts[np.searchsorted(items, columns[ITEM_ID])] >= filters.min_item_events
            # All events of a user are in one bucket.
            _, codes = np.unique(columns[USER_ID], return_inverse=True)
            per_user = np.bincount(codes[mask], minlength=codes.max(initial=-1) + 1)
            mask &= per_user[codes] >= filters.min_user_events
        left = sum(int(mask.sum()) for mask in kept)
    return kept


def keep_lengths(sequences: Sequences, filters: Filters) -> Sequences:
    """Leave out users with too short or too long a history."""
    lengths = sequences.lengths
    keep = lengths >= filters.min_length
    if filters.max_length is not None:
        keep &= lengths <= filters.max_length
    return sequences if keep.all() else sequences.take(keep)


def cut_windows(sequences: Sequences, filters: Filters) -> Sequences:
    """Make several rows of a user with more than `window` events: one begins every `stride` events.

        8 events, window 4, stride 3:    0 1 2 3
                                               3 4 5 6
                                                     6 7

    The last window holds the newest event and may be shorter. A row keeps the number of its window.
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
