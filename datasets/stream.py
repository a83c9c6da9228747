"""A split read sequentially, from a folder or an object store, for datasets that do not fit on a local disk.

Which rows of it come next, and on which rank, is in `lanes`.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

    path: str
    file: pa.NativeFile
    row: int
    """Of the file."""
    block: RowBlock | None
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

    def read_spans(self, spans: Iterable[Span], rests: dict[int, Rest]) -> SequenceStore:
        """Read the rows of spans into memory, one span after the other; for errors see `read`.

        `rests`, by lane, are where the span before has ended, and are moved on; a lane is read by one thread at a time.
        """
        files = self.manifest.splits[self.split].files
        file_ends = np.cumsum([file.rows for file in files])
        blocks: list[RowBlock] = []
        num_rows, read = 0, dict[str, DataFile]()  # files, by path
        try:
            for first, end, lane in spans:
                num_rows += end - first
                index = int(np.searchsorted(file_ends, first, side="right"))
                while first < end and index < len(files):
                    file_end = int(file_ends[index])
                    begin, last = file_end - files[index].rows, min(end, file_end)
                    blocks += self._read_blocks(files[index], first - begin, last - begin, lane, rests, read)
                    first, index = max(first, last), index + 1
        finally:
            # After reading, so that nothing can be written between the check and reading. The replacement of a file
            # explains all other faults.
            self._check_versions(read)
        if sum(len(block.lengths) for block in blocks) != num_rows:
            raise DataError(f"{self.root} has fewer rows than its manifest says; {REMEDY}")
        return join_blocks(blocks, self.manifest, self.split, self.root)

    def _read_blocks(
        self, file: DataFile, first: int, end: int, lane: int, rests: dict[int, Rest], read: dict[str, DataFile]
    ) -> Iterator[RowBlock]:
        """Yield rows first..end-1 of a file, one row group at a time, and add it to those that are `read`."""
        path, rest = f"{self.root}/{file.path}", rests.pop(lane, None)
        if rest is None or (rest.path, rest.row) != (path, first):
            read[path] = file
            if isinstance(self.files, fs.LocalFileSystem) and os.path.exists(path):
                check_regular(path)  # because opening a named pipe would wait for a writer
            with wrap_parquet_errors(path):
                rest = Rest(path, self.files.open_input_file(path), first, None)
        block = rest.block
        while first < end:
            is_new = block is None
            if block is None:
                read[path] = file
                block = self._read_group(path, rest.file, file.rows, first)
            if (count := end - first) < len(block.lengths):
                taken, block = block.split(count)
                if is_new:
                    taken, block = taken.copy(), block.copy()  # so that neither keeps all of the row group
            else:
                taken, block = block, None
            yield taken
            first += len(taken.lengths)
        if first < file.rows:
            rests[lane] = Rest(path, rest.file, first, block)

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
            return block.split(first - (int(ends[group]) - len(block.lengths)))[1]

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


def join_blocks(blocks: Sequence[RowBlock], manifest: Manifest, split: str, place: str) -> SequenceStore:
    """Return the rows of blocks as a store in memory; a DataError, about `place`, if only some have `num_targets`."""
    if len({NUM_TARGETS in block.columns for block in blocks}) > 1:
        raise DataError(f"{place}: some files have a column {NUM_TARGETS!r} and some not; write it to all or to none")
    columns, offsets = {}, {}
    has_targets = bool(blocks) and NUM_TARGETS in blocks[0].columns
    for name, kind, dtype, *_ in (*manifest.columns, *[TARGETS] * has_targets):
        columns[name] = np.concatenate([np.empty(0, dtype), *(block.columns[name] for block in blocks)])
        if kind == "list" or name == TIMESTAMP_MS:
            counts = [np.zeros(1, dtype=np.int64), *(block.counts[name] for block in blocks)]
            offsets[name] = np.cumsum(np.concatenate(counts))
    of_events, num_targets = offsets.pop(TIMESTAMP_MS), columns.pop(NUM_TARGETS, None)
    return SequenceStore(
        manifest=manifest,
        split=split,
        offsets=of_events,
        columns=columns,
        list_offsets=offsets,
        num_targets=num_targets,
    )


def overlaps(sizes: Iterable[int], first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each consecutive part with some of rows first..end-1, and the range of these in the part."""
    begin = 0
    for index, size in enumerate(sizes):
        if begin < end and begin + size > first:
            yield index, max(first - begin, 0), min(end - begin, size)
        begin += size


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
