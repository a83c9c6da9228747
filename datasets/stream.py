"""A split read sequentially, from a folder or an object store, for datasets that do not fit on a local disk.

Which rows of it come next, and on which rank, is in `lanes`.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import check_regular
from evenrank.core.rules import PER_RANK, Count, Positive
from evenrank.core.settings import Settings
from evenrank.core.storage import Remote, locate
from evenrank.datasets.lanes import Span
from evenrank.datasets.schema import (
    ITEM_ID,
    MANIFEST_NAME,
    NUM_TARGETS,
    REMEDY,
    TARGETS,
    TIMESTAMP_MS,
    DataFile,
    Manifest,
    latest_version,
    parse_manifest,
)
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.unpack import RowBlock, read_row_group, wrap_parquet_errors

# Changes with every write to a file: its size and, locally, the times of its last change in nanoseconds, the second of
# which no program can set, or in an object store, the time of the upload in seconds.
Version = tuple[Any, ...]
_CHUNK = 1 << 20  # bytes
_MARGIN = 1.1  # of memory for values, whose number is estimated; what is never written takes none
_FOOTERS = 128  # files, one per lane; in memory, a footer has about 1 kB per column and row group


def version_of(files: fs.FileSystem, path: str) -> Version | None:
    """Return the version of a file; None if there is none."""
    if isinstance(files, fs.LocalFileSystem):
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return _remote_version(files.get_file_info(path))


def versions_of(files: fs.FileSystem, paths: Iterable[str]) -> dict[str, Version | None]:
    """Return the versions of files; in an object store with a request per thousand files, not one per file."""
    paths = list(paths)
    if isinstance(files, fs.LocalFileSystem):
        return {path: version_of(files, path) for path in paths}
    try:
        listed: Mapping[str, fs.FileInfo] = {
            info.path: info
            for folder in {path.rpartition("/")[0] for path in paths}
            for info in files.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        }
    except OSError:  # permission to read a bucket does not always include listing it
        return {path: version_of(files, path) for path in paths}
    return {path: _remote_version(listed[path]) if path in listed else None for path in paths}


def _remote_version(info: fs.FileInfo) -> Version | None:
    # Listings have fractions of seconds that requests for a single object lack.
    return None if info.type != fs.FileType.File else (info.size, (info.mtime_ns or 0) // 1_000_000_000)


def has_sha256(files: fs.FileSystem, path: str, sha256: str) -> bool:
    """Return whether a file can be read and has this SHA-256, in hexadecimal."""
    try:
        with files.open_input_stream(path, buffer_size=_CHUNK) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == sha256
    except (OSError, pa.ArrowException):
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig(Settings):
    """Options of sequential reading; a saved state is only valid with the same lanes and windows."""

    lanes: Count = 128
    """Places of the split that are read at the same time, whatever the number of ranks, which divide them. Splits of
    few rows have half as many, or a quarter, and so on."""
    window_rows: Count = 128
    """Rows of a lane that are shuffled together. All ranks together have lanes x window_rows rows in memory, with
    `num_workers` the next ones too, and the rest of a row group for each lane."""
    poll_seconds: Annotated[Positive, PER_RANK] = 5.0
    """With `follow`, the only option that applies: how often a rank that waits looks for new records."""


class Rest(NamedTuple):
    """Where a lane goes on."""

    row: int
    """Of the split."""
    file: pa.NativeFile
    blocks: list[RowBlock]
    """The rest of its row group, if that was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSource:
    """A split on any file system of pyarrow; files written after it was opened must have the manifest's SHA-256."""

    manifest: Manifest
    split: str
    files: fs.FileSystem
    root: str  # path of the dataset in the file system
    # By path: the latest version of each file whose contents are known to be the manifest's.
    versions: dict[str, Version | None] = field(default_factory=dict)
    # By path, of the files read last: its footer, and the row after each of its row groups.
    footers: dict[str, tuple[pq.FileMetaData, NDArray[np.int64]]] = field(default_factory=dict)

    @property
    def place(self) -> Path | Remote:
        """Folder or URL of the dataset's files."""
        if isinstance(self.files, fs.LocalFileSystem):
            return Path(self.root)
        return Remote(files=self.files, path=self.root, url=self.root)

    @property
    def num_rows(self) -> int:
        """Rows of the split."""
        return self.manifest.splits[self.split].rows

    def item_counts(self) -> NDArray[np.int64]:
        """Return the events of each item in the log, from the vocabulary: int64 [items]."""
        if (rule := self.manifest.ids[ITEM_ID].rule) != "dense":
            raise ConfigError(
                f"{self.root} has item ids of rule {rule!r}, whose events a stream cannot count for negatives; "
                "preprocess it with --ids item=dense, or use build_loader"
            )
        counts = np.zeros(self.manifest.vocabulary_sizes[ITEM_ID], dtype=np.int64)
        path = f"{self.root}/vocabulary_{ITEM_ID}.parquet"
        with wrap_parquet_errors(path):
            table = pq.read_table(path, columns=["id", "count"], filesystem=self.files)
            counts[table["id"].to_numpy()] = table["count"].to_numpy()
        return counts

    def read(self, first: int, end: int) -> SequenceStore:
        """Read rows first..end-1 into memory; raises a DataError if a file is faulty or was replaced."""
        return self.read_spans([Span(first, end, 0)], {})

    def read_spans(self, spans: Sequence[Span], rests: dict[int, Rest]) -> SequenceStore:
        """Read the rows of spans into memory, one span after the other; for errors see `read`.

        `rests`, by lane, are where the span before has ended, and are moved on; a lane is read by one thread at a time.
        """
        num_rows = sum(span.end - span.first for span in spans)
        read = dict[str, DataFile]()  # files, by path
        try:
            store = join_blocks(self._read_blocks(spans, rests, read), num_rows, self.manifest, self.split, self.root)
        finally:
            # After reading, so that nothing can be written between the check and reading. The replacement of a file
            # explains all other faults.
            self._check_versions(read)
        if len(store) != num_rows:
            raise DataError(f"{self.root} has fewer rows than its manifest says; {REMEDY}")
        return store

    def _read_blocks(
        self, spans: Iterable[Span], rests: dict[int, Rest], read: dict[str, DataFile]
    ) -> Iterator[RowBlock]:
        """Yield the rows of spans, each to be used before the next, and add their files to those that are `read`."""
        files = self.manifest.splits[self.split].files
        file_ends = np.cumsum([file.rows for file in files])
        for first, end, lane in spans:
            rest = rests.pop(lane, None)
            opened, blocks = (None, []) if rest is None or rest.row != first else (rest.file, rest.blocks)
            size = end - first
            while first < end and (index := int(np.searchsorted(file_ends, first, side="right"))) < len(files):
                path, file_end = f"{self.root}/{files[index].path}", int(file_ends[index])
                if not blocks:
                    read[path] = files[index]
                    opened = self._open(path) if opened is None else opened
                    block = self._read_group(path, opened, files[index].rows, first - file_end + files[index].rows)
                    # The rest in copies, so that each is in memory until its span comes, and not all of the row group.
                    bounds = [*range(min(end - first, block.num_rows), block.num_rows, size), block.num_rows]
                    blocks = [block.rows(0, bounds[0]), *(block.rows(*each).copy() for each in pairwise(bounds))]
                block = blocks.pop(0)
                if block.num_rows > end - first:
                    blocks.insert(0, block.rows(end - first, block.num_rows))
                    block = block.rows(0, end - first)
                first += block.num_rows
                yield block
                if first < file_end:
                    rests[lane] = Rest(first, opened, blocks)
                else:
                    opened = None

    def _open(self, path: str) -> pa.NativeFile:
        if isinstance(self.files, fs.LocalFileSystem) and os.path.exists(path):
            check_regular(path)  # because opening a named pipe would wait for a writer
        with wrap_parquet_errors(path):
            return self.files.open_input_file(path)

    def _read_group(self, path: str, opened: pa.NativeFile, num_rows: int, first: int) -> RowBlock:
        """Return the rows of a file from `first` to the end of their row group."""
        footer, ends = self.footers.pop(path, (None, np.empty(0, np.int64)))
        # A request per row group; without pre_buffer, one per column of it.
        with wrap_parquet_errors(path), pq.ParquetFile(opened, metadata=footer, pre_buffer=True) as file:
            if footer is None:
                footer = file.metadata
                ends = np.cumsum([footer.row_group(group).num_rows for group in range(footer.num_row_groups)])
            self.footers[path] = footer, ends
            for oldest in list(self.footers)[:-_FOOTERS]:
                self.footers.pop(oldest, None)  # another thread may have done so
            if footer.num_rows != num_rows:
                raise DataError(f"{path} has {footer.num_rows:,} rows, its manifest says {num_rows:,}; {REMEDY}")
            group = int(np.searchsorted(ends, first, side="right"))
            block = read_row_group(file, group, self.manifest, path)
            return block.rows(first - (int(ends[group]) - block.num_rows), block.num_rows)

    def _check_versions(self, read: Mapping[str, DataFile]) -> None:
        """Raise a DataError if one of these files, by path, is no longer that of the manifest."""
        for path, version in versions_of(self.files, read).items():
            if version != self.versions.get(path):
                if not has_sha256(self.files, path, read[path].sha256):
                    raise DataError(
                        f"{path} was changed, replaced or deleted after the dataset was opened; its SHA-256 is not the "
                        "one in the manifest. Restore it, or open the dataset again"
                    )
                self.versions[path] = version


