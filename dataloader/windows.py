"""Windows of shards -> groups of samples, read ahead by threads."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.collate.spans import Pick
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import Shard

Place = tuple[int, int]  # in a shard: windows that are done, samples taken of the next one


class Window(NamedTuple):
    """The buffer of a shuffle."""

    store: SequenceStore
    first: int  # row of the split that the store's first is
    rows: NDArray[np.int64]  # of the store, those that make samples, in the order in which they come


Submit = Callable[[Callable[[], Window]], Callable[[], Window]]


@contextlib.contextmanager
def reading_ahead(num_workers: int) -> Iterator[Submit]:
    """Give a function that begins to read a window, and returns one that waits for it."""
    if not num_workers:
        yield lambda read: read
        return
    executor = ThreadPoolExecutor(num_workers, thread_name_prefix="evenrank-stream")
    try:
        yield lambda read: executor.submit(read).result
    finally:
        executor.shutdown(cancel_futures=True)


class Reader:
    """Reads a shard from a place on; holds one window, and with workers the next."""

    def __init__(self, shard: Shard, place: Place, load: Callable[[Shard, int], Window], submit: Submit) -> None:
        self.shard = shard
        self.place = place
        self._load = load
        self._submit = submit
        self._window: Window | None = None
        self._next = submit(partial(load, shard, place[0]))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left of the shard."""
        return self.place[0] >= self.shard.num_windows

    def take(self, most: int) -> Window | None:
        """Take up to `most` samples, all of one window; None if there are no more."""
        while not self.is_done:
            turn, taken = self.place
            if self._window is None:
                self._window = self._next()
                if turn + 1 < self.shard.num_windows:
                    self._next = self._submit(partial(self._load, self.shard, turn + 1))
            window = self._window
            rows = window.rows[taken : taken + most]
            self.place = (turn, taken + len(rows))
            if self.place[1] >= len(window.rows):
                self.place, self._window = (turn + 1, 0), None
            if len(rows):
                return window._replace(rows=rows)
        return None


def take_groups(
    readers: Iterator[Reader], open_shards: int, size: int, places: dict[int, Place]
) -> Iterator[tuple[list[Pick], NDArray[np.int64]]]:
    """Take groups of `size` samples, the last perhaps smaller, from all open shards alike; keep `places` up to date.

    What is open follows from the places: the first shards that are not done. So a stream that goes on from saved places
    yields the same groups.
    """
    opened: list[Reader] = []
    while True:
        picks: list[Pick] = []
        ids: list[NDArray[np.int64]] = []
        count = 0
        while count < size:
            opened += itertools.islice(readers, open_shards - len(opened))
            if not opened:
                break
            share = -(-(size - count) // len(opened))
            for reader in list(opened):
                taken = reader.take(min(share, size - count)) if count < size else None
                if taken is not None:
                    slots = np.arange(count, count + len(taken.rows))
                    picks.append(Pick(taken.store, taken.rows, slots))
                    ids.append(taken.first + taken.rows)
                    count += len(taken.rows)
                places[reader.shard.number] = reader.place
                if reader.is_done:
                    opened.remove(reader)
        if not count:
            return
        yield picks, np.concatenate(ids)
