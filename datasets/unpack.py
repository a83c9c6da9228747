"""Unpack the Parquet files of a split into flat `.npy` files that can be memory-mapped, once per machine.

    OUT/.cache/CONTENT-HASH-train-v2/offsets.npy, item_id.npy, user_id.npy, time_order.npy, ...

The name of the cache folder contains the manifest's content hash, so a cache is never used for other data. It is built
under a lock and renamed into place, so no process maps a file that is still being written.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import DataError, first_line
from evenrank.datasets.schema import CACHE_NAME, LENGTH, NUM_TARGETS, TIMESTAMP_MS, Manifest, Split, sha256_of

OFFSETS = "offsets"
TIME_ORDER = "time_order"
_LAYOUT = "v2"  # version of the cache's contents, part of the folder's name


class RowBlock(NamedTuple):
    """Consecutive rows of a split."""

    lengths: NDArray[np.int64]
    """[n]: events of each row."""
    row_columns: dict[str, NDArray[np.integer]]
    """Per column with one value per row: [n]. Contains `num_targets` if the file does."""
    event_columns: dict[str, NDArray[np.integer]]
    """Per list column: [sum(lengths)]."""


def unpack(folder: Path, manifest: Manifest, split: str) -> Path:
    """Return the cache folder with a split's columns as `.npy` files; build it if it does not exist.

    Raises:
        DataError: the Parquet files do not match the manifest, or the cache cannot be written.

    """
    candidates = [folder / CACHE_NAME, Path.home() / ".cache" / "evenrank"]
    name = f"{manifest.content_hash}-{split}-{_LAYOUT}"
    for root in candidates:
        if (root / name).is_dir():
            return root / name
    root = candidates[0] if os.access(folder, os.W_OK) else candidates[1]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{name}.lock"):
            if not (root / name).is_dir():  # else another process has built it in the meantime
                partial = root / f"{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
                partial.mkdir()
                try:
                    _build(folder, manifest, manifest.splits[split], partial)
                    partial.rename(root / name)
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
    except OSError as error:
        raise DataError(
            f"the cache {root} could not be written: {error.strerror or error}; free space, or clear that path"
        ) from error
    return root / name


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among the processes of this machine; the kernel releases it if the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, manifest: Manifest, split: Split, cache: Path) -> None:
    offsets = _create(cache, OFFSETS, "int64", split.rows + 1)
    offsets[0] = 0
    columns: dict[str, NDArray[Any]] = {}
    row = event = 0
    for file in split.files:
        path = folder / file.path
        if path.is_file() and sha256_of(path) != file.sha256:
            raise DataError(f"{path} does not have the SHA-256 in its manifest; preprocess the dataset again")
        for lengths, row_columns, event_columns in _read_blocks(path, manifest):
            end_row, end_event = row + len(lengths), event + int(lengths.sum())
            if end_row > split.rows or end_event > split.interactions:
                raise DataError(
                    f"{path} contains more rows or events than its manifest says; preprocess the dataset again"
                )
            np.cumsum(lengths, out=offsets[row + 1 : end_row + 1])
            offsets[row + 1 : end_row + 1] += event
            for name, values in row_columns.items():
                _column(columns, cache, name, values, split.rows)[row:end_row] = values
            for name, values in event_columns.items():
                _column(columns, cache, name, values, split.interactions)[event:end_event] = values
            row, event = end_row, end_event
    if (row, event) != (split.rows, split.interactions):
        raise DataError(
            f"{folder} contains {row:,} rows and {event:,} events, its manifest says {split.rows:,} and "
            f"{split.interactions:,}; preprocess the dataset again"
        )
    # A split without rows has not created any column yet.
    for name, dtype in manifest.event_dtypes.items():
        _column(columns, cache, name, np.empty(0, dtype), split.interactions)
    for name in manifest.row_columns:
        _column(columns, cache, name, np.empty(0, np.int64), split.rows)
    time_order = _create(cache, TIME_ORDER, "int64", split.rows)
    time_order[:] = _rows_by_time(offsets, columns[TIMESTAMP_MS])


def _rows_by_time(offsets: NDArray[np.int64], timestamps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort rows by the time of their last event, stably; rows without events come first."""
    ends, lengths = offsets[1:], np.diff(offsets)
    last_times = np.full(len(ends), np.iinfo(np.int64).min)
    last_times[lengths > 0] = timestamps[ends[lengths > 0] - 1]
    return np.argsort(last_times, kind="stable")


