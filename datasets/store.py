"""The columns of a split as memory-mapped files: random access by row, shared by every process of a machine.

The Parquet files are unpacked once into flat `.npy` files, in a cache folder that carries the manifest's content hash:

    row         0          1     2
    item_id   [ 7 3 9 | (none) | 4 4 ]      events, row after row
    offsets   [ 0       3        3     5 ]  row r is offsets[r]..offsets[r+1]-1
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.datasets.errors import DataError
from evenrank.datasets.schema import (
    CACHE_NAME,
    EVENT_DTYPES,
    LENGTH,
    USER_ID,
    Manifest,
    Split,
    read_manifest,
    sha256_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceStore:
    """One split of a dataset, open for reading. Arrays are read-only views of mapped files."""

    manifest: Manifest
    split: str
    offsets: NDArray[np.int64]  # [rows + 1]: where each row's events begin
    events: Mapping[str, NDArray[np.integer]]  # per list column: [interactions]
    rows: Mapping[str, NDArray[np.int64]]  # user_id and each contextual feature: [rows]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events per row: int64 [rows]."""
        return np.diff(self.offsets)


def open_store(path: Path | str, split: str = "train") -> SequenceStore:
    """Open a split of the dataset in folder `path`; the first to do so on a machine unpacks it.

    Raises:
        DataError: the folder is no dataset, has no such split, or its Parquet files are not what the manifest says.

    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(sorted(manifest.splits))}")
    info = manifest.splits[split]
    sizes = {
        "offsets": info.rows + 1,
        **dict.fromkeys((USER_ID, *manifest.contextual), info.rows),
        **dict.fromkeys((*EVENT_DTYPES, *manifest.extra_events), info.interactions),
    }
    columns = _map_columns(_built_cache(folder, manifest, split), sizes)
    return SequenceStore(
        manifest=manifest,
        split=split,
        offsets=columns["offsets"],
        events={name: columns[name] for name in (*EVENT_DTYPES, *manifest.extra_events)},
        rows={name: columns[name] for name in (USER_ID, *manifest.contextual)},
    )


def _map_columns(cache: Path, sizes: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    columns: dict[str, NDArray[np.int64]] = {}
    for name, size in sizes.items():
        path = cache / f"{name}.npy"
        try:
            columns[name] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} is damaged; delete {cache}, and it is made anew") from error
        if columns[name].shape != (size,):
            raise DataError(f"{path} is damaged; delete {cache}, and it is made anew")
    return columns


def _built_cache(folder: Path, manifest: Manifest, split: str) -> Path:
    """Return the folder with the split's flat columns, building it where no process has."""
    candidates = [folder / CACHE_NAME, Path.home() / ".cache" / "evenrank"]
    name = f"{manifest.content_hash}-{split}"
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
    element_types = {**EVENT_DTYPES, **manifest.extra_events}
    row_names = (USER_ID, *manifest.contextual)
    offsets = _create(into / "offsets.npy", "int64", split.rows + 1)
    rows = {name: _create(into / f"{name}.npy", "int64", split.rows) for name in row_names}
    events = {name: _create(into / f"{name}.npy", dtype, split.interactions) for name, dtype in element_types.items()}
    row = event = 0
    offsets[0] = 0
    for file in split.files:
        path = folder / file.path
        if path.is_file() and sha256_of(path) != file.sha256:
            raise DataError(f"{path} has another SHA-256 than its manifest says; preprocess the dataset again")
        for batch in _record_batches(path, [*row_names, *element_types, LENGTH]):
            lengths = _flat(batch.column(LENGTH), "int32", LENGTH, path).astype(np.int64)
            end_row, end_event = row + len(lengths), event + int(lengths.sum())
            if end_row > split.rows or end_event > split.interactions:
                raise DataError(
                    f"{path} holds more rows or events than the manifest says; preprocess the dataset again"
                )
            np.cumsum(lengths, out=offsets[row + 1 : end_row + 1])
            offsets[row + 1 : end_row + 1] += event
            for name in row_names:
                rows[name][row:end_row] = _flat(batch.column(name), "int64", name, path)
            for name, dtype in element_types.items():
                events[name][event:end_event] = _list_values(batch.column(name), dtype, name, path, lengths)
            row, event = end_row, end_event
    if (row, event) != (split.rows, split.interactions):
        raise DataError(
            f"{folder} holds {row:,} rows and {event:,} events, its manifest says {split.rows:,} and "
            f"{split.interactions:,}; preprocess the dataset again"
        )


def _create(path: Path, dtype: str, size: int) -> NDArray[np.int64]:
    if size == 0:  # an empty range cannot be mapped for writing
        np.save(path, np.empty(0, dtype=dtype))
        empty: NDArray[np.int64] = np.load(path)
        return empty
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(size,))


def _record_batches(path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{path} lacks the column {missing[0]!r}; preprocess the dataset again")
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group, columns=names).combine_chunks().to_batches()
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read as Parquet ({reason}); preprocess the dataset again") from error


def _flat(column: pa.Array, dtype: str, name: str, path: Path) -> NDArray[np.integer]:
    if str(column.type) != dtype or column.null_count:
        found = f"{column.null_count} nulls" if column.null_count else f"type {column.type}"
        raise DataError(f"{path}: column {name!r} must be {dtype} without nulls, it has {found}")
    values: NDArray[np.integer] = column.to_numpy()
    return values


def _list_values(
    column: pa.Array, dtype: str, name: str, path: Path, lengths: NDArray[np.int64]
) -> NDArray[np.integer]:
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        raise DataError(f"{path}: column {name!r} must be list<{dtype}> without nulls, it is {column.type}")
    values = _flat(column.flatten(), dtype, name, path)
    if not np.array_equal(np.diff(column.offsets.to_numpy()), lengths):
        raise DataError(f"{path}: in column {name!r} some row's list differs from its {LENGTH!r}")
    return values
