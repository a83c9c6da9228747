"""Logs to which records are added while a job trains: the protocol `LogSource`, and `FolderLog`, a folder of files.

A log is one sequence of records, numbered from 0; a record is one sample, a row of the sequence format:

    records   0 1 2 3 4 | 5 6 7 | 8 9 ...
    files     10-00     | 10-05 | 10-10 is being written

What a rank trains on follows from the numbers alone, not from when it looked, so ranks need not tell each other.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError, StateError, first_line
from evenrank.core.storage import Remote, locate
from evenrank.datasets import schema
from evenrank.datasets.foreign import ListReader
from evenrank.datasets.remote import latest_version
from evenrank.datasets.schema import ACTION, EVENT_DTYPES, ITEM_ID, MANIFEST_NAME, USER_ID, IdSummary, Manifest
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import join_blocks, overlaps
from evenrank.datasets.unpack import RowBlock, wrap_parquet_errors

END_NAME = "_END"
"""Name of the file after which no file is added to a folder."""
_log = logging.getLogger("evenrank")


class LogEnd(NamedTuple):
    """How far a log goes."""

    position: int
    """Records that can be read; never fewer than before."""
    is_final: bool
    """Whether no record will follow."""


@runtime_checkable
class LogSource(Protocol):
    """An append-only sequence of records: the same on all ranks, whenever they read it.

    A record never changes: a position always gives the same one. Records that all ranks have trained may be deleted.
    """

    manifest: Manifest
    """Columns and vocabulary sizes, fixed when the log is opened; see `describe_log`."""

    def end(self) -> LogEnd:
        """Look for new records, without waiting for them."""

    def read(self, first: int, end: int) -> SequenceStore:
        """Return records first..end-1, all below the end, by `rows_of_table`; of an empty range, the columns."""

    def mark(self, position: int) -> str:
        """Return text that identifies this log and a position up to the end, for a state."""

    def resume(self, position: int, mark: str) -> None:
        """Go on at a position of an earlier process; a StateError or DataError if the mark is not one of this log."""


def describe_log(
    vocabulary_sizes: Mapping[str, int],
    *,
    floats: Sequence[str] = (),
    extra_events: Mapping[str, str] | None = None,
) -> Manifest:
    """Return the manifest of a log of which no dataset was made.

    Args:
        vocabulary_sizes: per column of ids, the largest id that may ever come + 1. Of lists, `item_id`, and `action` if
            there is one; of a row, `user_id` if there is one, and contextual features. All must be in every file.
        floats: contextual features that are floats.
        extra_events: types of further list columns: `int64`, `int32` or `float32`.
    """
    extra_events = extra_events or {}
    if ITEM_ID not in vocabulary_sizes:
        raise ConfigError(f"vocabulary_sizes must have {ITEM_ID}, they have {', '.join(vocabulary_sizes) or 'nothing'}")
    labelled = [name for name in vocabulary_sizes if name not in (USER_ID, *EVENT_DTYPES)]
    schema.check_new_names([*labelled, *floats, *extra_events])
    for name, size in vocabulary_sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"vocabulary_sizes[{name!r}] must be an integer of at least 1, got {size!r}")
    for name, dtype in extra_events.items():
        if dtype not in schema.EXTRA_DTYPES:
            raise ConfigError(f"extra_events[{name!r}] must be one of {', '.join(schema.EXTRA_DTYPES)}, got {dtype!r}")
    manifest = Manifest(
        schema_version=schema.SCHEMA_VERSION,
        dataset="log",
        sources=(),
        options={},
        splits={},
        contextual={**dict.fromkeys(labelled, "int64"), **dict.fromkeys(floats, schema.FLOAT)},
        extra_events=extra_events,
        vocabulary_sizes={USER_ID: 0, ACTION: 0, **vocabulary_sizes},
        context_labels=dict.fromkeys(labelled, (None,)),
        ids=dict.fromkeys((USER_ID, ITEM_ID), IdSummary(rule="keep", kind="int64")),
        content_hash="",
    )
    return replace(manifest, content_hash=schema.content_hash(manifest))


def rows_of_table(table: pa.Table, manifest: Manifest, place: str) -> SequenceStore:
    """Return the rows of an Arrow table with the columns of a manifest, checked; messages name their `place`."""
    return join_blocks([_checked_rows(table, manifest, place, 0)], manifest, "log")


def _checked_rows(table: pa.Table, manifest: Manifest, place: str, first_row: int) -> RowBlock:
    sizes = {name: size for name, size in manifest.vocabulary_sizes.items() if size}
    present = {*table.column_names}
    if missing := [name for name in (*sizes, *manifest.contextual, *manifest.extra_events) if name not in present]:
        raise DataError(f"{place} lacks the column {missing[0]!r} of the log; write it, as its manifest says")
    names = [name for name in (*manifest.row_columns, *manifest.event_dtypes) if name in present]
    reader = ListReader(columns={name: name for name in names}, row_numbers=repeat(0))
    block = reader.rows(table, manifest, place, first_row)
    for name, values in (block.row_columns | block.event_columns).items():
        if name in sizes and (largest := int(values.max(initial=0))) >= sizes[name]:
            raise DataError(
                f"{place}: {name} has {largest}, which vocabulary_sizes[{name!r}] = {sizes[name]} of the log does not "
                "allow; open it with a manifest, and train a table, that has more"
            )
    return block


class _File(NamedTuple):
    """A file of a log, whose first row is record `first`."""

    name: str
    first: int
    footer: str  # its hash tells a replaced file, by the sizes and statistics of its columns
    group_rows: tuple[int, ...]  # of its row groups

    @property
    def end(self) -> int:
        return self.first + sum(self.group_rows)


class FolderLog:
    """A folder, or prefix of an object store, to which Parquet files are added; each row is a record.

    Files come in the order of their paths, so a new one must sort after those that were read. Names that end otherwise
    than in `.parquet`, or begin with `.` or `_`, are not read, and an incomplete file waits, with those after it. Files
    before the one in the oldest state that may be loaded can be deleted. A file `_END` ends the log.

    Args:
        url: the folder, or a URL that `open_stream` supports.
        manifest: of a dataset, such as `read_manifest` returns, or what `describe_log` returns.

    Raises:
        ConfigError: the manifest has features with several values, which rows of a log cannot have.
        DataError: there is no such folder or bucket; later: a file is late, replaced, deleted or malformed.
    """

    def __init__(self, url: Path | str | Remote, manifest: Manifest) -> None:
        if manifest.multi_valued:
            raise ConfigError(f"rows of a log cannot have several values of a feature, as {manifest.multi_valued[0]!r}")
        root = url if isinstance(url, Remote) else locate(url)
        if isinstance(root, Path):
            if not root.is_dir():
                raise DataError(f"{root} is no folder; make that of the log, to which its files will be added")
            root = Remote(files=fs.LocalFileSystem(), path=str(root.absolute()), url=str(root))
        elif not root.has_container():
            raise DataError(f"{root} is in no bucket that exists; check the URL")
        self.manifest = manifest
        self._root = root
        self._files: list[_File] = []  # those that were found, since the state that was loaded
        self._found: set[str] | None = set()  # their names, and those of earlier files; None: to be listed
        self._incomplete = ""  # name of the file that was logged as incomplete
        self._block: tuple[_File, int, RowBlock] | None = None  # the row group that was read last

    def end(self) -> LogEnd:
        """List the folder, and read the footers of new files."""
        is_final = (self._root / END_NAME).is_file()  # before listing, which then has all files written before it
        names = [name for name in self._root.files_below() if name.endswith(".parquet")]
        names = sorted(name for name in names if not any(part[0] in "._" for part in name.split("/")))
        last = self._files[-1].name if self._files else ""
        if self._found is None:
            self._found = {name for name in names if name <= last}
        for name in names:
            if name in self._found:
                continue
            if name < last:
                raise DataError(
                    f"{self._root} got {name} after {last}, which sorts after it, was read; add files in the order of "
                    "their names"
                )
            if (file := self._describe(name, self._files[-1].end if self._files else 0)) is None:
                is_final = False
                break
            self._files.append(file)
            self._found.add(name)
            last = name
        return LogEnd(self._files[-1].end if self._files else 0, is_final)

    def read(self, first: int, end: int) -> SequenceStore:
        """Read records first..end-1, a row group at a time, of which the last one is kept."""
        blocks: list[RowBlock] = []
        begin = self._files[0].first if self._files else 0
        num_rows = (file.end - file.first for file in self._files)
        for index, file_first, file_end in overlaps(num_rows, first - begin, end - begin):
            file = self._files[index]
            for group, group_first, group_end in overlaps(file.group_rows, file_first, file_end):
                blocks.append(self._read_group(file, group).rows(group_first, group_end))
        return join_blocks(blocks, self.manifest, "log")

    def mark(self, position: int) -> str:
        """Return the file of the last record before a position, with its first record, its rows and its hash."""
        if not position:
            return ""
        file = next((file for file in self._files if file.first < position <= file.end), None)
        if file is None:
            raise StateError(f"position {position} of {self._root} is not known here; save one after the loaded state")
        return json.dumps([file.name, file.first, file.end, file.footer])

    def resume(self, position: int, mark: str) -> None:
        """Go on at a position; a file that is partly trained must be there, unchanged."""
        files: list[_File] = []
        if position:
            try:
                name, first, end, footer = json.loads(mark)
            except (ValueError, TypeError):
                raise StateError(f"the state is of another log than {self._root}, a folder; load one of it") from None
            is_done = position == end
            files = [_File(name, first, footer, (end - first,)) if is_done else self._unchanged(name, first, footer)]
        self._files, self._found = files, None if files else set()

    def _describe(self, name: str, first: int) -> _File | None:
        """Return a file, or None if it is incomplete: Parquet ends with its footer."""
        with wrap_parquet_errors(f"{self._root}/{name}"):
            try:
                with self._root.files.open_input_file(f"{self._root.path}/{name}") as opened:
                    metadata = pq.read_metadata(opened)
                    opened.seek(opened.size() - metadata.serialized_size - 8)
                    footer = hashlib.sha256(opened.read()).hexdigest()[:16]
            except (FileNotFoundError, pa.ArrowInvalid) as error:
                if name != self._incomplete:
                    _log.info("waiting until %s/%s is complete: %s", self._root, name, first_line(error))
                self._incomplete = name
                return None
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        return _File(name, first, footer, rows)

    def _unchanged(self, name: str, first: int, footer: str) -> _File:
        file = self._describe(name, first)
        if file is None or file.footer != footer:
            raise DataError(
                f"{self._root}/{name} was replaced or deleted before all of its records were trained; restore it"
            )
        return file

    def _read_group(self, file: _File, group: int) -> RowBlock:
        if self._block is None or self._block[:2] != (file, group):
            path, columns = self._root / file.name, [*self.manifest.row_columns, *self.manifest.event_dtypes]
            self._unchanged(file.name, file.first, file.footer)
            with wrap_parquet_errors(str(path)), self._root.files.open_input_file(path.path) as opened:
                table = pq.ParquetFile(opened, pre_buffer=True).read_row_group(group, columns=columns)
            block = _checked_rows(table, self.manifest, str(path), sum(file.group_rows[:group]))
            self._block = file, group, block
        return self._block[2]


def open_log(url: Path | str, split: str) -> FolderLog:
    """Open a split of a dataset to which files are added."""
    manifest, folder = latest_version(dataset := locate(url))
    parsed = schema.parse_manifest(manifest, f"{dataset / MANIFEST_NAME}")
    return FolderLog(folder / split, parsed)
