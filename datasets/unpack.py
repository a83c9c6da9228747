"""Unpacks a split's Parquet files, once a machine, into flat `.npy` files that can be mapped.

They lie in a cache folder whose name carries the manifest's content hash, so it never belongs to other data. It is
built under a lock, and appears by a rename: nobody ever maps a file that is still being written.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import (
    CACHE_NAME,
    EVENT_DTYPES,
    LENGTH,
    NUM_TARGETS,
    TIMESTAMP_MS,
    USER_ID,
    Manifest,
    Split,
    sha256_of,
)

OFFSETS = "offsets"
TIME_ORDER = "time_order"
_LAYOUT = "v2"  # of the cache; another layout has another folder


def unpacked(folder: Path, manifest: Manifest, split: str) -> Path:
    """Return the folder with a split's columns as `.npy` files, making it where no process has.

    Raises:
        DataError: the Parquet files are not what the manifest says, or the cache cannot be written.

    """
    candidates = [folder / CACHE_NAME, Path.home() / ".cache" / "evenrank"]
    name = f"{manifest.content_hash}-{split}-{_LAYOUT}"
    for root in candidates:
        if (root / name).is_dir():
            return root / name
    root = candidates[0] if os.access(folder, os.W_OK) else candidates[1]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if not (root / name).is_dir():  # else another process was first
                partial = root / f"{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # what a builder that was killed left behind
                partial.mkdir()
                try:
                    _build(folder, manifest, manifest.splits[split], partial)
                    partial.rename(root / name)
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
    except OSError as error:
        raise DataError(f"the cache {root} could not be written: {error.strerror or error}; free the place") from error
    return root / name


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between the processes of this machine; it ends with its holder, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, manifest: Manifest, split: Split, into: Path) -> None:
    offsets = _create(into, OFFSETS, "int64", split.rows + 1)
    offsets[0] = 0
    columns: dict[str, NDArray[Any]] = {}
    row = event = 0
    for file in split.files:
        path = folder / file.path
        if path.is_file() and sha256_of(path) != file.sha256:
            raise DataError(f"{path} has another SHA-256 than its manifest says; preprocess the dataset again")
        for lengths, rows, events in read_rows(path, manifest):
            end_row, end_event = row + len(lengths), event + int(lengths.sum())
            if end_row > split.rows or end_event > split.interactions:
                raise DataError(
                    f"{path} holds more rows or events than the manifest says; preprocess the dataset again"
                )
            np.cumsum(lengths, out=offsets[row + 1 : end_row + 1])
            offsets[row + 1 : end_row + 1] += event
            for name, values in rows.items():
                _column(columns, into, name, values, split.rows)[row:end_row] = values
            for name, values in events.items():
                _column(columns, into, name, values, split.interactions)[event:end_event] = values
            row, event = end_row, end_event
    if (row, event) != (split.rows, split.interactions):
        raise DataError(
            f"{folder} holds {row:,} rows and {event:,} events, its manifest says {split.rows:,} and "
            f"{split.interactions:,}; preprocess the dataset again"
        )
    for name, dtype in {**EVENT_DTYPES, **manifest.extra_events}.items():  # nothing was read of a split without rows
        _column(columns, into, name, np.empty(0, dtype), split.interactions)
    for name in (USER_ID, *manifest.contextual):
        _column(columns, into, name, np.empty(0, np.int64), split.rows)
    order = _create(into, TIME_ORDER, "int64", split.rows)
    order[:] = _by_time(offsets, columns[TIMESTAMP_MS])


def _by_time(offsets: NDArray[np.int64], timestamps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Order rows by the time of their last event; those without events come first, ties in the order of the rows."""
    ends, lengths = offsets[1:], np.diff(offsets)
    last = np.full(len(ends), np.iinfo(np.int64).min)
    last[lengths > 0] = timestamps[ends[lengths > 0] - 1]
    return np.argsort(last, kind="stable")


def _column(
    columns: dict[str, NDArray[Any]], into: Path, name: str, values: NDArray[np.integer], size: int
) -> NDArray[Any]:
    if name not in columns:
        columns[name] = _create(into, name, str(values.dtype), size)
    return columns[name]


def _create(into: Path, name: str, dtype: str, size: int) -> NDArray[Any]:
    path = into / f"{name}.npy"
    if size == 0:  # an empty range cannot be mapped for writing
        np.save(path, np.empty(0, dtype=dtype))
        empty: NDArray[Any] = np.load(path)
        return empty
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(size,))


Rows = tuple[NDArray[np.int64], dict[str, NDArray[np.integer]], dict[str, NDArray[np.integer]]]


def read_rows(path: Path, manifest: Manifest) -> Iterator[Rows]:
    """Read a Parquet file by row groups, and check it.

    Yields:
        The rows' lengths, int64 [n]; the columns with a value a row (`num_targets` where the file has it), [n]; and
        those with a value an event, [sum of lengths].

    Raises:
        DataError: the file cannot be read, or a column is missing, of another type, has nulls or other lengths.

    """
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield read_row_group(file, group, manifest, str(path))
    except (OSError, pa.ArrowException) as error:
        raise unreadable(str(path), error) from error


def unreadable(name: str, error: Exception) -> DataError:
    """Say in one line that a file is no Parquet file."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{name} cannot be read as Parquet ({reason}); preprocess the dataset again")


def read_row_group(file: pq.ParquetFile, group: int, manifest: Manifest, name: str) -> Rows:
    """Read and check one row group; as `read_rows`. `name` is what messages call the file."""
    event_types = {**EVENT_DTYPES, **manifest.extra_events}
    row_types = dict.fromkeys((USER_ID, *manifest.contextual), "int64")
    if NUM_TARGETS in file.schema_arrow.names:
        row_types[NUM_TARGETS] = "int32"
    wanted = [*row_types, *event_types, LENGTH]
    missing = [column for column in wanted if column not in file.schema_arrow.names]
    if missing:
        raise DataError(f"{name} lacks the column {missing[0]!r}; preprocess the dataset again")
    table = file.read_row_group(group, columns=wanted).combine_chunks()
    columns = {column: table.column(column).combine_chunks() for column in wanted}
    lengths = _flat(columns[LENGTH], "int32", LENGTH, name).astype(np.int64)
    if (lengths < 0).any():
        raise DataError(f"{name}: a row has {LENGTH!r} {int(lengths.min())}; preprocess the dataset again")
    return (
        lengths,
        {column: _flat(columns[column], dtype, column, name) for column, dtype in row_types.items()},
        {column: _list_values(columns[column], dtype, column, name, lengths) for column, dtype in event_types.items()},
    )


def _flat(column: pa.Array, dtype: str, name: str, file: str) -> NDArray[np.integer]:
    if str(column.type) != dtype or column.null_count:
        found = f"{column.null_count} nulls" if column.null_count else f"type {column.type}"
        raise DataError(f"{file}: column {name!r} must be {dtype} without nulls, it has {found}")
    values: NDArray[np.integer] = column.to_numpy()
    return values


def _list_values(column: pa.Array, dtype: str, name: str, file: str, lengths: NDArray[np.int64]) -> NDArray[np.integer]:
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        found = f"{column.null_count} null lists" if column.null_count else f"type {column.type}"
        raise DataError(f"{file}: column {name!r} must be list<{dtype}> without nulls, it has {found}")
    values = _flat(column.flatten(), dtype, name, file)
    if not np.array_equal(np.diff(column.offsets.to_numpy()), lengths):
        raise DataError(f"{file}: in column {name!r} some row's list differs from its {LENGTH!r}")
    return values