def _column(
    columns: dict[str, NDArray[Any]], cache: Path, name: str, values: NDArray[np.integer], length: int
) -> NDArray[Any]:
    """Return a column to write to; create it with the dtype of `values` if it does not exist."""
    if name not in columns:
        columns[name] = _create(cache, name, str(values.dtype), length)
    return columns[name]


def _create(cache: Path, name: str, dtype: str, length: int) -> NDArray[Any]:
    path = cache / f"{name}.npy"
    if length == 0:  # an empty file cannot be mapped
        np.save(path, np.empty(0, dtype=dtype))
        empty: NDArray[Any] = np.load(path)
        return empty
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(length,))


def _read_blocks(path: Path, manifest: Manifest) -> Iterator[RowBlock]:
    """Read and check a Parquet file, one row group at a time.

    Raises:
        DataError: the file cannot be read, or a column is missing, has another type, nulls or other lengths.

    """
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield read_row_group(file, group, manifest, str(path))
    except (OSError, pa.ArrowException) as error:
        raise unreadable(str(path), error) from error


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a file that cannot be read as Parquet, in one line."""
    return DataError(f"{path} cannot be read as Parquet ({first_line(error)}); preprocess the dataset again")


def read_row_group(file: pq.ParquetFile, group: int, manifest: Manifest, path: str) -> RowBlock:
    """Read and check a row group.

    Args:
        file: the open file.
        group: index of the row group.
        manifest: of the dataset.
        path: of the file, for messages.

    Raises:
        DataError: a column is missing, has another type, nulls or other lengths.

    """
    event_dtypes = manifest.event_dtypes
    row_dtypes = dict.fromkeys(manifest.row_columns, "int64")
    if NUM_TARGETS in file.schema_arrow.names:
        row_dtypes[NUM_TARGETS] = "int32"
    names = [*row_dtypes, *event_dtypes, LENGTH]
    missing = [name for name in names if name not in file.schema_arrow.names]
    if missing:
        raise DataError(f"{path} lacks the column {missing[0]!r}; preprocess the dataset again")
    table = file.read_row_group(group, columns=names).combine_chunks()
    columns = {name: table.column(name).combine_chunks() for name in names}
    lengths = _flat_values(columns[LENGTH], "int32", LENGTH, path).astype(np.int64)
    if (lengths < 0).any():
        raise DataError(f"{path}: a row has {LENGTH!r} {int(lengths.min())}; preprocess the dataset again")
    return RowBlock(
        lengths,
        {name: _flat_values(columns[name], dtype, name, path) for name, dtype in row_dtypes.items()},
        {name: _list_values(columns[name], dtype, name, path, lengths) for name, dtype in event_dtypes.items()},
    )


def _flat_values(column: pa.Array, dtype: str, name: str, path: str) -> NDArray[np.integer]:
    if str(column.type) != dtype or column.null_count:
        actual = f"{column.null_count} nulls" if column.null_count else f"type {column.type}"
        raise DataError(
            f"{path}: column {name!r} must be {dtype} without nulls, it has {actual}; preprocess the dataset again"
        )
    values: NDArray[np.integer] = column.to_numpy()
    return values


def _list_values(column: pa.Array, dtype: str, name: str, path: str, lengths: NDArray[np.int64]) -> NDArray[np.integer]:
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        actual = f"{column.null_count} null lists" if column.null_count else f"type {column.type}"
        raise DataError(
            f"{path}: column {name!r} must be list<{dtype}> without nulls, it has {actual}; preprocess the dataset "
            "again"
        )
    values = _flat_values(column.flatten(), dtype, name, path)
    if not np.array_equal(np.diff(column.offsets.to_numpy()), lengths):
        raise DataError(
            f"{path}: a list of column {name!r} has another length than its row's {LENGTH!r}; preprocess the dataset "
            "again"
        )
    return values
