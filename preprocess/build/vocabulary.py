"""The vocabulary of a column: its distinct values by first appearance, and the ids that follow from it.

Values are ordered by the time of their first event, then by value, so appending later days to a log renumbers nothing.
They are counted in parts by key, each part is sorted, and the sorted parts are merged a range at a time. Several parts
are kept on disk; what stays in memory is a hash table of the keys, about 14 bytes per value.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import TIMESTAMP_MS, USER_ID, IdKind, IdSummary, VocabularyVersion, read_manifest
from evenrank.preprocess.build.buckets import Buckets, Run, write_run
from evenrank.preprocess.build.ids import AUTO, DENSE, HASH, KEEP, Ids, choose, hashed_ids, kept_ids, table_ids
from evenrank.preprocess.build.key_table import KeyTable, TextValues, encode_keys, keys_of, random_seed
from evenrank.preprocess.engine import Engine

_FIRST, _COUNT, _KEY, _VALUE = "first", "count", "key", "value"
_ORDER = (_FIRST, _VALUE)
_ROWS_AT_ONCE = 2_000_000  # values in memory besides their keys
_SAMPLES = 64  # of each range, to find its limits
_DTYPES: Mapping[IdKind, Any] = {"int64": pl.Int64, "uint64": pl.UInt64, "text": pl.String}
_Counts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # see `_counted`
_SHOWN = 3  # unknown values in an error message


def vocabulary_name(column: str) -> str:
    """Return the file name of a column's vocabulary in the folder of a dataset."""
    return f"vocabulary_{column}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierIds:
    """The ids of a column in an earlier dataset."""

    summary: IdSummary
    keys: NDArray[np.int64]  # of its vocabulary, in the order of the ids; empty without one
    values: pl.Series
    unknown: str  # what to do about values that the vocabulary lacks


def read_earlier(folder: Path, unknown: Mapping[str, str]) -> dict[str, EarlierIds]:
    """Read the ids of the users and items of a dataset; raises a DataError if a vocabulary is not its manifest's."""
    manifest, earlier = read_manifest(folder), {}
    for column, summary in manifest.ids.items():
        values = pl.Series(_VALUE, dtype=_DTYPES[summary.kind])
        if summary.rule == DENSE:
            values = read_values(folder / vocabulary_name(column), values.dtype)
        elif column in unknown:
            raise ConfigError(f"unknown has a rule for {column}, but {folder} has no vocabulary of it; leave it out")
        keys = keys_of(values)
        if summary.versions and _digest(summary.kind, keys) != summary.versions[-1].sha256:
            raise DataError(f"{folder / vocabulary_name(column)} does not match its manifest; preprocess it again")
        earlier[column] = EarlierIds(summary=summary, keys=keys, values=values, unknown=unknown.get(column, "append"))
    return earlier


def read_values(path: Path, dtype: pl.DataType | None = None) -> pl.Series:
    """Return the values of a vocabulary in the order of their ids, as this type if it is given."""
    try:
        values = pl.read_parquet(path, columns=[_VALUE], glob=False).get_column(_VALUE)
        return values.cast(values.dtype if dtype is None else dtype)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} cannot be read ({error}); preprocess that dataset again") from error


def drop_unknown(buckets: Buckets, earlier: Mapping[str, EarlierIds]) -> int:
    """Leave out events of unknown users and items where these are to be dropped, and return their number."""
    dropped = {
        name: KeyTable(ids.keys) for name, ids in earlier.items() if ids.unknown == "drop" and ids.summary.versions
    }
    num_dropped = 0
    for index in range(len(buckets) if dropped else 0):
        columns = buckets.read(index, dropped)
        are_known = [table.find(columns[name]) >= 0 for name, table in dropped.items()]
        num_dropped += buckets.keep(index, np.logical_and.reduce(are_known))
    return num_dropped


