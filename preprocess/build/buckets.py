"""Buckets of events on disk: any number of events in bounded memory.

The leading bits of a user's hash are the index of its bucket, so that consecutive buckets are in the row order of the
dataset, whatever their number, and each fits into memory. Runs are files of events sorted by bucket: a bucket is a
slice of each. Compiled code reads it, so that threads do not wait for the GIL after each call of the system.
"""

import errno
import itertools
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba.core import types
from numba.core.types import ExternalFunction
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.files import replacing
from evenrank.datasets.schema import TIMESTAMP_MS, USER_ID, user_hash
from evenrank.preprocess.read.keys import by_bucket

Columns = dict[str, NDArray[Any]]  # columns of events by name: int64, int32 or float32 [events]

EVENTS_PER_BUCKET = 1 << 20  # target size
_EVENTS_AT_ONCE = 1 << 18
_MAX_BITS = 16  # an index is a uint16
_INT32 = np.iinfo(np.int32)


class Run(NamedTuple):
    """A file of events, bucket by bucket; of each bucket, one column after the other, in log order.

    So it takes one call to read a bucket. Values are 32-bit words, or two of them, the lower one first.
    """

    path: Path
    num_words: Mapping[str, int]  # of a value of each column, in the order of the file
    offsets: NDArray[np.uint32]  # where each bucket begins, and the number of events: [buckets + 1]
    first_ms: int = 0  # to add to all times

    @property
    def num_events(self) -> int:
        """Number of events."""
        return int(self.offsets[-1])


