"""The ids of users and items, the rows of embedding tables: rules, and their vocabularies.

auto       `dense` or `keep`, whichever fits the values: `keep` where at least half of the ids up to the largest occur
dense      1, 2, ... by first appearance, listed in a vocabulary; 0 is left for unknown and rare values
keep       the integers of the log
hash:1000  a hash of the value, 0..999, for which no vocabulary is needed

Values are ordered by the time of their first event, then by value, so appending later days to a log renumbers nothing.
They are counted bucket by bucket, into parts by key. Each part is sorted, and the sorted parts are merged a range of
this order at a time. What stays in memory is a hash table of the keys, about 14 bytes per value.
"""

import glob
import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError, DataError
from evenrank.core.files import replacing
from evenrank.core.hashing import mix64
from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS, USER_ID, IdKind, IdSummary, VocabularyVersion, read_manifest
from evenrank.preprocess.build.buckets import Buckets, Run, write_run
from evenrank.preprocess.engine import BYTES_PER_ID, Engine
from evenrank.preprocess.log_config import AUTO, DENSE, HASH, KEEP
from evenrank.preprocess.read.keys import KeyTable, TextValues, encode_keys, keys_of, random_seed

FIRST, COUNT, KEY, VALUE = "first", "count", "key", "value"
_ORDER = (FIRST, VALUE)
_ROWS_PER_GROUP = 1 << 20
# A range has as few values as keep all cores busy, until there are many ranges: each is a slice of all parts.
_VALUES_PER_RANGE, _MANY_RANGES, _MAX_VALUES_PER_RANGE = 1 << 18, 64, 1 << 21
_SAMPLES = 64  # of a range of the least size, to find the limits of ranges
_SOME = 1 << 16  # events that tell whether most values occur twice
_DTYPES: Mapping[IdKind, Any] = {"int64": pl.Int64, "uint64": pl.UInt64, "text": pl.String}
_SHOWN = 3  # unknown values in an error message
_Counts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # keys, times of first events, counts


def choose(kind: IdKind, *, distinct: int, least: int, largest: int) -> str:
    """Return the rule for a column with rule `auto`: `keep` where at least half of the ids up to the largest occur."""
    return KEEP if kind == "int64" and least >= 0 and largest <= 2 * distinct else DENSE


@dataclass(frozen=True, kw_only=True, slots=True)
class Ids:
    """The ids of a column: how keys become ids, and what the manifest says about them."""

    size: int | None
    """Largest id + 1; None: the largest that occurs decides."""
    summary: IdSummary
    table: KeyTable | None = None
    """Of the keys, in the order of their ids, if the rule is `dense`."""
    rows: Sequence[Path] = ()
    """Files of the values in the same order, and how often each occurs."""
    num_rare: int = 0
    """Values with fewer events than `min_count`, which share the id 0."""
    num_rare_events: int = 0

    def encode(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of keys: int64 [n] both; of those that a vocabulary lacks, 0."""
        if self.table is not None:
            return self.table.find(keys) + 1
        if self.size is not None:
            return (mix64(keys.view(np.uint64)) % np.uint64(self.size)).astype(np.int64)
        return keys


def vocabulary_name(column: str) -> str:
    """Return the file name of a column's vocabulary in the folder of a dataset."""
    return f"vocabulary_{column}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierIds:
    """The ids of a column in an earlier dataset."""

    summary: IdSummary
    keys: NDArray[np.int64]  # of its vocabulary, in the order of the ids; without one, empty, or those that it has
    values: pl.Series
    unknown: str  # what to do about values that the vocabulary lacks; empty if the dataset is a part of this log


def read_earlier(folder: Path, unknown: Mapping[str, str] | None = None) -> dict[str, EarlierIds]:
    """Read the ids of the users and items of a dataset; raises a DataError if a vocabulary is not its manifest's.

    `unknown` are the rules for values that it lacks; None: it is a part of the log, and lacks none.
    """
    manifest, earlier = read_manifest(folder), {}
    for column in (USER_ID, ITEM_ID):
        summary = manifest.ids[column]
        values = pl.Series(VALUE, dtype=_DTYPES[summary.kind])
        if summary.rule == DENSE:
            values = read_values(folder / vocabulary_name(column), values.dtype)
        elif unknown and column in unknown:
            raise ConfigError(f"unknown has a rule for {column}, but {folder} has no vocabulary of it; leave it out")
        keys = keys_of(values)
        if summary.versions and _digest(summary.kind, keys) != summary.versions[-1].sha256:
            raise DataError(f"{folder / vocabulary_name(column)} does not match its manifest; preprocess it again")
        rule = "" if unknown is None else unknown.get(column, "append")
        earlier[column] = EarlierIds(summary=summary, keys=keys, values=values, unknown=rule)
    return earlier


def read_values(path: Path, dtype: pl.DataType | None = None) -> pl.Series:
    """Return the values of a vocabulary in the order of their ids, as this type if it is given."""
    try:
        values = pl.read_parquet(path, columns=[VALUE], glob=False).get_column(VALUE)
        return values.cast(values.dtype if dtype is None else dtype)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} cannot be read ({error}); preprocess that dataset again") from error


