"""The events of a range of user hashes -> sequences -> a Parquet file of each split.

Files end where ranges do, and the ranges depend on the number of events alone, so the bytes of a dataset depend neither
on buckets nor on how many ranges are written at once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.files import replacing
from evenrank.datasets.schema import (
    ITEM_ID,
    LENGTH,
    NUM_TARGETS,
    TARGETS,
    USER_ID,
    WINDOW,
    Column,
    DataFile,
    Schema,
    sha256_of,
)
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.build.count_events import EventCounts, count_events
from evenrank.preprocess.build.sequences import Sequences, build_sequences, request_table
from evenrank.preprocess.build.splits import EVAL, SplitFacts, SplitRule, cut_windows
from evenrank.preprocess.build.vocabulary import Ids, vocabulary_name, vocabulary_rows
from evenrank.preprocess.config import Filters, RequestRule
from evenrank.preprocess.log_config import DENSE
from evenrank.preprocess.read.features import FeatureLookup, Interactions, Seen
from evenrank.preprocess.replace import ITEM_FEATURES_NAME

# A row group ends at the first of these limits. It is the unit of writing, reading and buffering.
ROWS_PER_GROUP = 512
EVENTS_PER_GROUP = 500_000
# Target size. Building the sequences of so many takes about 0.08 GB, or twice as much if most times are equal.
EVENTS_PER_FILE = 1 << 20


def split_file(split: str, index: int) -> str:
    """Return the path of the file of a range within the folder of a dataset."""
    return f"{split}/part-{index:05d}.parquet"


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return the columns of a Parquet file."""
    fields = []
    for column in columns:
        dtype = pa.type_for_alias(column.dtype)
        dtype = dtype if column.kind == "scalar" else pa.list_(dtype)
        fields.append(pa.field(column.name, dtype, nullable=column.kind == "event"))
    return pa.schema(fields)


def write_rows(folder: Path, name: str, schema: pa.Schema, rows: Sequences, context: pl.DataFrame) -> DataFile:
    """Write rows, with their contextual features, a column [rows] each, to a file of a folder, and describe it."""
    (folder / name).parent.mkdir(exist_ok=True)
    with replacing(folder / name) as path, _open(path, schema) as file:
        table = _to_table(schema, rows, context)
        for begin, end in _row_groups(rows.lengths):
            file.write_table(table[begin:end], row_group_size=ROWS_PER_GROUP)
    return DataFile(path=name, rows=len(rows), sha256=sha256_of(folder / name))


def write_no_rows(folder: Path, name: str, schema: pa.Schema) -> DataFile:
    """Write the file of a split without rows, and describe it."""
    (folder / name).parent.mkdir(exist_ok=True)
    _open(folder / name, schema).close()
    return DataFile(path=name, rows=0, sha256=sha256_of(folder / name))


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Delta encoding is faster and smaller than a dictionary, even for random values, because ids and time stamps use
    # few of their 64 bits.
    lists = {field.name: field.type.value_type for field in schema if pa.types.is_list(field.type)}
    delta, split = "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"
    encodings = {f"{name}.list.element": delta if t != pa.float32() else split for name, t in lists.items()}
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, column_encoding=encodings)


