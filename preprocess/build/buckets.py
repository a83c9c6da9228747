"""Events -> buckets: any number of events in bounded memory, split by user such that each bucket fits into memory.

The leading bits of a user's hash are the index of its bucket, so that consecutive buckets are in the row order of the
dataset, whatever their number. Events are kept in memory up to a limit; above it, all of them are appended to one file
per bucket. Rows that cannot be read raise an error or are counted.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.build.key_table import TextValues, by_bucket, keys_of
from evenrank.preprocess.files.table import MAX_SHOWN, BadRow, EventPart

Columns = dict[str, NDArray[Any]]  # columns of events by name: int64, int32 or float32 [events]
OnError = Literal["fail", "skip"]  # what to do about rows that cannot be read

# Target size of a bucket; building the sequences of one takes about 0.3 GB, or twice as much if most times are equal.
EVENTS_PER_BUCKET = 4_000_000
BYTES_IN_MEMORY = 400 << 20  # limit of the events kept in memory, over all buckets
_MAX_BITS = 16  # an index is a uint16
_INT32 = np.iinfo(np.int32)


class Buckets:
    """Events that are appended in batches and read back one bucket at a time, in the order in which they were appended.

    Args:
        folder: created when bucket files are needed, and removed by `close`.
        num_events: expected number of events; only the number of buckets depends on it.
        dtypes: data type of each column.
        key: the column by which events are distributed, int64.
    """

    def __init__(self, folder: Path, num_events: int, dtypes: Mapping[str, str], *, key: str = USER_ID) -> None:
        self._folder = folder
        self._dtypes = dict(dtypes)
        self._key = key
        self.num_events = num_events
        self.num_bits = min(_MAX_BITS, max(0, (num_events - 1) // EVENTS_PER_BUCKET).bit_length())
        self._parts: list[list[Columns]] = [[] for _ in range(len(self))]  # per bucket, the parts in memory
        self._num_bytes = 0  # of all parts in memory
        self._num_spilled = [0] * len(self)  # per bucket, the number of parts in its file
        self._masks: dict[int, NDArray[np.bool_]] = {}  # by bucket, which events are left

    def __len__(self) -> int:
        return 1 << self.num_bits

    def append(self, batch: Columns) -> None:
        """Distribute a batch of events over the buckets."""
        order, ends = by_bucket(batch[self._key], self.num_bits)
        # Narrowing halves the number of bytes to reorder, to keep and to spill.
        sorted_batch = {name: _narrowed(values)[order] for name, values in batch.items()}
        for index, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                self._parts[index].append({name: values[begin:end] for name, values in sorted_batch.items()})
        self._num_bytes += sum(values.nbytes for values in sorted_batch.values())
        if self._num_bytes > BYTES_IN_MEMORY:
            self._spill()

    def read(self, index: int, names: Collection[str] = ()) -> Columns:
        """Return the named columns of the events that are left in a bucket, or all columns."""
        parts = [*self._read_spilled(index), *self._parts[index]]
        columns = {
            name: np.concatenate([np.empty(0, dtype=dtype), *(part[name] for part in parts)], dtype=dtype)
            for name, dtype in self._dtypes.items()
            if not names or name in names
        }
        mask = self._masks.get(index)
        return columns if mask is None else {name: values[mask] for name, values in columns.items()}

    def keep(self, index: int, mask: NDArray[np.bool_]) -> int:
        """Leave out the events of a bucket that a mask of those left does not have, and return their number."""
        left = self._masks.setdefault(index, np.ones(len(mask), dtype=bool))
        left[left] = mask
        return len(mask) - int(np.count_nonzero(mask))

    def close(self) -> None:
        """Discard all events."""
        self._parts = [[] for _ in range(len(self))]
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spill(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for index, parts in enumerate(self._parts):
            with self._path(index).open("ab") as file:
                for part in parts:
                    for name in self._dtypes:
                        np.save(file, part[name])
            self._num_spilled[index] += len(parts)
            parts.clear()
        self._num_bytes = 0

    def _read_spilled(self, index: int) -> Iterator[Columns]:
        if self._num_spilled[index]:
            with self._path(index).open("rb") as file:
                for _ in range(self._num_spilled[index]):
                    yield {name: np.load(file) for name in self._dtypes}

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:05d}.npy"


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """Return int64 values as int32 if all of them fit."""
    if values.dtype == np.int64 and len(values) and values.min() >= _INT32.min and values.max() <= _INT32.max:
        return values.astype(np.int32)
    return values


def fill_buckets(
    buckets: Buckets,
    parts: Sequence[EventPart],
    texts: Mapping[str, TextValues],
    *,
    has_times: bool,
    on_error: OnError,
    on_stage: Callable[[str], None],
) -> tuple[dict[str, int], int, dict[str, int]]:
    """Read all events into buckets; return the number of skipped rows by a description of the first ones per part.

    Also return the time of the first event, and that of the last event of each part by its name. Ids become keys;
    `texts` registers those of the columns that are text.
    """
    num_skipped: dict[str, int] = {}
    num_events, first_ms, last_ms = 0, 1 << 62, dict[str, int]()
    for part in parts:
        num_bad, first_bad = 0, list[BadRow]()
        for batch in part.read():
            num_bad += batch.num_bad
            first_bad = [*first_bad, *batch.first_bad][:MAX_SHOWN]
            columns = {column.name: column for column in batch.good.iter_columns()}
            ids = {name: columns.pop(name) for name in (USER_ID, ITEM_ID)}
            keys = {name: texts[name].add(raw) if name in texts else keys_of(raw) for name, raw in ids.items()}
            values = {name: column.to_numpy() for name, column in columns.items()}
            if not has_times:  # rows count as seconds
                values[TIMESTAMP_MS] = np.arange(num_events, num_events + len(batch.good)) * 1000
            for events in part.expand(keys | values):
                buckets.append(events)
                num_events += len(events[USER_ID])
                times = events[TIMESTAMP_MS]
                if len(times):
                    first_ms = min(first_ms, int(times.min()))
                    last_ms[part.name] = max(last_ms.get(part.name, 0), int(times.max()))
                on_stage(f"reading {part.name}: {num_events:,} events")
        if num_bad:
            first_rows = "; ".join(f"line {row.line} ({row.text[:80]!r}): {row.reason}" for row in first_bad)
            description = f"{num_bad:,} bad row{'s' if num_bad > 1 else ''}, first {first_rows}"
            if on_error == "fail":
                raise DataError(f"{part.name}: {description}; fix them, or skip them with --on-error skip")
            # The path below the common folder, so that the manifest does not depend on the machine.
            folder = os.path.commonpath([Path(part.name).absolute().parent for part in parts])
            num_skipped[f"{os.path.relpath(part.name, folder)}: {description}; all skipped"] = num_bad
    if num_events == 0:
        reasons = "; ".join(num_skipped) or ", ".join(part.name for part in parts)
        raise DataError(f"no events could be read: {reasons}; check the file, or unpack or download it again")
    return num_skipped, first_ms, last_ms
