"""Filters of events and users (k-core, shortest and longest history), and windows of long histories."""

from dataclasses import asdict, dataclass, replace

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import ITEM_ID, USER_ID
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.build.sequences import Sequences

_MAX_EVENTS = int(np.iinfo(np.int32).max)  # of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Which events and users to keep, and how to cut long histories. All values are numbers of events."""

    min_user_events: int = 1
    """k-core: users with fewer events are removed, repeatedly, until no user and no item has too few."""
    min_item_events: int = 1
    """k-core: items with fewer events are removed, repeatedly, until no user and no item has too few."""
    min_length: int = 1
    """Users with fewer events are left out, counting after the k-core."""
    max_length: int | None = None
    """Users with more events are left out, counting after the k-core; None: no limit."""
    window: int | None = None
    """Users with more events get several rows of at most this length; None: one row per user."""
    stride: int | None = None
    """Distance between the starts of consecutive windows; None: `window`."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 1 <= value <= _MAX_EVENTS:
                raise ConfigError(f"{name} must be between 1 and {_MAX_EVENTS}, got {value}")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ConfigError(
                f"max_length must be at least min_length, got max_length={self.max_length} and "
                f"min_length={self.min_length}"
            )
        if self.stride is not None and self.window is None:
            raise ConfigError(f"stride {self.stride} has no effect without window; set both")
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ConfigError(f"stride must be at most window ({self.window}), or events are lost; got {self.stride}")

    @property
    def overlap(self) -> int:
        """Number of events that a window shares with the one before."""
        return 0 if self.window is None or self.stride is None else self.window - self.stride


def k_core(buckets: Buckets, filters: Filters) -> int:
    """Remove users and items with too few events until none is left, and return the number of events removed.

    What remains is the largest set of events in which every user and every item has enough; it does not depend on the
    order of removal.
    """
    if filters.min_user_events == filters.min_item_events == 1:
        return 0
    items = np.unique(np.concatenate([np.unique(buckets.read(i, (ITEM_ID,))[ITEM_ID]) for i in range(len(buckets))]))
    num_removed, num_before = 0, -1
    while num_removed != num_before:
        num_before = num_removed
        events_of_item = np.zeros(len(items), dtype=np.int64)
        for index in range(len(buckets)):
            item_ids = buckets.read(index, (ITEM_ID,))[ITEM_ID]
            events_of_item += np.bincount(np.searchsorted(items, item_ids), minlength=len(items))
        for index in range(len(buckets)):
            columns = buckets.read(index, (USER_ID, ITEM_ID))
            is_kept = events_of_item[np.searchsorted(items, columns[ITEM_ID])] >= filters.min_item_events
            # All events of a user are in one bucket.
            _, codes = np.unique(columns[USER_ID], return_inverse=True)
            events_of_user = np.bincount(codes[is_kept], minlength=codes.max(initial=-1) + 1)
            num_removed += buckets.keep(index, is_kept & (events_of_user[codes] >= filters.min_user_events))
    return num_removed


def keep_lengths(sequences: Sequences, filters: Filters) -> Sequences:
    """Leave out users whose history is too short or too long."""
    lengths = sequences.lengths
    keep = (lengths >= filters.min_length) & (lengths <= (filters.max_length or _MAX_EVENTS))
    return sequences if keep.all() else sequences.take(keep)


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
