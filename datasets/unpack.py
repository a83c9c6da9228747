"""Unpacks the Parquet files of a split into flat `.npy` files that can be memory-mapped, once per machine.

    CACHE/CONTENT-HASH-train-v5/offsets.npy, num_targets.npy
                                rows/user_id.npy, ...
                                row_offsets/                of the features with any number of values per row
                                events/item_id.npy, ...

    OUT/.cache                        the cache if OUT can be written
    ~/.cache/evenrank                 otherwise, and if OUT is a URL, whose files are fetched
    TEMPORARY-FOLDER/evenrank-UID     if there is no home folder that can be written

The name of an entry contains the manifest's content hash, and the files are checked against it, so an entry is never
used for other data. It is built under a lock and renamed into place, so no process maps a file that is still being
written. Entries that others could have changed are not used.
"""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import DataError, first_line
from evenrank.core.files import WRITABLE_BY_OTHERS, is_trusted, locked, open_regular, user_folders
from evenrank.core.storage import CONNECTIONS, Remote
from evenrank.datasets.schema import (
    CACHE_NAME,
    FLOAT,
    LENGTH,
    NUM_TARGETS,
    REMEDY,
    TARGETS,
    TIMESTAMP_MS,
    Column,
    Manifest,
    Split,
)

YEAR_MS = 31_536_000_000
_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999  # of the years 1 to 9999, which `datetime` has

# Errors of a folder that this user cannot write to, not of a disk that is full or damaged.
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)


class _Cache(NamedTuple):
    """A folder of cache entries."""

    path: Path
    mode: int  # for creating it; also allows entries to be written by others
    owners: frozenset[int]  # users whose entries are trusted

    def trusts(self, path: Path) -> bool:
        return is_trusted(path, self.owners, may_be_written=self.mode)