def _row_groups(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    events = np.concatenate(([0], np.cumsum(lengths)))
    begin = 0
    while begin < len(lengths):
        last = int(np.searchsorted(events, events[begin] + EVENTS_PER_GROUP))  # the row that reaches the limit
        end = max(begin + 1, min(last, begin + ROWS_PER_GROUP, len(lengths)))
        yield begin, end
        begin = end


def _to_table(schema: pa.Schema, rows: Sequences, context: pl.DataFrame) -> pa.Table:
    columns: dict[str, NDArray[Any]] = {USER_ID: rows.user_ids, WINDOW: rows.windows, NUM_TARGETS: rows.num_targets}
    arrays = {name: _arrow_array(values) for name, values in columns.items()}
    arrays |= {column.name: column.to_arrow() for column in context.iter_columns()}
    arrays[LENGTH] = _arrow_array(rows.lengths.astype(np.int32))
    offsets = _arrow_array(np.concatenate(([0], np.cumsum(rows.lengths))).astype(np.int32))
    for field in schema:
        if field.name not in arrays:
            arrays[field.name] = pa.ListArray.from_arrays(offsets, _arrow_array(rows.values(field.name)))
    return pa.table({name: arrays[name] for name in schema.names}, schema=schema)


def write_item_features(folder: Path, source: Interactions, ids: Ids, requested: NDArray[np.bool_]) -> DataFile | None:
    """Write the vocabularies of the features of `requested` items, [n], and if there is to be one, their table."""
    features = source.item_features
    item_ids = ids.encode(features.keys)
    places = np.flatnonzero(requested & ((item_ids > 0) | (ids.summary.rule != DENSE)))  # 0 is no item of a vocabulary
    order = places[np.argsort(item_ids[places])]
    rows = features.rows[order]
    for name, values in features.values.items():
        counts = np.bincount(rows.get_column(name).explode().drop_nulls(), minlength=len(values) + 1)[1:]
        vocabulary = vocabulary_rows(1, values, pl.Series(counts))
        pq.write_table(vocabulary, folder / vocabulary_name(name), compression="zstd")
    if not source.has_item_table:
        return None
    schema = arrow_schema([Column(ITEM_ID, "scalar", "int64"), *features.columns])
    columns = {ITEM_ID: item_ids[order], **{name: rows.get_column(name).to_arrow() for name in rows.columns}}
    pq.write_table(pa.table(columns, schema=schema), folder / ITEM_FEATURES_NAME, compression="zstd")
    return DataFile(path=ITEM_FEATURES_NAME, rows=len(rows), sha256=sha256_of(folder / ITEM_FEATURES_NAME))


def _arrow_array(values: NDArray[np.number]) -> pa.Array:
    """Wrap an array, without `pa.array`, which imports pandas where it is installed: 0.2 seconds."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeRules:
    """What becomes of events, the same for all ranges of a dataset."""

    folder: Path  # of the dataset
    buckets: Buckets
    num_bits: int  # of a hash, which are the number of its range
    split: SplitRule
    facts: SplitFacts
    filters: Filters
    requests: RequestRule | None
    user_ids: Ids
    item_ids: Ids
    context: FeatureLookup
    items: FeatureLookup  # features of items that become columns of events
    columns: Schema  # of the dataset


class WrittenRange(NamedTuple):
    """What was written of a range, and what is in it."""

    files: Mapping[str, DataFile]  # by split; one without rows has none
    lengths: Mapping[str, NDArray[np.int64]]  # by split, the number of events of each row
    kept: Mapping[str, int]  # numbers of events by description, for the audit
    events: EventCounts
    requests: pa.Table | None
    users: Seen
    items: Seen


def split_schema(rules: RangeRules, split: str) -> pa.Schema:
    """Return the columns of the files of a split."""
    user, *others = rules.columns
    counted = [Column(WINDOW, "scalar", "int32")] * (rules.filters.window is not None)
    counted += [TARGETS] * (split == EVAL and rules.split.has_targets)
    return arrow_schema([user, *counted, *others, Column(LENGTH, "scalar", "int32")])


def write_range(rules: RangeRules, index: int) -> WrittenRange:
    """Write the files of the range with this number."""
    columns = rules.buckets.read_range(index, rules.num_bits)
    sequences, num_duplicates = build_sequences(columns, rules.user_ids.encode)
    features, items = rules.items.lookup(columns[ITEM_ID])
    events = {name: column.to_numpy() for name, column in zip(features.columns, features.iter_columns(), strict=True)}
    events = {**sequences.events, ITEM_ID: rules.item_ids.encode(columns[ITEM_ID]), **events}
    sequences = replace(sequences, events=events)
    del columns  # the keys of users and items
    may_be_missing = [column.name for column in rules.columns if column.may_be_missing]
    missing = {f"events without {name} (kept)": int(np.isnan(events[name]).sum()) for name in may_be_missing}
    divided = rules.split.divide(sequences, rules.facts)
    files, lengths, seen = {}, {}, []
    for split, rows in divided.items():
        # Windows would separate targets from the events before them, so rows with targets are not cut.
        rows = rows if rows.num_targets.any() else cut_windows(rows, rules.filters)
        context, users = rules.context.lookup(rows.user_keys)
        seen.append(users)
        lengths[split] = rows.lengths
        name = split_file(split, index)
        if len(rows):
            files[split] = write_rows(rules.folder, name, split_schema(rules, split), rows, context)
    known, unknown = (np.unique(np.concatenate(parts)) for parts in zip(*seen, strict=True))
    return WrittenRange(
        files=files,
        lengths=lengths,
        kept={"duplicate events (kept)": num_duplicates, **missing},
        events=count_events(sequences, divided),
        requests=None if rules.requests is None else request_table(sequences, rules.requests),
        users=Seen(known, unknown),
        items=items,
    )