@dataclass(frozen=True, slots=True)
class IdColumn:
    """A column of ids, its events, and where its values are counted."""

    name: str
    kind: IdKind
    texts: TextValues | None  # by key, if the kind is text
    buckets: Buckets  # of events, or of values that were counted in part
    work: Path
    min_count: int = 1  # events of a value that gets an id of its own, unless it has one


class Part(NamedTuple):
    """The values with some keys, in order, but rare ones; of those that an earlier vocabulary has, only the counts."""

    path: Path  # of a file of `first`, `value`, `key` (if they are texts), `count`
    known: Path | None  # of a file of `place` in the earlier vocabulary, `count`
    num_values: int  # all
    num_lacking: int  # in the earlier vocabulary
    num_events: int  # of those that it lacks
    num_rare: int  # of those that it lacks
    num_rare_events: int
    limits: tuple[int, ...]  # the least and the largest value, unless they are texts
    samples: Sequence[tuple[int, Any, int]]  # first, value and number of every n-th row


def number_ids(rule: str, column: IdColumn, earlier: EarlierIds | None, engine: Engine) -> Ids:
    """Find the ids of a column from its events.

    `rule` is `auto`, `dense`, `keep` or `hash:N`; with the ids of an `earlier` vocabulary, theirs.
    """
    summary = IdSummary(rule=rule, kind=column.kind)
    if rule == KEEP:
        return Ids(size=None, summary=summary)
    known = earlier if earlier is not None and earlier.unknown else None
    parts = _find_values(column, None if known is None else KeyTable(known.keys), engine)
    distinct, num_rare = sum(part.num_values for part in parts), sum(part.num_rare for part in parts)
    if known is None and 0 < distinct == num_rare:
        reason = f"all {distinct:,} values of {column.name} have fewer than {column.min_count:,} events each"
        raise DataError(f"{reason}; lower min_count")
    summary = replace(summary, distinct=distinct)
    if engine.memory is not None:
        engine.memory.take(f"{distinct - num_rare:,} ids of {column.name}", BYTES_PER_ID * (distinct - num_rare))
    if rule.startswith(HASH):
        ids = Ids(size=int(rule.partition(":")[2]), summary=summary)
        _, counts = np.unique(ids.encode(_keys_in(column.kind, [part.path for part in parts])), return_counts=True)
        return replace(ids, summary=replace(summary, collisions=int(counts[counts > 1].sum())))
    limits = [limit for part in parts for limit in part.limits] or [0]
    # Ids that were numbered stay so when later events fill the gaps: models were trained with them.
    if rule == AUTO and not (earlier is not None and earlier.summary.rule == DENSE):
        chosen = choose(column.kind, distinct=distinct, least=min(limits), largest=max(limits))
        if earlier is not None and chosen != KEEP:
            raise DataError(
                f"the ids of {column.name} were kept, and auto would number them by now: {distinct:,} values up to "
                f"{max(limits):,}; append with --ids {column.name.removesuffix('_id')}=keep, or preprocess all of the "
                "log at once, under other ids"
            )
        if chosen == KEEP:
            return Ids(size=None, summary=replace(summary, rule=KEEP, largest=max(limits)))
    summary = replace(summary, rule=DENSE, largest=None if column.kind == "text" else max(limits))
    rows = _merge(column, parts, engine)
    if known is not None:
        num_values, num_events = sum(part.num_lacking for part in parts), sum(part.num_events for part in parts)
        if known.unknown == "fail" and num_values:
            first = _read(rows[:1]).head(_SHOWN).get_column(VALUE).to_list()
            raise DataError(
                f"the vocabulary of {column.name} lacks {num_values:,} of the values, in {num_events:,} events, "
                f"first {', '.join(map(repr, first))}; set unknown to append, oov or drop, or correct the log"
            )
        summary = replace(summary, unknown_values=num_values, unknown_events=num_events)
        rows = [_write_known(known, column, parts), *([] if known.unknown == "oov" else rows)]
    table = KeyTable(_keys_in(column.kind, rows))
    rare_events = sum(part.num_rare_events for part in parts)
    size = len(table) + 1
    return Ids(size=size, summary=summary, table=table, rows=rows, num_rare=num_rare, num_rare_events=rare_events)