def find_or_build(folder: Path | None, name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of a cache entry of the dataset in `folder`; `build` writes it to an empty folder if needed.

    Its name must identify its contents, because datasets share the per-user folders, the only ones of a dataset at a
    URL (None).
    """
    user = os.geteuid()
    caches = [_Cache(path, 0o700, frozenset((user,))) for path in user_folders()]  # best first
    if folder is not None:
        dataset = folder.stat()
        # Entries in the dataset's folder are as trustworthy as the dataset if its owner wrote them.
        mode = 0o755 | dataset.st_mode & WRITABLE_BY_OTHERS
        caches.insert(0, _Cache(folder / CACHE_NAME, mode, frozenset((user, dataset.st_uid, 0))))
    for cache in caches:
        if cache.trusts(cache.path) and cache.trusts(cache.path / name):
            return cache.path / name
    for cache in caches:
        try:
            cache.path.mkdir(mode=cache.mode & 0o755, parents=True, exist_ok=True)
            if not cache.trusts(cache.path):
                continue
            with locked(cache.path / f"{name}.lock"):
                if not os.path.lexists(cache.path / name):  # else another process has built it in the meantime
                    _build_entry(cache.path / name, build)
            if cache.trusts(cache.path / name):
                return cache.path / name
        except OSError as error:
            if error.errno not in _NOT_PERMITTED:
                raise DataError(
                    f"the cache {cache.path} could not be written: {error.strerror or error}; free space, or clear "
                    "that path"
                ) from error
    places = ", ".join(str(cache.path) for cache in caches)
    raise DataError(
        f"{folder or 'a dataset at a URL'} has no place for its unpacked columns: none of {places} can be written and "
        "belongs to this user alone; change the permissions of one of them"
    )


def _build_entry(entry: Path, build: Callable[[Path], None]) -> None:
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir(mode=0o755)
    try:
        build(partial)
        partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after an error; else it is no longer there


class ColumnWriter(contextlib.AbstractContextManager["ColumnWriter"]):
    """Writes a column to a new `.npy` file in parts.

    It is not mapped, because a store to a mapped file on a full disk kills the process. Its `length` is that so far.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("xb")
        self._dtype = np.dtype(dtype)
        self.length = 0
        self._file.write(_header(self._dtype, 0))  # as long as that of any other length

    def append(self, values: NDArray[Any]) -> None:
        """Append values [n] of the column's dtype."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self.length += len(values)

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._file.write(_header(self._dtype, self.length))
            self._file.flush()
            os.fsync(self._file.fileno())  # some file systems report only now that the disk is full


def map_column(path: Path, dtype: str, length: int) -> NDArray[Any]:
    """Map a column into memory, read-only: [length]; raises a DataError if the file is no such column."""
    expected = np.dtype(dtype)
    header = _header(expected, length)
    with open_regular(path) as file:
        if file.read(len(header)) != header:  # not parsed, because type and length are known from the manifest
            raise DataError(f"{path} is not a column of {length:,} {dtype}; unpack it again")
        if os.fstat(file.fileno()).st_size != len(header) + length * expected.itemsize:
            raise DataError(f"{path} does not have the size that its header says; unpack it again")
    if not length:  # nothing to map
        return np.empty(0, expected)
    # A plain array, because methods of np.memmap take several times as long.
    return np.memmap(path, expected, mode="r", offset=len(header), shape=(length,)).view(np.ndarray)


def _header(dtype: np.dtype[Any], length: int) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})
    return header.getvalue()


OFFSETS, ROWS, ROW_OFFSETS, EVENTS = "offsets", "rows", "row_offsets", "events"
_LAYOUT = "v5"  # version of the cache's contents, part of the entry's name


def path_of(column: Column) -> str:
    """Return the path of the values of a column in a cache entry, without its suffix."""
    return column.name if column == TARGETS else f"{EVENTS if column.kind == 'event' else ROWS}/{column.name}"


class RowBlock(NamedTuple):
    """Consecutive rows of a split: n rows."""

    columns: dict[str, NDArray[Any]]  # lists one after the other, also those of other rows; maybe `num_targets`
    offsets: dict[str, NDArray[np.int64]]  # per column of lists, where each row's values begin: [n + 1]

    @property
    def num_rows(self) -> int:
        """n."""
        return len(self.offsets[TIMESTAMP_MS]) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events per row: int64 [n]."""
        return np.diff(self.offsets[TIMESTAMP_MS])

    def values(self, name: str) -> NDArray[Any]:
        """Return the values that these rows have of a column."""
        offsets = self.offsets.get(name)
        return self.columns[name] if offsets is None else self.columns[name][offsets[0] : offsets[-1]]

    def rows(self, first: int, end: int) -> "RowBlock":
        """Return rows first..end-1, as views."""
        offsets = {name: of_rows[first : end + 1] for name, of_rows in self.offsets.items()}
        columns = {name: all_ if name in offsets else all_[first:end] for name, all_ in self.columns.items()}
        return RowBlock(columns, offsets)

    def copy(self) -> "RowBlock":
        """Return these rows, which take no more memory than they need."""
        columns = {name: self.values(name).copy() for name in self.columns}
        return RowBlock(columns, {name: offsets - offsets[0] for name, offsets in self.offsets.items()})


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return where rows [n] of these lengths begin, and where the last one ends: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


# `read_row_group`, or its like for files of another layout.
GroupReader = Callable[[pq.ParquetFile, int, Manifest, str], RowBlock]


def unpack(
    folder: Path, manifest: Manifest, split: str, read_group: GroupReader, source: Path | Remote | None = None
) -> Path:
    """Return the cache entry with a split's columns as `.npy` files; build it if it does not exist.

    `source` is where the Parquet files are, if not in `folder`.
    """
    name = f"{manifest.content_hash}-{split}-{_LAYOUT}"
    return find_or_build(
        folder, name, lambda entry: _build(source or folder, manifest, manifest.splits[split], read_group, entry)
    )


def _build(folder: Path | Remote, manifest: Manifest, split: Split, read_group: GroupReader, entry: Path) -> None:
    for kind in (ROWS, ROW_OFFSETS, EVENTS):
        (entry / kind).mkdir()
    with contextlib.ExitStack() as stack:

        def create(name: str, dtype: str) -> ColumnWriter:
            return stack.enter_context(ColumnWriter(entry / f"{name}.npy", dtype))

        offsets = {TIMESTAMP_MS: create(OFFSETS, "int64")}
        columns = {}
        for one in manifest.columns:
            columns[one.name] = create(path_of(one), one.dtype)
            if one.kind == "list":
                offsets[one.name] = create(f"{ROW_OFFSETS}/{one.name}", "int64")
        for column in offsets.values():
            column.append(np.zeros(1, dtype=np.int64))
        for index, (path, block) in enumerate(read_blocks(folder, manifest, split, read_group, entry)):
            if index == 0 and NUM_TARGETS in block.columns:
                columns[NUM_TARGETS] = create(path_of(TARGETS), TARGETS.dtype)
            if block.columns.keys() != columns.keys():
                raise DataError(f"{path}: some files have a column {NUM_TARGETS!r} and some not; {REMEDY}")
            for name, column in offsets.items():
                column.append(columns[name].length + block.offsets[name][1:])
            for name, values in block.columns.items():
                columns[name].append(values)
        num_rows, num_events = offsets[TIMESTAMP_MS].length - 1, columns[TIMESTAMP_MS].length
        if (num_rows, num_events) != (split.rows, split.interactions):
            raise DataError(
                f"{folder} contains {num_rows:,} rows and {num_events:,} events, its manifest says {split.rows:,} and "
                f"{split.interactions:,}; {REMEDY}"
            )


def read_blocks(
    folder: Path | Remote, manifest: Manifest, split: Split, read_group: GroupReader, scratch: Path | None = None
) -> Iterator[tuple[Path | Remote, RowBlock]]:
    """Read and check the Parquet files of a split, one row group at a time; `scratch` has copies of remote files."""
    for first in range(0, len(split.files), CONNECTIONS):
        files = split.files[first : first + CONNECTIONS]
        paths = [folder / file.path for file in files]
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(CONNECTIONS) as pool:
            opening = pool.map(lambda path, stack=stack: stack.enter_context(open_file(path, scratch)), paths)
            for file, path, opened in zip(files, paths, opening, strict=True):
                # What is verified is what is read, even if the file is replaced meanwhile.
                if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                    raise DataError(f"{path} does not have the SHA-256 in its manifest; {REMEDY}")
                opened.seek(0)
                with wrap_parquet_errors(str(path)), pq.ParquetFile(opened) as parquet:
                    for group in range(parquet.num_row_groups):
                        yield path, read_group(parquet, group, manifest, str(path))


@contextlib.contextmanager
def open_file(path: Path | Remote, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file; fetch a remote one into one that has no name, so that nothing is left if this process is killed."""
    with open_regular(path) if isinstance(path, Path) else tempfile.TemporaryFile(dir=scratch) as opened:
        for chunk in () if isinstance(path, Path) else path.chunks():
            opened.write(chunk)
        opened.seek(0)
        yield opened


@contextlib.contextmanager
def wrap_parquet_errors(path: str) -> Iterator[None]:
    """Raise errors of pyarrow as a DataError that names the file."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet ({first_line(error)}); {REMEDY}") from error


def check_columns(names: Iterable[str], present: Sequence[str], place: object, remedy: str) -> None:
    """Raise a DataError about the first of these columns that a file or table does not have, or has more than once."""
    for name in names:
        if (number := present.count(name)) != 1:
            raise DataError(f"{place} has {number} columns {name!r}; {remedy}")


def read_row_group(file: pq.ParquetFile, group: int, manifest: Manifest, path: str) -> RowBlock:
    """Read a row group; check types, lengths and ranges of its columns.

    No value is null or infinite, and NaN only those that may be missing.
    """
    columns, present = manifest.columns, file.schema_arrow.names
    if NUM_TARGETS in present:
        columns += (TARGETS,)
    names = [*(column.name for column in columns), LENGTH]
    check_columns(names, present, path, REMEDY)
    table = file.read_row_group(group, columns=names)
    chunks = {name: table.column(name) for name in names}
    # Combining copies, even a single one.
    arrays = {name: each.chunk(0) if each.num_chunks == 1 else each.combine_chunks() for name, each in chunks.items()}
    lengths = flat_values(arrays[LENGTH], "int32", LENGTH, path)
    _check_range(lengths, 0, None, LENGTH, path)
    values: dict[str, NDArray[Any]] = {}
    offsets: dict[str, NDArray[np.int64]] = {}
    of_events = offsets_of(lengths)
    for column in columns:
        name, kind, dtype, size, may_be_missing = column
        if kind == "scalar":
            values[name] = flat_values(arrays[name], dtype, name, path)
        else:
            values[name], offsets[name] = _list_values(arrays[name], dtype, name, path, may_be_missing)
        if kind == "event" and not np.array_equal(offsets[name], of_events):
            raise DataError(f"{path}: a list of column {name!r} has another length than its row's {LENGTH!r}; {REMEDY}")
        _check_range(values[name], 0 if column.is_index else None, size, name, path)
    if NUM_TARGETS in values and (values[NUM_TARGETS] > lengths).any():
        raise DataError(f"{path}: a row has more {NUM_TARGETS!r} than events; {REMEDY}")
    check_times(values[TIMESTAMP_MS], lengths, lambda row: f"{path}, row {row} of row group {group}: {TIMESTAMP_MS!r}")
    return RowBlock(values, offsets)


def check_times(
    times: NDArray[np.int64], lengths: NDArray[np.integer], place: Callable[[int], str], *, has_unit: bool = True
) -> None:
    """Check that the times of each row ascend: windows are found by bisection, and the newest events are the last.

    Without a known unit, times in 1970 that are plausible as seconds are refused. `place` names the column of a row.
    """
    ends = np.cumsum(lengths)
    goes_back, is_wrong = np.zeros((2, len(times)), dtype=bool)
    np.less(times[1:], times[:-1], out=goes_back[1:])
    goes_back[(ends - lengths)[lengths > 0]] = False
    if times.min(initial=0) < _FIRST_MS or times.max(initial=0) > _LAST_MS:
        is_wrong = (times < _FIRST_MS) | (times > _LAST_MS)
    if not has_unit:
        is_wrong |= (times >= YEAR_MS // 100) & (times < YEAR_MS)  # as seconds, they are after 1979
    for event in np.flatnonzero(is_wrong | goes_back)[:1]:
        row, time = int(np.searchsorted(ends, event, side="right")), int(times[event])
        fault = f"goes back from {times[event - 1]} to {time}; sort its lists, as open_store(sort_by_time=True) does"
        if is_wrong[event]:
            unit = "s" if abs(time) < YEAR_MS else "us" if abs(time) < 10**17 else "ns"
            date = np.array(time).astype(f"datetime64[{unit}]").astype("datetime64[D]")
            fault = f"has {time}, {date} in {unit}; store milliseconds since 1970, or timestamps of Arrow"
        raise DataError(f"{place(row)} {fault}")


def _check_range(values: NDArray[np.integer], low: int | None, end: int | None, name: str, path: str) -> None:
    """Check that low <= value < end, where None is no limit: loops and embedding tables use these values as indices."""
    if not len(values) or (low is None and end is None):
        return
    least, greatest = int(values.min()), int(values.max())
    if (low is not None and least < low) or (end is not None and greatest >= end):
        limits = f"at least {low}" if end is None else f"below {end}" if low is None else f"in {low}..{end - 1}"
        raise DataError(
            f"{path}: column {name!r} has values from {least} to {greatest}, which must be {limits}; {REMEDY}"
        )


def flat_values(column: pa.Array, dtype: str, name: str, path: str, may_be_missing: bool = False) -> NDArray[Any]:
    """Return the values of a column; raises a DataError if it has another type, nulls, infinite values or NaN.

    With `may_be_missing`, values may be NaN.
    """
    if column.type != pa.type_for_alias(dtype) or column.null_count:
        actual = f"{column.null_count} nulls" if column.null_count else f"type {column.type}"
        raise DataError(f"{path}: column {name!r} must be {dtype} without nulls, it has {actual}; {REMEDY}")
    values = cast(NDArray[Any], column.to_numpy())
    if dtype == FLOAT and (np.isinf(values) if may_be_missing else ~np.isfinite(values)).any():
        raise DataError(f"{path}: column {name!r} has infinite values{'' if may_be_missing else ' or NaN'}; {REMEDY}")
    return values


def _list_values(
    column: pa.Array, dtype: str, name: str, path: str, may_be_missing: bool
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values of all lists, and where each begins."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        actual = f"{column.null_count} null lists" if column.null_count else f"type {column.type}"
        raise DataError(f"{path}: column {name!r} must be list<{dtype}> without nulls, it has {actual}; {REMEDY}")
    values = flat_values(column.flatten(), dtype, name, path, may_be_missing)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return values, offsets - offsets[0]
