"""Sequences -> the Parquet files of a split, one row group at a time."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    ITEM_ID,
    LENGTH,
    MULTI_VALUED,
    NUM_TARGETS,
    USER_ID,
    WINDOW,
    DataFile,
    Split,
    sha256_of,
    summarize_lengths,
)
from evenrank.preprocess.build.ids import DENSE, Ids
from evenrank.preprocess.build.sequences import Sequences
from evenrank.preprocess.build.vocabulary import vocabulary_name, vocabulary_rows
from evenrank.preprocess.output.replace import ITEM_FEATURES_NAME
from evenrank.preprocess.sources.interactions import Interactions

# Constant, so that the files do not depend on the machine. 16,384 rows as long as those of MovieLens take about 20 MB.
ROWS_PER_FILE = 16_384
# A row group ends at the first of these limits. It is the unit of writing, reading and buffering.
ROWS_PER_GROUP = 512
EVENTS_PER_GROUP = 500_000
_MAX_QUEUED_GROUPS = 4  # row groups waiting to be encoded
_Columns = dict[str, Any]  # arrays by column, [rows] or [events] concatenated over the rows; Series of context


class SplitWriter:
    """Writes one split; the files depend only on the rows, not on how many are appended at a time.

    Args:
        folder: folder of the dataset.
        name: name of the split.
        row_columns: further columns besides lists of events, and their types: `window`, `num_targets` (int32),
            contextual features.
        extra_events: further list columns and their element types.
    """

    def __init__(
        self, folder: Path, name: str, row_columns: Mapping[str, str], extra_events: Mapping[str, str]
    ) -> None:
        self._folder, self._name = folder, name
        element_types = {**EVENT_DTYPES, **extra_events}
        self._event_columns = tuple(element_types)
        row_types = {USER_ID: "int64", **row_columns}
        fields = [pa.field(column, _arrow_type(dtype), nullable=False) for column, dtype in row_types.items()]
        fields += [pa.field(column, pa.list_(pa.type_for_alias(dtype))) for column, dtype in element_types.items()]
        self._schema = pa.schema([*fields, pa.field(LENGTH, pa.int32(), nullable=False)])
        (folder / name).mkdir()
        self._pending: list[_Columns] = []
        self._pending_rows = self._pending_events = 0
        self._file_rows = 0  # of the current file, including pending ones
        self._files: list[DataFile] = []
        self._file: pq.ParquetWriter | None = None
        self._lengths: list[NDArray[np.int64]] = []
        self.largest = dict.fromkeys((USER_ID, ITEM_ID, ACTION), -1)  # largest value that was written
        # One thread encodes row groups while the next ones are built.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="evenrank-writer")
        self._queue: deque[Future[None]] = deque()

    def append(self, sequences: Sequences, context: pl.DataFrame) -> None:
        """Append rows, with their contextual features: a column [rows] each."""
        lengths = sequences.lengths
        self._lengths.append(lengths)
        cumulative_events = np.cumsum(lengths)
        begin = 0
        while begin < len(sequences):
            events_before = 0 if begin == 0 else int(cumulative_events[begin - 1])
            group_end = np.searchsorted(cumulative_events, events_before + EVENTS_PER_GROUP - self._pending_events) + 1
            max_rows = min(ROWS_PER_GROUP - self._pending_rows, ROWS_PER_FILE - self._file_rows)
            end = min(len(sequences), begin + max_rows, max(int(group_end), begin + 1))
            self._add_pending(sequences.take(np.arange(begin, end)), context[begin:end])
            is_full = self._pending_rows == ROWS_PER_GROUP or self._pending_events >= EVENTS_PER_GROUP
            if is_full or self._file_rows == ROWS_PER_FILE:
                self._write_group()
            begin = end

    def _add_pending(self, rows: Sequences, context: pl.DataFrame) -> None:
        columns: _Columns = {USER_ID: rows.user_ids, WINDOW: rows.windows, NUM_TARGETS: rows.num_targets}
        columns |= context.to_dict()
        columns |= {name: rows.values(name) for name in self._event_columns}
        columns[LENGTH] = rows.lengths.astype(np.int32)
        for name, largest in self.largest.items():
            self.largest[name] = max(largest, int(columns[name].max(initial=-1)))
        self._pending.append(columns)
        self._pending_rows += len(rows)
        self._pending_events += len(columns[ITEM_ID])
        self._file_rows += len(rows)

    def close(self) -> Split:
        """Finish the files and return their description; an empty split has one file with a schema and no rows."""
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *self._lengths])
        if self._pending_rows or not len(lengths):
            self._write_group()
        while self._queue:
            self._queue.popleft().result()
        self._encoder.shutdown()
        if self._file is not None:
            self._end_file(self._file_rows)
        summary = summarize_lengths(lengths)
        return Split(files=tuple(self._files), rows=len(lengths), interactions=int(lengths.sum()), lengths=summary)

    def abandon(self) -> None:
        """Stop the thread and close the file after an error."""
        self._encoder.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def _write_group(self) -> None:
        pending, self._pending = self._pending, []
        self._pending_rows = self._pending_events = 0
        ends_file = self._file_rows == ROWS_PER_FILE
        if ends_file:
            self._file_rows = 0
        if len(self._queue) >= _MAX_QUEUED_GROUPS:
            self._queue.popleft().result()
        self._queue.append(self._encoder.submit(self._encode, pending, ends_file))

    def _encode(self, parts: list[_Columns], ends_file: bool) -> None:
        if self._file is None:
            # Delta encoding is faster and smaller than a dictionary, even for random values, because ids and time
            # stamps use few of their 64 bits.
            lists = {entry.name: entry.type.value_type for entry in self._schema if pa.types.is_list(entry.type)}
            delta, split = "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"
            self._file = pq.ParquetWriter(
                self._folder / self._current_path(),
                self._schema,
                compression="zstd",
                use_dictionary=False,
                column_encoding={
                    f"{name}.list.element": delta if t != pa.float32() else split for name, t in lists.items()
                },
            )
        if parts:
            self._file.write_table(self._to_table(parts), row_group_size=ROWS_PER_GROUP)
        if ends_file:
            self._end_file(ROWS_PER_FILE)

    def _to_table(self, parts: Sequence[_Columns]) -> pa.Table:
        arrays = {name: _arrow_array([part[name] for part in parts]) for name in self._schema.names}
        offsets = _arrow_array([np.zeros(1, dtype=np.int32), np.cumsum(arrays[LENGTH].to_numpy(), dtype=np.int32)])
        for name in self._event_columns:
            arrays[name] = pa.ListArray.from_arrays(offsets, arrays[name])
        return pa.table(arrays, schema=self._schema)

    def _end_file(self, num_rows: int) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        path = self._current_path()
        self._files.append(DataFile(path=path, rows=num_rows, sha256=sha256_of(self._folder / path)))

    def _current_path(self) -> str:
        return f"{self._name}/part-{len(self._files):05d}.parquet"


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
    types = {ITEM_ID: "int64", **features.dtypes}
    schema = pa.schema([pa.field(name, _arrow_type(dtype), nullable=False) for name, dtype in types.items()])
    columns = {ITEM_ID: item_ids[order], **{name: rows.get_column(name).to_arrow() for name in features.dtypes}}
    pq.write_table(pa.table(columns, schema=schema), folder / ITEM_FEATURES_NAME, compression="zstd")
    return DataFile(path=ITEM_FEATURES_NAME, rows=len(rows), sha256=sha256_of(folder / ITEM_FEATURES_NAME))


def _arrow_type(dtype: str) -> pa.DataType:
    return pa.list_(pa.int64()) if dtype == MULTI_VALUED else pa.type_for_alias(dtype)


def _arrow_array(parts: Sequence[Any]) -> pa.Array:
    """Join arrays, or Series, without `pa.array`, which imports pandas where it is installed: 0.2 seconds."""
    if isinstance(parts[0], pl.Series):
        return pl.concat(parts).to_arrow()
    values = np.concatenate(parts)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