def _find_values(column: IdColumn, known: KeyTable | None, engine: Engine) -> list[Part]:
    """Count the values of a column, and sort those that are not known."""
    name, buckets = column.name, column.buckets
    if name != USER_ID and len(buckets) > 1:  # else the buckets are parts by key
        counted = engine.map(partial(_count_bucket, column), range(len(buckets)), stage=f"counting {name}")
        runs, dtypes = [run for _, run in counted], dict.fromkeys((KEY, FIRST, COUNT), "int64")
        folder = column.work / f"{name} by key"
        column = replace(column, buckets=replace(buckets, folder=folder, runs=runs, dtypes=dtypes, key=KEY))
    parts = engine.map(partial(_sort_part, column, known), range(len(buckets)), stage=f"sorting {name}")
    return [part for _, part in parts]


def _count_bucket(column: IdColumn, index: int) -> Run:
    """Write the values of a bucket of events in a run; where hardly one occurs twice, it is left to the parts."""
    keys, firsts, counts = _counts_in(column, index)
    some = keys[:_SOME]
    if 2 * len(encode_keys(some, random_seed())[0]) < len(some):
        keys, firsts, counts = _counted(keys, firsts, counts)
    path = column.work / f"{column.name}-{index:05d}.run"
    return write_run(path, {KEY: keys, FIRST: firsts, COUNT: counts}, column.buckets.num_bits, key=KEY)


