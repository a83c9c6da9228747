"""The distinct values of a column by first appearance, in bounded memory.

Events are counted bucket by bucket, into parts by key. Each part is sorted by the time of a value's first event, then
by value; the sorted parts are merged a range of this order at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.files import replacing
from evenrank.datasets.schema import TIMESTAMP_MS, USER_ID, IdKind
from evenrank.preprocess.build.events import Buckets, Run, write_run
from evenrank.preprocess.engine import Engine
from evenrank.preprocess.read.keys import TextValues, encode_keys, random_seed

FIRST, COUNT, KEY, VALUE = "first", "count", "key", "value"
_ORDER = (FIRST, VALUE)
_VALUES_PER_RANGE = 2_000_000  # in memory besides their keys
_SAMPLES = 64  # of each range, to find its limits
_ROWS_PER_GROUP = 1 << 16
_SOME = 1 << 16  # events that tell whether most values occur twice
_Counts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # keys, times of first events, counts


@dataclass(frozen=True, slots=True)
class Column:
    """A column of ids, its events, and where its values are counted."""

    name: str
    kind: IdKind
    texts: TextValues | None  # by key, if the kind is text
    buckets: Buckets  # of events, or of values that were counted in part
    work: Path


class Part(NamedTuple):
    """The values with some keys, sorted; a file of `first`, `value`, `key` (if they are texts), `count`."""

    path: Path
    size: int
    limits: tuple[int, ...]  # the least and the largest value, unless they are texts
    samples: Sequence[tuple[int, Any]]  # first and value of every n-th row


class Distinct(NamedTuple):
    """All distinct values of a column."""

    column: Column
    parts: Sequence[Part]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(part.size for part in self.parts)

    @property
    def limits(self) -> tuple[int, int] | None:
        """The least and the largest value; None without values, or if they are texts."""
        limits = [limit for part in self.parts for limit in part.limits]
        return (min(limits), max(limits)) if limits else None

    def read(self) -> Iterator[pl.DataFrame]:
        """Yield the values of each part."""
        for part in self.parts:
            yield pl.read_parquet(part.path, glob=False)

    def merged(self, engine: Engine) -> Iterator[pl.DataFrame]:
        """Yield all values in their order, about `_VALUES_PER_RANGE` at a time."""
        num_ranges = max(1, -(-self.size // _VALUES_PER_RANGE))
        samples = sorted(sample for part in self.parts for sample in part.samples)
        limits = [samples[len(samples) * index // num_ranges] for index in range(1, num_ranges)]
        ranges = [*pairwise([None, *limits, None])]
        merge = partial(_merge, self.column, [part.path for part in self.parts])
        for _, path in engine.map(merge, [*enumerate(ranges)], stage=f"numbering {self.column.name}"):
            yield pl.read_parquet(path, glob=False)


def find_distinct(column: Column, engine: Engine) -> Distinct:
    """Count and sort the values of a column."""
    name, buckets = column.name, column.buckets
    if name != USER_ID and len(buckets) > 1:  # else the buckets are parts by key
        counted = engine.map(partial(_count_bucket, column), range(len(buckets)), stage=f"counting {name}")
        runs, dtypes = [run for _, run in counted], dict.fromkeys((KEY, FIRST, COUNT), "int64")
        folder = column.work / f"{name} by key"
        column = replace(column, buckets=replace(buckets, folder=folder, runs=runs, dtypes=dtypes, key=KEY))
    parts = engine.map(partial(_sort_part, column), range(len(buckets)), stage=f"sorting {name}")
    return Distinct(column, [part for _, part in parts])


def _count_bucket(column: Column, index: int) -> Run:
    """Write the values of a bucket of events in a run; where hardly one occurs twice, it is left to the parts."""
    keys, firsts, counts = _read(column, index)
    some = keys[:_SOME]
    if 2 * len(encode_keys(some, random_seed())[0]) < len(some):
        keys, firsts, counts = _counted(keys, firsts, counts)
    path = column.work / f"{column.name}-{index:05d}.run"
    return write_run(path, {KEY: keys, FIRST: firsts, COUNT: counts}, column.buckets.num_bits, key=KEY)


def _sort_part(column: Column, index: int) -> Part:
    keys, firsts, counts = _counted(*_read(column, index))
    part, limits = pl.DataFrame({FIRST: firsts, KEY: keys, COUNT: counts}), tuple[int, ...]()
    if column.texts is not None:
        part = part.join(column.texts.part(index), on=KEY, how="left")
    else:
        values = keys.view(np.uint64) if column.kind == "uint64" else keys
        part = part.with_columns(pl.Series(VALUE, values)).drop(KEY)
        limits = (int(values.min()), int(values.max())) if len(values) else ()
    part = part.sort(_ORDER)
    samples = part.select(_ORDER).gather_every(max(1, _VALUES_PER_RANGE // _SAMPLES)).rows()
    return Part(_write(column, f"part-{index:05d}", part), len(part), limits, samples)


def _merge(column: Column, parts: Sequence[Path], task: tuple[int, Sequence[tuple[int, Any] | None]]) -> Path:
    """Write the values of all parts from one value of their order, or from the begin, to before another, or the end."""
    number, (begin, end) = task
    first, value = map(pl.col, _ORDER)
    rows = pl.concat([pl.scan_parquet(path, glob=False) for path in parts])
    if begin is not None:  # row groups are left out by the first condition
        rows = rows.filter(first >= begin[0], (first > begin[0]) | (value >= begin[1]))
    if end is not None:
        rows = rows.filter(first <= end[0], (first < end[0]) | (value < end[1]))
    return _write(column, f"range-{number:05d}", rows.sort(_ORDER).collect())


def _write(column: Column, name: str, rows: pl.DataFrame) -> Path:
    path = column.work / f"{column.name}-{name}.parquet"
    with replacing(path) as file:
        rows.write_parquet(file, compression="lz4", row_group_size=_ROWS_PER_GROUP)
    return path


def _read(column: Column, index: int) -> _Counts:
    if column.buckets.key == KEY:
        counted = column.buckets.read(index)
        return counted[KEY], counted[FIRST], counted[COUNT]
    events = column.buckets.read(index, (column.name, TIMESTAMP_MS))
    return events[column.name], events[TIMESTAMP_MS], np.ones(len(events[column.name]), dtype=np.int64)


def _counted(keys: NDArray[np.int64], times: NDArray[np.int64], counts: NDArray[np.int64]) -> _Counts:
    distinct, codes = encode_keys(keys, random_seed())
    firsts = np.full(len(distinct), np.iinfo(np.int64).max)
    sums = np.zeros(len(distinct), dtype=np.int64)
    np.minimum.at(firsts, codes, times)
    np.add.at(sums, codes, counts)
    return distinct, firsts, sums


def keys_in(rows: pl.DataFrame) -> NDArray[np.int64]:
    """Return the keys of values: int64 [rows]."""
    keys: NDArray[np.int64] = rows.get_column(KEY if KEY in rows.columns else VALUE).to_numpy().view(np.int64)
    return keys
