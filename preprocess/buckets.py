"""Events of any number in bounded memory: dealt into buckets of users, each of which fits.

A bucket holds the users whose hash begins with its number, so that buckets one after the other are in the order of the
contract, however many there are. One bucket stays in memory; several are files, a file for each column of each.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.schema import USER_ID, user_hash

Columns = dict[str, NDArray[np.int64]]  # per column of events: [events]; int64 or int32

# Events that a bucket should hold at most: some 0.4 GB while it is built.
EVENTS_PER_BUCKET = 4_000_000


class Buckets:
    """Takes events batch by batch, in file order, and gives them back bucket by bucket, in file order within each.

    Args:
        folder: where bucket files go; made when it is needed, and removed by `close`.
        num_events: how many are expected; only the number of buckets depends on it.
        dtypes: of each column; `user_id` is one of them.

    """

    def __init__(self, folder: Path, num_events: int, dtypes: Mapping[str, str]) -> None:
        self._folder = folder
        self._dtypes = dict(dtypes)
        # A power of two, so that a bucket's number is the leading bits of the hash.
        self._bits = max(0, (num_events - 1) // EVENTS_PER_BUCKET).bit_length()
        self._batches: list[Columns] = []

    def __len__(self) -> int:
        return 1 << self._bits

    def append(self, batch: Columns) -> None:
        """Deal out a batch of events: [n] each."""
        if self._bits == 0:
            self._batches.append(batch)
            return
        numbers = user_hash(batch[USER_ID]) >> np.uint64(64 - self._bits)
        order = np.argsort(numbers.astype(np.uint16), kind="stable")  # a radix sort for 16-bit numbers
        ends = np.cumsum(np.bincount(numbers.astype(np.int64), minlength=len(self)))
        self._folder.mkdir(exist_ok=True)
        for name, values in batch.items():
            dealt = values[order]
            for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
                if begin < end:
                    with self._path(number, name).open("ab") as file:
                        dealt[begin:end].tofile(file)

    def __iter__(self) -> Iterator[Columns]:
        for number in range(len(self)):
            yield self.read(number, tuple(self._dtypes))

    def read(self, number: int, names: tuple[str, ...]) -> Columns:
        """Return some columns of a bucket."""
        if self._bits == 0:
            return {name: self._joined(name) for name in names}
        return {name: self._from_file(number, name) for name in names}

    def close(self) -> None:
        """Remove the bucket files."""
        self._batches.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _joined(self, name: str) -> NDArray[np.int64]:
        parts = [batch[name] for batch in self._batches]
        joined: NDArray[np.int64] = np.concatenate([np.empty(0, dtype=self._dtypes[name]), *parts])
        # The batches are not kept beside it: they would be there twice.
        for batch in self._batches:
            batch[name] = joined[:0]
        if self._batches:
            self._batches[0][name] = joined
        return joined

    def _from_file(self, number: int, name: str) -> NDArray[np.int64]:
        path = self._path(number, name)
        if not path.exists():
            return np.empty(0, dtype=self._dtypes[name])
        values: NDArray[np.int64] = np.fromfile(path, dtype=self._dtypes[name])
        return values

    def _path(self, number: int, name: str) -> Path:
        return self._folder / f"{number:05d}.{name}"