def _sort_part(column: IdColumn, known: KeyTable | None, index: int) -> Part:
    keys, firsts, counts = _counted(*_counts_in(column, index))
    part, limits, of_known = pl.DataFrame({FIRST: firsts, KEY: keys, COUNT: counts}), tuple[int, ...](), None
    if known is not None:
        places = pl.Series("place", known.find(keys))
        of_known = _write(column, f"known-{index:05d}", part.select(places, COUNT).filter(places >= 0))
        part = part.filter(places < 0)
    lacking, part = part, part.filter(pl.col(COUNT) >= column.min_count)
    if column.texts is not None:
        part = part.join(column.texts.part(index), on=KEY, how="left")
    else:
        dtype = np.uint64 if column.kind == "uint64" else np.int64
        limits = (int(keys.view(dtype).min()), int(keys.view(dtype).max())) if len(keys) else ()
        part = part.with_columns(pl.Series(VALUE, part.get_column(KEY).to_numpy().view(dtype))).drop(KEY)
    part = part.sort(_ORDER)
    samples = part.select(*_ORDER, pl.int_range(pl.len())).gather_every(max(1, _VALUES_PER_RANGE // _SAMPLES)).rows()
    path = _write(column, f"part-{index:05d}", part)
    num_events, num_frequent = (int(rows.get_column(COUNT).sum()) for rows in (lacking, part))
    rare = len(lacking) - len(part), num_events - num_frequent
    return Part(path, of_known, len(keys), len(lacking), num_events, *rare, limits, samples)


def _counts_in(column: IdColumn, index: int) -> _Counts:
    """Read the values of a bucket of events, or of values that were counted in part."""
    if column.buckets.key == KEY:
        counted = column.buckets.read(index)
        return counted[KEY], counted[FIRST], counted[COUNT]
    events = column.buckets.read(index, (column.name, TIMESTAMP_MS))
    return events[column.name], events[TIMESTAMP_MS], np.ones(len(events[column.name]), dtype=np.int64)


def _counted(keys: NDArray[np.int64], times: NDArray[np.int64], counts: NDArray[np.int64]) -> _Counts:
    distinct, codes = encode_keys(keys, random_seed())
    return distinct, *_add_up(codes, times, counts, len(distinct))


@compiled
def _add_up(
    codes: NDArray[np.int32], times: NDArray[np.int64], counts: NDArray[np.int64], num_values: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the least time and the sum of the counts of each value, given its code in each row: int64 [values]."""
    firsts = np.full(num_values, np.iinfo(np.int64).max)
    sums = np.zeros(num_values, dtype=np.int64)
    for row in range(len(codes)):
        firsts[codes[row]] = min(firsts[codes[row]], times[row])
        sums[codes[row]] += counts[row]
    return firsts, sums


def _merge(column: IdColumn, parts: Sequence[Part], engine: Engine) -> list[Path]:
    """Write the values of all parts in their order, in one file after the other."""
    size = sum(part.num_lacking - part.num_rare for part in parts)
    num_ranges = min(-(-size // _VALUES_PER_RANGE), max(_MANY_RANGES, -(-size // _MAX_VALUES_PER_RANGE)))
    samples = sorted(sample[:2] for part in parts for sample in part.samples)
    limits = [samples[len(samples) * index // num_ranges] for index in range(1, num_ranges)]
    tasks = [*enumerate(pairwise([None, *limits, None]))]
    merged = engine.map(partial(_merge_range, column, parts), tasks, stage=f"numbering {column.name}")
    return [path for _, path in merged]


def _merge_range(column: IdColumn, parts: Sequence[Part], task: tuple[int, Sequence[tuple[int, Any] | None]]) -> Path:
    """Write the values of all parts from one value of their order, or from the begin, to before another, or the end."""
    number, (begin, end) = task
    first, value, slices = pl.col(FIRST), pl.col(VALUE), []
    for part in parts:  # of each, the rows between two samples
        before = 0 if begin is None else max(0, bisect_left(part.samples, begin) - 1)
        after = [] if end is None else part.samples[bisect_left(part.samples, end) :]
        begin_row = part.samples[before][2] if part.samples else 0
        end_row = after[0][2] if after else part.num_lacking - part.num_rare
        slices.append(_scan(part.path).slice(begin_row, end_row - begin_row))
    rows = pl.concat(slices)
    if begin is not None:
        rows = rows.filter((first > begin[0]) | (first == begin[0]) & (value >= begin[1]))
    if end is not None:
        rows = rows.filter((first < end[0]) | (first == end[0]) & (value < end[1]))
    return _write(column, f"range-{number:05d}", rows.sort(_ORDER).drop(FIRST).collect())


def _write_known(known: EarlierIds, column: IdColumn, parts: Sequence[Part]) -> Path:
    """Write the values of an earlier vocabulary, with how often they occur now."""
    counts = np.zeros(len(known.keys), dtype=np.int64)
    for part in parts:
        if part.known is not None:
            of_part = _read([part.known])
            counts[of_part.get_column("place").to_numpy()] += of_part.get_column(COUNT).to_numpy()
    columns = {VALUE: known.values, COUNT: counts, **({KEY: known.keys} if column.kind == "text" else {})}
    return _write(column, "known", pl.DataFrame(columns))


def _write(column: IdColumn, name: str, rows: pl.DataFrame) -> Path:
    with replacing(path := column.work / f"{column.name}-{name}.arrow") as file:
        rows.write_ipc(file)
    return path


def _scan(path: Path) -> pl.LazyFrame:
    return pl.scan_ipc(glob.escape(str(path)))  # `glob=False` is newer than the oldest Polars


def _read(paths: Sequence[Path], *names: str) -> pl.DataFrame:
    return pl.concat([_scan(path).select(*(names or ("*",))) for path in paths]).collect()


def _keys_in(kind: IdKind, paths: Sequence[Path]) -> NDArray[np.int64]:
    """Return the keys of the values in some files: int64 [n]."""
    rows = _read(paths, KEY if kind == "text" else VALUE)
    keys: NDArray[np.int64] = rows.to_series().to_numpy(writable=True).view(np.int64)
    return keys


def write_vocabulary(path: Path, ids: Ids, earlier: EarlierIds | None) -> IdSummary:
    """Write the vocabulary of a column if its ids have one, and return what the manifest says about them."""
    if ids.table is None:
        return ids.summary
    schema = vocabulary_rows(1, pl.Series(dtype=_DTYPES[ids.summary.kind])).schema
    encodings = {field.name: "DELTA_BINARY_PACKED" for field in schema if pa.types.is_integer(field.type)}
    options = {"compression": "zstd", "use_dictionary": False, "column_encoding": encodings}  # 3 times as fast as usual
    first_id = 1
    with pq.ParquetWriter(path, schema, **options) as file:
        for rows in _in_groups(_read([of_range], VALUE, COUNT) for of_range in ids.rows):
            file.write_table(vocabulary_rows(first_id, rows.get_column(VALUE), rows.get_column(COUNT)))
            first_id += len(rows)
    digest = _digest(ids.summary.kind, ids.table.keys)
    versions = versions_of(None if earlier is None else earlier.summary, len(ids.table), digest)
    return replace(ids.summary, versions=versions)


def _in_groups(parts: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield the same rows in frames of one length, the row groups of a file, which do not depend on the parts then."""
    left: list[pl.DataFrame] = []
    for part in parts:
        rows = pl.concat([*left, part])
        whole = len(rows) - len(rows) % _ROWS_PER_GROUP
        yield from rows[:whole].iter_slices(_ROWS_PER_GROUP)
        left = [rows[whole:]]
    yield from filter(len, left)


def vocabulary_rows(first_id: int, values: pl.Series, counts: pl.Series | None = None) -> pa.Table:
    """Return rows of a vocabulary: `id`, consecutive from `first_id`; `value` and `count` as given."""
    ids = pl.int_range(first_id, first_id + len(values), eager=True)
    columns = {"id": ids, VALUE: values, COUNT: pl.Series(dtype=pl.Int64) if counts is None else counts}
    return pl.DataFrame(columns).to_arrow(compat_level=pl.CompatLevel.oldest())


def versions_of(earlier: IdSummary | None, size: int, digest: str) -> tuple[VocabularyVersion, ...]:
    """Return the versions of a vocabulary that begins with an earlier one."""
    versions = () if earlier is None else earlier.versions
    is_new = not versions or versions[-1].sha256 != digest
    return (*versions, VocabularyVersion(size=size, sha256=digest)) if is_new else versions


def _digest(kind: IdKind, keys: NDArray[np.int64]) -> str:
    """Return the SHA-256 of the values of a vocabulary in their order, given their keys [n]."""
    digest = hashlib.sha256(kind.encode())
    digest.update(keys.astype("<i8", copy=False).data)
    return digest.hexdigest()