def number_ids(
    column: str,
    rule: str,
    kind: IdKind,
    texts: TextValues | None,
    earlier: EarlierIds | None,
    *,
    buckets: Buckets,
    engine: Engine,
    folder: Path,
    work: Path,
) -> Ids:
    """Find the ids of a column from its events, and write its vocabulary to `folder` if it has one.

    Args:
        rule: `auto`, `dense`, `keep` or `hash:N`; with `earlier` ids, theirs.
        kind: type of the values.
        texts: the texts of the keys, if the kind is text.
        buckets: all events.
        engine: what counts them.
        work: folder for temporary files.
    """
    if rule == KEEP:
        return kept_ids(kind)
    vocabulary = _Values(column, kind, texts, work if len(buckets) > 1 else None)
    for keys, firsts, counts in _counted(column, buckets, engine, work):
        vocabulary.add(keys, firsts, counts)
    if rule.startswith(HASH):
        return hashed_ids(rule, kind, vocabulary.all_keys())
    if rule == AUTO:
        least, largest = min(vocabulary.limits, default=0), max(vocabulary.limits, default=0)
        if choose(kind, distinct=vocabulary.size, least=least, largest=largest) == KEEP:
            return kept_ids(kind, distinct=vocabulary.size, largest=largest)
    return vocabulary.write(folder / vocabulary_name(column), earlier)


def _counted(column: str, buckets: Buckets, engine: Engine, work: Path) -> Iterator[_Counts]:
    """Yield distinct keys, the times of their first events, and their numbers of events, in parts by key."""

    def count(index: int) -> _Counts:
        read = buckets.read(index, (column, TIMESTAMP_MS))
        return _count(read[column], read[TIMESTAMP_MS], np.ones(len(read[column]), dtype=np.int64))

    bits = buckets.num_bits
    if column == USER_ID or not bits:  # the buckets are parts by user
        for _, counts in engine.map(count, range(len(buckets))):
            yield counts
        return
    dtypes = dict.fromkeys((_KEY, _FIRST, _COUNT), "int64")

    def write(index: int) -> Run:
        path = work / f"counts-{column}-{index:05d}"
        return write_run(path, dict(zip(dtypes, count(index), strict=True)), bits, key=_KEY)

    runs = [run for _, run in engine.map(write, range(len(buckets)))]
    parts = Buckets(folder=work / f"counts-{column}", runs=runs, dtypes=dtypes, num_bits=bits, key=_KEY)
    for _, counts in engine.map(lambda index: _count(*parts.read(index).values()), range(len(parts))):
        yield counts
    for run in runs:
        run.path.unlink()


def _count(keys: NDArray[np.int64], times: NDArray[np.int64], counts: NDArray[np.int64]) -> _Counts:
    distinct, codes = encode_keys(keys, random_seed())
    firsts = np.full(len(distinct), np.iinfo(np.int64).max)
    sums = np.zeros(len(distinct), dtype=np.int64)
    np.minimum.at(firsts, codes, times)
    np.add.at(sums, codes, counts)
    return distinct, firsts, sums