class _Column:
    """Values of rows that are appended, with room for `size` of them at first."""

    def __init__(self, dtype: str, size: float) -> None:
        self._values = np.empty(int(size), dtype)
        self._length = 0

    def append(self, values: NDArray[Any], share: float) -> int:
        """Append values, the last ones of this share of all rows; return how many there were before."""
        begin, self._length = self._length, self._length + len(values)
        if self._length > len(self._values):
            grown = np.empty(int(self._length / share * _MARGIN), self._values.dtype)
            grown[:begin] = self._values[:begin]
            self._values = grown
        self._values[begin : self._length] = values
        return begin

    def values(self) -> NDArray[Any]:
        """Return all of them."""
        return self._values[: self._length]


def join_blocks(blocks: Iterable[RowBlock], num_rows: int, manifest: Manifest, split: str, place: str) -> SequenceStore:
    """Return the rows of blocks, one after the other, as a store in memory; `num_rows` are expected.

    Each block is copied before the next one is asked for. Raises a DataError, about `place`, if only some have
    `num_targets`.
    """
    of_split = manifest.splits.get(split)
    num_events = num_rows * _MARGIN * of_split.interactions / max(1, of_split.rows) if of_split is not None else 0
    # As much for all windows of a size, so that one can take the memory of another.
    sizes = {"scalar": num_rows, "event": num_events, "list": 0}
    columns = {each.name: _Column(each.dtype, sizes[each.kind]) for each in (*manifest.columns, TARGETS)}
    of_lists = [TIMESTAMP_MS, *(column.name for column in manifest.columns if column.kind == "list")]
    offsets = {name: [np.zeros(1, dtype=np.int64)] for name in of_lists}
    num_read, has_targets = 0, set[bool]()
    for block in blocks:
        num_read += block.num_rows
        has_targets.add(NUM_TARGETS in block.columns)
        for name in block.columns:
            begin = columns[name].append(block.values(name), num_read / max(1, num_read, num_rows))
            if name in offsets:
                offsets[name].append(block.offsets[name][1:] + (begin - block.offsets[name][0]))
    if len(has_targets) > 1:
        raise DataError(f"{place}: some files have a column {NUM_TARGETS!r} and some not; write it to all or to none")
    num_targets = columns.pop(NUM_TARGETS).values()
    return SequenceStore(
        manifest=manifest,
        split=split,
        offsets=np.concatenate(offsets.pop(TIMESTAMP_MS)),
        columns={name: column.values() for name, column in columns.items()},
        list_offsets={name: np.concatenate(of_rows) for name, of_rows in offsets.items()},
        num_targets=num_targets if has_targets == {True} else None,
    )


def open_stream(url: Path | str, split: str) -> StreamSource:
    """Open a dataset in a folder, or at a URL that pyarrow supports: `s3://bucket/path`, `gs://...`, `file:///...`."""
    dataset = locate(url)
    text, folder = latest_version(dataset)
    while True:
        manifest = parse_manifest(text, f"{dataset / MANIFEST_NAME}")
        if isinstance(folder, Remote):
            files, root = folder.files, folder.path
        else:
            files, root = fs.LocalFileSystem(), str(folder.absolute())
        try:
            versions = versions_of(files, (f"{root}/{file.path}" for file in manifest.split(split, dataset).files))
        except OSError as error:
            raise DataError(
                f"{dataset} is not a readable dataset: {first_line(error)}; check the path or URL"
            ) from error
        # If the dataset was replaced in between, the files belong to another manifest.
        latest, folder = latest_version(dataset)
        if latest == text:
            return StreamSource(manifest=manifest, split=split, files=files, root=root, versions=versions)
        text = latest
