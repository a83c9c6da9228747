"""Events of any number in bounded memory: dealt into buckets of users, each of which fits.

A bucket holds the users whose hash begins with its number, so that buckets one after the other are in the order of the
contract, however many there are. What is dealt stays in memory up to a limit; then all of it goes to files, one a
bucket, and memory fills anew.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.schema import USER_ID, user_hash

Columns = dict[str, NDArray[np.int64]]  # per column of events: [events]; int64 or int32

# Events that a bucket should hold at most: some 0.3 GB while it is built.
EVENTS_PER_BUCKET = 4_000_000
# What may wait in memory, over all buckets.
BYTES_IN_MEMORY = 400 << 20

_INT32 = np.iinfo(np.int32)


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
        self._parts: list[list[Columns]] = [[] for _ in range(len(self))]  # per bucket, what is in memory
        self._num_bytes = 0  # of them
        self._num_spilled = [0] * len(self)  # per bucket: parts in its file

    def __len__(self) -> int:
        return 1 << self._bits

    @property
    def names(self) -> tuple[str, ...]:
        """The columns."""
        return tuple(self._dtypes)

    def append(self, batch: Columns) -> None:
        """Deal out a batch of events: [n] each."""
        numbers = np.zeros(len(batch[USER_ID]), dtype=np.uint16)
        if self._bits:
            numbers = (user_hash(batch[USER_ID]) >> np.uint64(64 - self._bits)).astype(np.uint16)
        order = np.argsort(numbers, kind="stable") if self._bits else slice(None)  # a radix sort for 16-bit numbers
        ends = np.cumsum(np.bincount(numbers, minlength=len(self)))
        # Narrow before dealing: half of the bytes to move, to keep and to spill.
        dealt = {name: _narrowed(values)[order] for name, values in batch.items()}
        for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                self._parts[number].append({name: values[begin:end] for name, values in dealt.items()})
        self._num_bytes += sum(values.nbytes for values in dealt.values())
        if self._num_bytes > BYTES_IN_MEMORY:
            self._spill()

    def __iter__(self) -> Iterator[Columns]:
        for number in range(len(self)):
            yield self.read(number, tuple(self._dtypes))

    def read(self, number: int, names: tuple[str, ...]) -> Columns:
        """Return some columns of a bucket."""
        parts = [*self._spilled(number), *self._parts[number]]
        return {
            name: np.concatenate([np.empty(0, dtype=dtype), *(part[name] for part in parts)], dtype=dtype)
            for name, dtype in self._dtypes.items()
            if name in names
        }

    def close(self) -> None:
        """Forget everything, and remove the bucket files."""
        self._parts = [[] for _ in range(len(self))]
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spill(self) -> None:
        self._folder.mkdir(exist_ok=True)
        for number, parts in enumerate(self._parts):
            with self._path(number).open("ab") as file:
                for part in parts:
                    for name in self._dtypes:
                        np.save(file, part[name])
            self._num_spilled[number] += len(parts)
            parts.clear()
        self._num_bytes = 0

    def _spilled(self, number: int) -> Iterator[Columns]:
        if self._num_spilled[number]:
            with self._path(number).open("rb") as file:
                for _ in range(self._num_spilled[number]):
                    yield {name: np.load(file) for name in self._dtypes}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.npy"


def _narrowed(values: NDArray[np.int64]) -> NDArray[np.int64]:
    if values.dtype == np.int64 and len(values) and values.min() >= _INT32.min and values.max() <= _INT32.max:
        return values.astype(np.int32)
    return values
