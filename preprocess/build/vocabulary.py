"""The ids of users, items and values of features, the rows of embedding tables: rules, and their vocabularies.

auto       `dense` or `keep`, whichever fits the values: `keep` where at least half of the ids up to the largest occur
dense      1, 2, ... by first appearance, listed in a vocabulary; 0 is left for unknown values
keep       the integers of the log
hash:1000  a hash of the value, 0..999, for which no vocabulary is needed

Values are ordered by the time of their first event, then by value, so appending later days to a log renumbers nothing.
What stays in memory is a hash table of the keys, about 14 bytes per value.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.hashing import mix64
from evenrank.datasets.schema import ITEM_ID, USER_ID, IdKind, IdSummary, VocabularyVersion, read_manifest
from evenrank.preprocess.build.distinct import COUNT, KEY, VALUE, Column, Distinct, find_distinct, keys_in
from evenrank.preprocess.engine import BYTES_PER_ID, Engine
from evenrank.preprocess.options import AUTO, DENSE, HASH, KEEP
from evenrank.preprocess.read.features import FeatureLookup, Features, Interactions
from evenrank.preprocess.read.keys import KeyTable, keys_of

_ROWS_PER_GROUP = 1 << 20
_DTYPES: Mapping[IdKind, Any] = {"int64": pl.Int64, "uint64": pl.UInt64, "text": pl.String}
_SHOWN = 3  # unknown values in an error message


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


def number_ids(rule: str, column: Column, earlier: EarlierIds | None, *, engine: Engine, folder: Path) -> Ids:
    """Find the ids of a column from its events, and write its vocabulary to `folder` if it has one.

    `rule` is `auto`, `dense`, `keep` or `hash:N`; with the ids of an `earlier` vocabulary, theirs.
    """
    summary = IdSummary(rule=rule, kind=column.kind)
    if rule == KEEP:
        return Ids(size=None, summary=summary)
    found = find_distinct(column, engine)
    summary = replace(summary, distinct=found.size)
    if engine.memory is not None:
        engine.memory.take(f"{found.size:,} ids of {column.name}", BYTES_PER_ID * found.size)
    if rule.startswith(HASH):
        ids = Ids(size=int(rule.partition(":")[2]), summary=summary)
        _, counts = np.unique(ids.encode(np.concatenate([keys_in(rows) for rows in found.read()])), return_counts=True)
        return replace(ids, summary=replace(summary, collisions=int(counts[counts > 1].sum())))
    # Ids that were numbered stay so when later events fill the gaps: models were trained with them.
    if rule == AUTO and not (earlier is not None and earlier.summary.rule == DENSE):
        least, largest = found.limits or (0, 0)
        chosen = choose(column.kind, distinct=found.size, least=least, largest=largest)
        if earlier is not None and chosen != KEEP:
            raise DataError(
                f"the ids of {column.name} were kept, and auto would number them by now: {found.size:,} values up to "
                f"{largest:,}; append with --ids {column.name.removesuffix('_id')}=keep, or preprocess all of the log "
                "at once, under other ids"
            )
        if chosen == KEEP:
            return Ids(size=None, summary=replace(summary, rule=KEEP, largest=largest))
    return _write(folder / vocabulary_name(column.name), found, earlier, engine)


def _write(path: Path, found: Distinct, earlier: EarlierIds | None, engine: Engine) -> Ids:
    """Write a vocabulary, after the values of an earlier one if there is one, and return the ids."""
    kind, parts, num_known, num_values, num_events, size = found.column.kind, found.merged(engine), 0, 0, 0, 0
    if earlier is not None and earlier.unknown:
        num_known = len(earlier.keys)
        parts, num_values, num_events = _after(earlier, found, parts)
    keys = np.empty(num_known + found.size, dtype=np.int64)
    schema = vocabulary_rows(1, pl.Series(dtype=_DTYPES[kind])).schema
    encodings = {field.name: "DELTA_BINARY_PACKED" for field in schema if pa.types.is_integer(field.type)}
    options = {"compression": "zstd", "use_dictionary": False, "column_encoding": encodings}  # 3 times as fast as usual
    with pq.ParquetWriter(path, schema, **options) as file:
        for rows in _in_groups(parts):
            file.write_table(vocabulary_rows(size + 1, rows.get_column(VALUE), rows.get_column(COUNT)))
            keys[size : size + len(rows)] = keys_in(rows)
            size += len(rows)
    keys = keys[:size]
    summary = IdSummary(
        rule=DENSE,
        kind=kind,
        distinct=found.size,
        largest=None if kind == "text" else max(found.limits or (0,)),
        versions=_versions(None if earlier is None else earlier.summary, size, _digest(kind, keys)),
        unknown_values=num_values,
        unknown_events=num_events,
    )
    return Ids(size=size + 1, summary=summary, table=KeyTable(keys))


def _after(
    earlier: EarlierIds, found: Distinct, parts: Iterator[pl.DataFrame]
) -> tuple[Iterator[pl.DataFrame], int, int]:
    """Return the values of an earlier vocabulary, then those that it lacks; how many these are, and their events."""
    known, num_values, num_events = KeyTable(earlier.keys), 0, 0
    counts = np.zeros(len(known), dtype=np.int64)
    for rows in found.read():
        places, added = known.find(keys_in(rows)), rows.get_column(COUNT).to_numpy()
        counts[places[places >= 0]] += added[places >= 0]
        num_values += int(np.count_nonzero(places < 0))
        num_events += int(added[places < 0].sum())
    lacking = (rows.filter(known.find(keys_in(rows)) < 0) for rows in parts)
    if earlier.unknown == "fail" and num_values:
        first = next(filter(len, lacking)).get_column(VALUE).head(_SHOWN).to_list()
        raise DataError(
            f"the vocabulary of {found.column.name} lacks {num_values:,} of the values, in {num_events:,} events, "
            f"first {', '.join(map(repr, first))}; set unknown to append, oov or drop, or correct the log"
        )
    old = pl.DataFrame({VALUE: earlier.values, COUNT: counts, KEY: earlier.keys})
    new = (rows.select(VALUE, COUNT, pl.Series(KEY, keys_in(rows))) for rows in lacking)
    return chain([old], () if earlier.unknown == "oov" else new), num_values, num_events


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


def number_features(interactions: Interactions, folder: Path | None) -> Interactions:
    """Number the values of features as in an earlier dataset, if there is one; raises a DataError if it is damaged."""
    context, items, ids = interactions.context, interactions.item_features, dict[str, IdSummary]()
    if folder is not None:
        manifest = read_manifest(folder)
        earlier = {name: pl.Series(labels[1:], dtype=pl.String) for name, labels in manifest.context_labels.items()}
        for name in items.values.keys() & manifest.vocabulary_sizes.keys() - earlier.keys():
            earlier[name] = read_values(folder / vocabulary_name(name))
        context, items, ids = _continue(context, earlier), _continue(items, earlier), dict(manifest.ids)
    values = {**context.values, **items.values} if interactions.files else {}  # else they are drawn, as ids
    feature_ids = {name: _label_ids(of_feature, ids.get(name)) for name, of_feature in values.items()}
    return replace(interactions, context=context, item_features=items, feature_ids=feature_ids)


def _continue(features: Features, earlier: Mapping[str, pl.Series]) -> Features:
    """Number values as an earlier dataset does, whose values are given by feature; further ones follow, ascending."""
    rows, values = features.rows, dict(features.values)
    for name in values.keys() & earlier.keys():
        known, found = earlier[name], values[name]
        if known.dtype != found.dtype:  # labels in the manifest are texts
            known, found = (pl.Series(map(str, series), dtype=pl.String) for series in (known, found))
        values[name] = pl.concat([known, found.filter(~found.is_in(known.implode()))])
        numbers = pl.int_range(len(values[name]) + 1, eager=True)
        ids = found.replace_strict(values[name], numbers[1:]).cast(pl.Int64)
        is_list = rows.schema[name] == pl.List
        numbered = (pl.element() if is_list else pl.col(name)).replace_strict(
            numbers[: len(found) + 1], pl.concat([numbers[:1], ids])
        )
        rows = rows.with_columns(pl.col(name).list.eval(numbered) if is_list else numbered)
    return replace(features, rows=rows, values=values)


def _label_ids(values: pl.Series, earlier: IdSummary | None) -> IdSummary:
    """Return how the values of a feature became ids: 1, 2, ..., those of an earlier dataset first."""
    labels = [*map(str, values)]
    digest = hashlib.sha256(json.dumps(labels).encode()).hexdigest()
    versions = _versions(earlier, len(labels), digest)
    return IdSummary(rule=DENSE, kind="text", distinct=len(labels), versions=versions)


def look_up_items(features: Features, ids: Ids, *, as_table: bool) -> FeatureLookup:
    """Return the lookup of features of events, or of none if they become a table, of all items of the vocabulary."""
    if not as_table:
        return FeatureLookup(features, of="items")
    if ids.summary.collisions:
        shared = f"{ids.summary.collisions:,} items share their ids by {ids.summary.rule}"
        raise DataError(f"{shared}, so no table has their features; choose dense ids or item_features_as 'events'")
    lookup = FeatureLookup(replace(features, rows=pl.DataFrame()), of="items")
    lookup.requested |= (ids.encode(features.keys) > 0) & (ids.summary.rule == DENSE)
    return lookup


def _versions(earlier: IdSummary | None, size: int, digest: str) -> tuple[VocabularyVersion, ...]:
    """Return the versions of a vocabulary that begins with an earlier one."""
    versions = () if earlier is None else earlier.versions
    is_new = not versions or versions[-1].sha256 != digest
    return (*versions, VocabularyVersion(size=size, sha256=digest)) if is_new else versions


def _digest(kind: IdKind, keys: NDArray[np.int64]) -> str:
    """Return the SHA-256 of the values of a vocabulary in their order, given their keys [n]."""
    digest = hashlib.sha256(kind.encode())
    digest.update(keys.astype("<i8", copy=False).data)
    return digest.hexdigest()
