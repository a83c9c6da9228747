"""`take_batches`: windows of shards, which are shuffle buffers -> the samples of batches."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.collate.gather import StoreRows
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import Shard


class ShardPosition(NamedTuple):
    """Position of an epoch in a shard: `samples_taken` are consumed of the window after `windows_done`."""

    windows_done: int = 0
    samples_taken: int = 0


class Window(NamedTuple):
    """A shuffle buffer, or the part of it that goes into a batch."""

    store: SequenceStore
    first: int
    """Row of the split that is the store's row 0."""
    rows: NDArray[np.int64]
    """The store's rows that are samples, in the epoch's order."""


Read = Callable[[], Window]


class ShardReader:
    """Reads a shard from a position on; keeps one window in memory, and with workers also the next one."""

    def __init__(self, shard: Shard, position: ShardPosition, read: Callable[[Shard, int], Read]) -> None:
        self.shard = shard
        self.position = position
        self._read = read
        self._window: Window | None = None
        self._next_window = read(shard, position.windows_done)

    @property
    def is_done(self) -> bool:
        """Whether all samples of the shard are taken."""
        return self.position.windows_done >= self.shard.num_windows

    def take(self, max_samples: int) -> Window | None:
        """Take up to `max_samples` samples, all from one window; None if no samples are left."""
        while not self.is_done:
            done, taken = self.position
            if self._window is None:
                self._window = self._next_window()
                if done + 1 < self.shard.num_windows:
                    self._next_window = self._read(self.shard, done + 1)
            window = self._window
            rows = window.rows[taken : taken + max_samples]
            self.position = ShardPosition(done, taken + len(rows))
            if self.position.samples_taken >= len(window.rows):
                self.position, self._window = ShardPosition(done + 1, 0), None
            if len(rows):
                return window._replace(rows=rows)
        return None


def take_batches(
    readers: Iterator[ShardReader], open_shards: int, batch_size: int, positions: dict[int, ShardPosition]
) -> Iterator[tuple[list[StoreRows], NDArray[np.int64]]]:
    """Yield the samples of a batch by window, and their rows in the split: int64 [n]; the last batch may have fewer.

    Batches have equal shares of the open shards, the first `open_shards` that are not done. These follow from the
    positions alone, so a resumed stream yields the same batches. `positions`, by index of the shard, are updated before
    a batch is yielded.
    """
    opened: list[ShardReader] = []
    while True:
        groups: list[StoreRows] = []
        sample_ids: list[NDArray[np.int64]] = []
        num_samples = 0
        while num_samples < batch_size:
            opened += itertools.islice(readers, open_shards - len(opened))
            if not opened:
                break
            share = -(-(batch_size - num_samples) // len(opened))
            for reader in list(opened):
                max_samples = min(share, batch_size - num_samples)
                window = reader.take(max_samples) if max_samples else None
                if window is not None:
                    sample_indices = np.arange(num_samples, num_samples + len(window.rows))
                    groups.append(StoreRows(window.store, window.rows, sample_indices))
                    sample_ids.append(window.first + window.rows)
                    num_samples += len(window.rows)
                positions[reader.shard.index] = reader.position
                if reader.is_done:
                    opened.remove(reader)
        if not num_samples:
            return
        yield groups, np.concatenate(sample_ids)