class _Values:
    """The distinct values of a column: parts by key, each sorted by first appearance."""

    def __init__(self, column: str, kind: IdKind, texts: TextValues | None, folder: Path | None) -> None:
        """`folder` is for parts on disk; None: they stay in memory."""
        self.size = 0
        self.limits: list[int] = []  # the least and the largest value of each part, unless they are texts
        self._column, self._kind, self._texts, self._folder = column, kind, texts, folder
        self._parts: list[pl.LazyFrame] = []  # first, value, key (of text), count

    def add(self, keys: NDArray[np.int64], firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Add the next part: distinct keys with their first times and counts, int64 [n] each."""
        part = pl.DataFrame({_FIRST: firsts, _KEY: keys, _COUNT: counts})
        if self._texts is not None:
            part = part.join(self._texts.part(len(self._parts)), on=_KEY, how="left")
        else:
            values = keys.view(np.uint64) if self._kind == "uint64" else keys
            part = part.with_columns(pl.Series(_VALUE, values)).drop(_KEY)
            self.limits += [int(values.min()), int(values.max())] if len(values) else []
        self.size += len(part)
        lazy = part.sort(_ORDER).lazy()
        if self._folder is not None:
            path = self._folder / f"{self._column}-{len(self._parts):05d}.parquet"
            lazy.collect().write_parquet(path, compression="lz4", row_group_size=1 << 16, statistics=False)
            lazy = pl.scan_parquet(path, glob=False)
        self._parts.append(lazy)

    def all_keys(self) -> NDArray[np.int64]:
        """Return the keys of all values: int64 [size]."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(_keys(part.collect()) for part in self._parts)])

    def write(self, path: Path, earlier: EarlierIds | None) -> Ids:
        """Write the vocabulary, after the values of an earlier one if there is one, and return the ids."""
        known = KeyTable(np.empty(0, dtype=np.int64) if earlier is None else earlier.keys)
        keys, size = np.empty(len(known) + self.size, dtype=np.int64), len(known)
        num_unknown = num_unknown_events = 0
        shown: list[Any] = []
        schema = vocabulary_rows(1, pl.Series(dtype=_DTYPES[self._kind])).schema
        with pq.ParquetWriter(path, schema, compression="zstd") as file:
            if earlier is not None:
                keys[:size] = earlier.keys
                file.write_table(vocabulary_rows(1, earlier.values, self._count_known(known)))
            for rows in self._merged():
                if earlier is not None:
                    rows = rows.filter(known.find(_keys(rows)) < 0)
                    num_unknown += len(rows)
                    num_unknown_events += int(rows.get_column(_COUNT).sum())
                    shown = shown or rows.get_column(_VALUE).head(_SHOWN).to_list()
                    if earlier.unknown == "oov":
                        continue
                file.write_table(vocabulary_rows(size + 1, rows.get_column(_VALUE), rows.get_column(_COUNT)))
                keys[size : size + len(rows)] = _keys(rows)
                size += len(rows)
        if earlier is not None and earlier.unknown == "fail" and num_unknown:
            raise DataError(
                f"the vocabulary of {self._column} lacks {num_unknown:,} of the values, in {num_unknown_events:,} "
                f"events, first {', '.join(map(repr, shown))}; set unknown to append, oov or drop, or correct the log"
            )
        keys = keys[:size]
        versions, digest = () if earlier is None else earlier.summary.versions, _digest(self._kind, keys)
        if not versions or versions[-1].sha256 != digest:
            versions = (*versions, VocabularyVersion(size=size, sha256=digest))
        summary = IdSummary(
            rule=DENSE,
            kind=self._kind,
            distinct=self.size,
            largest=max(self.limits, default=None if self._kind == "text" else 0),
            versions=versions,
            unknown_values=num_unknown,
            unknown_events=num_unknown_events,
        )
        return table_ids(KeyTable(keys), summary)

    def _count_known(self, known: KeyTable) -> pl.Series:
        counts = np.zeros(len(known), dtype=np.int64)
        for part in self._parts:
            rows = part.collect()
            places = known.find(_keys(rows))
            counts[places[places >= 0]] = rows.get_column(_COUNT).to_numpy()[places >= 0]
        return pl.Series(counts)

    def _merged(self) -> Iterator[pl.DataFrame]:
        """Yield all values in their order, about `_ROWS_AT_ONCE` at a time."""
        num_ranges = max(1, -(-self.size // _ROWS_AT_ONCE))
        every = max(1, _ROWS_AT_ONCE // _SAMPLES)
        # In Python, because a frame of some texts would keep all texts of their parts in memory.
        samples = sorted(
            row for part in self._parts for row in part.select(_ORDER).gather_every(every).collect().rows()
        )
        limits = [samples[len(samples) * index // num_ranges] for index in range(1, num_ranges)]
        first, value = map(pl.col, _ORDER)
        is_before = [((first < time) | ((first == time) & (value < limit))) for time, limit in limits]
        num_before = [is_in.sum().alias(str(index)) for index, is_in in enumerate(is_before)]
        bounds = []  # per part, the row where each range begins
        for part in self._parts:
            length = part.select(pl.len()).collect().item()
            bounds.append([0, *(part.select(num_before).collect().row(0) if limits else ()), length])
        for ranges in zip(*map(pairwise, bounds), strict=True):
            yield pl.concat(
                [
                    part.slice(begin, end - begin).collect()
                    for part, (begin, end) in zip(self._parts, ranges, strict=True)
                ]
            ).sort(_ORDER)


def _keys(rows: pl.DataFrame) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = rows.get_column(_KEY if _KEY in rows.columns else _VALUE).to_numpy().view(np.int64)
    return keys


def vocabulary_rows(first_id: int, values: pl.Series, counts: pl.Series | None = None) -> pa.Table:
    """Return rows of a vocabulary: `id`, consecutive from `first_id`; `value` and `count` as given."""
    ids = pl.int_range(first_id, first_id + len(values), eager=True)
    columns = {"id": ids, _VALUE: values, _COUNT: pl.Series(dtype=pl.Int64) if counts is None else counts}
    return pl.DataFrame(columns).to_arrow(compat_level=pl.CompatLevel.oldest())


def _digest(kind: IdKind, keys: NDArray[np.int64]) -> str:
    """Return the SHA-256 of the values of a vocabulary in their order, given their keys [n]."""
    digest = hashlib.sha256(kind.encode())
    digest.update(keys.astype("<i8", copy=False).data)
    return digest.hexdigest()
