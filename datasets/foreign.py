"""Parquet files of other programs, with one row per user and lists of events, as a split without preprocessing.

A first pass over the files makes their manifest, which is kept in the cache until one of them changes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.listing import list_files
from evenrank.datasets import schema
from evenrank.datasets.event_statistics import read_statistics
from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    FLOAT,
    ITEM_ID,
    TARGETS,
    TIMESTAMP_MS,
    USER_ID,
    Column,
    IdSummary,
    Manifest,
    Split,
)
from evenrank.datasets.unpack import (
    YEAR_MS,
    RowBlock,
    check_columns,
    check_times,
    find_or_build,
    offsets_of,
    read_blocks,
    wrap_parquet_errors,
)

_LAYOUT = "v2"  # version of the manifests in the cache, part of the entry's name


@dataclass(frozen=True, kw_only=True, slots=True)
class ListReader:
    """Reads and checks row groups, like `read_row_group`; called with all of a folder, in order."""

    columns: Mapping[str, str]  # in the files, by name in batches
    row_numbers: Iterator[int] = field(default_factory=count)  # in place of user ids
    sort_by_time: bool = False  # else lists out of order are refused

    def __call__(self, file: pq.ParquetFile, group: int, manifest: Manifest, path: str) -> RowBlock:
        """Return the rows of a group; a null list has no events."""
        first_row = sum(file.metadata.row_group(before).num_rows for before in range(group))
        table = file.read_row_group(group, columns=[*self.columns.values()])
        return self.rows(table, manifest, path, first_row)

    def rows(self, table: pa.Table, manifest: Manifest, path: str, first_row: int) -> RowBlock:
        """Return the rows of a table that begins with a row of the file or other place `path`."""
        arrays = {name: table.column(column).combine_chunks() for name, column in self.columns.items()}
        of_events = [column for column in manifest.columns if column.kind == "event"]
        lists = {column.name: arrays[column.name] for column in of_events if column.name in arrays}
        if wrong := [name for name, array in lists.items() if not _is_list(array.type)]:
            raise DataError(f"{path}: column {self.columns[wrong[0]]!r} ({wrong[0]}) has no lists; map one that has")
        counts = {
            name: pc.call_function("list_value_length", [array]).fill_null(0).to_numpy()
            for name, array in lists.items()
        }
        lengths = counts[ITEM_ID].astype(np.int64)
        for name, others in counts.items():
            for row in np.flatnonzero(others != lengths)[:1]:
                of_items, of_others = repr(self.columns[ITEM_ID]), repr(self.columns[name])
                fault = f"{of_items} has {lengths[row]} values, {of_others} has {others[row]}"
                raise DataError(f"{path}, row {first_row + row}: {fault}; the lists of a row need one value per event")
        arrays |= {name: array.flatten() for name, array in lists.items()}
        known = {column.name: column for column in (*manifest.columns, TARGETS)}
        columns = {column.name: np.zeros(lengths.sum(), column.dtype) for column in of_events}
        columns[USER_ID] = np.fromiter(islice(self.row_numbers, len(lengths)), int)
        columns |= {name: self._values(known[name], array, path) for name, array in arrays.items()}
        if self.sort_by_time:
            order = np.lexsort((columns[TIMESTAMP_MS], np.repeat(np.arange(len(lengths)), lengths)))
            columns |= {column.name: columns[column.name][order] for column in of_events}
        if TIMESTAMP_MS in lists:
            # Times of a followed dataset can be in 1970, as with --timestamp-unit row; others are taken for seconds.
            is_early = "statistics" in manifest.options and read_statistics(manifest).first_ms < YEAR_MS
            has_unit = is_early or pa.types.is_timestamp(lists[TIMESTAMP_MS].type.value_type)
            place, column = f"{path}, row", repr(self.columns[TIMESTAMP_MS])
            check_times(
                columns[TIMESTAMP_MS], lengths, lambda row: f"{place} {first_row + row}: {column}", has_unit=has_unit
            )
        return RowBlock(columns, dict.fromkeys((column.name for column in of_events), offsets_of(lengths)))

    def _values(self, column: Column, array: pa.Array, path: str) -> NDArray[Any]:
        place = f"{path}: column {self.columns[column.name]!r} ({column.name})"
        fault: object = f"{array.null_count} nulls and type {array.type}"
        try:
            if pa.types.is_timestamp(array.type):
                array = array.cast(pa.timestamp("ms"), safe=False).cast("int64")
            if column.dtype == FLOAT:
                fill, maximum = (np.nan, np.fmax) if column.may_be_missing else (0, np.maximum)  # fmax ignores NaN
                floats: NDArray[np.float32] = array.cast(pa.float32()).fill_null(fill).to_numpy()
                largest = maximum.reduce(np.abs(floats), initial=0)
                if largest < (np.inf if array.type == pa.float32() else 1 << 24):  # else a float32 rounds integers
                    return floats
                rounded = f"{largest:.9g}, not finite or from 2^24 on"
                raise DataError(f"{place} has {rounded}; convert it to integers or float32")
            if pa.types.is_integer(array.type) and not array.null_count:
                values: NDArray[np.integer] = array.cast(column.dtype).to_numpy()
                if not column.is_index or values.min(initial=0) >= 0:
                    return values
                fault = values.min()
        except pa.ArrowException as error:
            raise DataError(f"{place} cannot have type {array.type}: {first_line(error)}; convert it") from error
        wanted = "must have integers, from 0 if they are ids"
        raise DataError(f"{place} {wanted}, it has {fault}; `evenrank preprocess` numbers ids")


def describe_folder(folder: Path, split: str, reader: ListReader) -> Manifest:
    """Return a manifest of the Parquet files below a folder, as one split, in the order of their paths."""
    columns = reader.columns
    if ITEM_ID not in columns:
        raise ConfigError(f"columns must name the column of {ITEM_ID}, they have {', '.join(columns) or 'nothing'}")
    if reader.sort_by_time and TIMESTAMP_MS not in columns:
        raise ConfigError(f"sort_by_time needs a column of {TIMESTAMP_MS}, they have {', '.join(columns)}")
    schema.check_new_names(columns.keys() - {USER_ID, *EVENT_DTYPES})
    files = [*list_files(folder, ("**", "*.parquet"))]  # the cache is hidden
    if not files:
        raise DataError(f"{folder} has no Parquet files; pass a folder with files that end in .parquet")
    stats = {name: (folder / name).stat() for name in files}
    versions = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    view = [*columns.items(), *["sorted"] * reader.sort_by_time]
    key = _hash([str(folder), split, view, versions])
    entry = find_or_build(
        folder, f"{key[:32]}-manifest-{_LAYOUT}", lambda path: _describe(folder, files, split, reader).write(path)
    )
    manifest = schema.read_manifest(entry)
    # With other columns, the same files are other data.
    return replace(manifest, content_hash=_hash([manifest.content_hash, view]))


def _hash(description: object) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _describe(folder: Path, names: list[str], split: str, reader: ListReader) -> Manifest:
    columns, files, types = reader.columns, [], {}
    for name in names:
        path = folder / name
        sha256 = schema.sha256_of(path)
        with wrap_parquet_errors(str(path)), pq.ParquetFile(path) as file:
            present = file.schema_arrow
            check_columns(columns.values(), present.names, path, f"known: {', '.join(present.names)}")
            files.append(schema.DataFile(path=name, rows=file.metadata.num_rows, sha256=sha256))
            types = {name: present.field(column).type for name, column in columns.items()}
    extra = {name: type_ for name, type_ in types.items() if name not in (USER_ID, *EVENT_DTYPES)}
    contextual = {name: _dtype(type_) for name, type_ in extra.items() if not _is_list(type_)}
    labelled = [name for name, dtype in contextual.items() if dtype != FLOAT]
    unread = Split(files=tuple(files), rows=sum(file.rows for file in files), interactions=0, lengths={})
    manifest = Manifest(
        dataset=folder.name,
        options={"columns": dict(columns), "sort_by_time": reader.sort_by_time},
        splits={split: unread},
        contextual=contextual,
        extra_events={name: _dtype(type_.value_type) for name, type_ in extra.items() if _is_list(type_)},
        vocabulary_sizes=dict.fromkeys((USER_ID, ITEM_ID, ACTION, *labelled), 0),
        context_labels=dict.fromkeys(labelled, (None,)),
        ids=dict.fromkeys((USER_ID, ITEM_ID), IdSummary(rule="keep", kind="int64")),
    )
    sizes, parts = dict(manifest.vocabulary_sizes), []
    for _, block in read_blocks(folder, manifest, unread, replace(reader, row_numbers=count())):
        parts.append(block.lengths)
        sizes = {name: max(size, int(block.columns[name].max(initial=-1)) + 1) for name, size in sizes.items()}
    lengths = np.concatenate([np.empty(0, dtype=np.int64), *parts])
    splits = {split: replace(unread, interactions=int(lengths.sum()), lengths=schema.summarize_lengths(lengths))}
    manifest = replace(manifest, splits=splits, vocabulary_sizes=sizes)
    return replace(manifest, content_hash=schema.content_hash(manifest))


def _dtype(type_: pa.DataType) -> str:
    return FLOAT if pa.types.is_floating(type_) else "int64"


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))