def write_run(path: Path, events: Columns, num_bits: int, *, key: str = USER_ID) -> Run:
    """Write events, whose buckets are those of the column `key`, int64."""
    order, offsets = by_bucket(events[key], num_bits)
    narrow = {name: _narrowed(values) for name, values in events.items()}
    num_words = {name: values.itemsize // 4 for name, values in narrow.items()}
    ends = [*itertools.accumulate(num_words.values())]
    data = np.empty(len(order) * ends[-1], dtype=np.uint32)
    for values, end, width in zip(narrow.values(), ends, num_words.values(), strict=True):
        _place(values.view(np.uint32), width, order, offsets, end - width, ends[-1], data)
    with replacing(path) as new, new.open("wb") as file:
        # Not by `tofile`, which reports no error if the disk is full when it closes its own buffer.
        file.write(data.data)
    return Run(path, num_words, offsets.astype(np.uint32))


@compiled
def _place(
    words: NDArray[np.uint32],
    width: int,
    order: NDArray[np.int64],
    offsets: NDArray[np.int64],
    num_before: int,
    num_words: int,
    data: NDArray[np.uint32],
) -> None:
    """Put a column into the data of a run, whose events have `num_words`, `num_before` of them in earlier columns."""
    for bucket in range(len(offsets) - 1):
        begin, end = offsets[bucket], offsets[bucket + 1]
        position = begin * num_words + (end - begin) * num_before
        for place in range(begin, end):
            for word in range(width):
                data[position] = words[order[place] * width + word]
                position += 1


# Of the C library.
_open: Any = ExternalFunction("open", types.int32(types.intp, types.int32))
_pread: Any = ExternalFunction("pread", types.intp(types.int32, types.intp, types.intp, types.int64))
_close: Any = ExternalFunction("close", types.int32(types.int32))


@compiled
def _read_files(
    names: NDArray[np.uint8], begins: NDArray[np.int64], sizes: NDArray[np.int64], data: NDArray[np.uint32]
) -> int:
    """Read a part of some files, in bytes.

    Each name ends with a zero. Return the index of a file that cannot be read, or -1.
    """
    name, filled = 0, 0
    for index in range(len(begins)):
        file = _open(names[name:].ctypes.data, 0)
        num_read = 0
        while file >= 0 and num_read < sizes[index]:
            num_bytes = _pread(
                file, data.ctypes.data + filled + num_read, sizes[index] - num_read, begins[index] + num_read
            )
            if num_bytes <= 0:
                break
            num_read += num_bytes
        if file >= 0:
            _close(file)
        if num_read < sizes[index]:
            return index
        filled += num_read
        while names[name] != 0:
            name += 1
        name += 1
    return -1


@compiled
def _join(
    data: NDArray[np.uint32],
    begins: NDArray[np.int64],
    counts: NDArray[np.int64],
    widths: NDArray[np.int64],
    words: NDArray[np.uint32],
    width: int,
) -> None:
    """Fill a column with values of `width` words from slices of some data, in which they may have one word instead."""
    position = 0
    for part in range(len(begins)):
        for value in range(counts[part]):
            source = begins[part] + value * widths[part]
            words[position] = data[source]
            if width == 2:
                is_negative = (data[source] >> 31) > 0
                words[position + 1] = data[source + 1] if widths[part] == 2 else 0xFFFFFFFF * is_negative
            position += width


class _Slice(NamedTuple):
    """The events of a run in a bucket."""

    run: Run
    begin: int
    num_events: int


def _read_slices(slices: Sequence[_Slice], columns: Columns) -> None:
    """Fill columns with the events of some slices."""
    places, sizes, filled = defaultdict[str, list[tuple[int, int]]](list), list[int](), 0
    for run, _, num_events in slices:
        position = filled
        for name, width in run.num_words.items():
            places[name].append((position, width))
            position += num_events * width
            if name in columns:
                size = position - filled  # all up to the last column that is needed
        sizes.append(size)
        filled += size
    data = np.empty(filled, dtype=np.uint32)
    names = np.frombuffer(b"".join(os.fsencode(part.run.path) + b"\0" for part in slices), dtype=np.uint8)
    begins = [4 * part.begin * sum(part.run.num_words.values()) for part in slices]
    failed = _read_files(names, np.array(begins), 4 * np.array(sizes), data)
    if failed >= 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(slices[failed].run.path))
    counts = np.array([part.num_events for part in slices])
    for name, values in columns.items():
        begins, widths = np.array(places[name]).T.copy()
        _join(data, begins, counts, widths, values.view(np.uint32), values.itemsize // 4)
        if name == TIMESTAMP_MS and any(part.run.first_ms for part in slices):
            values += np.repeat([part.run.first_ms for part in slices], counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The events of all runs, one bucket at a time, in the order of the runs; some may be left out."""

    folder: Path  # for which events of each bucket are left out
    runs: Sequence[Run]
    dtypes: Mapping[str, str]  # of all columns
    num_bits: int
    key: str = USER_ID

    def __len__(self) -> int:
        return 1 << self.num_bits

    @property
    def largest(self) -> int:
        """The number of events of the largest bucket."""
        return int(np.sum([np.diff(run.offsets) for run in self.runs], axis=0, dtype=np.int64).max())

    def read(self, index: int, names: Collection[str] = (), *, reason: int = 0) -> Columns:
        """Return the named columns, or all, of the events of a bucket that are left, or were left out for a reason."""
        names = [name for name in self.dtypes if not names or name in names]
        limits = [(run, *run.offsets[index : index + 2].tolist()) for run in self.runs]
        slices = [_Slice(run, begin, end - begin) for run, begin, end in limits if begin < end]
        ends = [0, *itertools.accumulate(part.num_events for part in slices)]
        columns = {name: np.empty(ends[-1], dtype=self.dtypes[name]) for name in names}
        # A few slices at a time, so that little is in memory twice.
        for _, some in itertools.groupby(range(len(slices)), lambda number: ends[number] // _EVENTS_AT_ONCE):
            first, last = (numbers := [*some])[0], numbers[-1]
            _read_slices(
                slices[first : last + 1],
                {name: values[ends[first] : ends[last + 1]] for name, values in columns.items()},
            )
        if not (reasons := self._reasons(index)).exists():
            return columns
        is_read = np.fromfile(reasons, dtype=np.uint8) == reason
        return {name: values[is_read] for name, values in columns.items()}

    def read_range(self, index: int, num_bits: int) -> Columns:
        """Return the events of the keys whose hashes begin with these bits, the number `index`."""
        shift = self.num_bits - num_bits
        if shift > 0:
            parts = [self.read(bucket) for bucket in range(index << shift, (index + 1) << shift)]
            return {name: np.concatenate([part.pop(name) for part in parts]) for name in self.dtypes}
        columns = self.read(index >> -shift)
        if shift == 0:
            return columns
        is_in = user_hash(columns[self.key]) >> np.uint64(64 - num_bits) == index
        return {name: values[is_in] for name, values in columns.items()}

    def keep(self, index: int, mask: NDArray[np.bool_], *, reason: int) -> int:
        """Leave out the events of a bucket that a mask of those left does not have.

        Return how many were left out so far for this reason, 1 to 255, so that a call can be repeated.
        """
        path = self._reasons(index)
        reasons = np.fromfile(path, dtype=np.uint8) if path.exists() else np.zeros(len(mask), dtype=np.uint8)
        reasons[reasons == 0] = np.where(mask, 0, reason)
        with replacing(path) as new:
            new.write_bytes(reasons.data)
        return int(np.count_nonzero(reasons == reason))

    def _reasons(self, index: int) -> Path:
        """Return the path of a uint8 for each event: 0 if it is left, otherwise why it is not."""
        # Not in NumPy's format, whose headers threads cannot read at once before Python 3.11.8 (CPython issue 106905).
        return self.folder / f"left-out-{index:05d}.uint8"


def bytes_on_disk(num_events: int, dtypes: Mapping[str, str]) -> int:
    """Estimate the size of the runs and the files of so many events."""
    # Of ml-20m and KuaiRand: ids and further columns have 4 bytes in a run, and everything 8 bytes in Parquet.
    return num_events * (8 + sum(8 if name == TIMESTAMP_MS else 4 for name in dtypes))


def num_range_bits(num_events: int, per_range: int) -> int:
    """Return how many leading bits of hashes divide events into ranges of at most `per_range`, if they are even."""
    return min(_MAX_BITS, max(0, (num_events - 1) // per_range).bit_length())


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """Return int64 values as int32 if all of them fit."""
    if values.dtype == np.int64 and len(values) and values.min() >= _INT32.min and values.max() <= _INT32.max:
        return values.astype(np.int32)
    return values
