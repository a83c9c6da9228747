"""Logs to which records are added while a job trains: the protocol `LogSource`, and `FolderLog`, a folder of files.

A log is one sequence of records, numbered from 0; a record is one sample, a row of the sequence format:

    records   0 1 2 3 4 | 5 6 7 | 8 9 ...
    files     10-00     | 10-05 | 10-10 is being written

What a rank trains on follows from the numbers alone, not from when it looked, so ranks need not tell each other.
"""

import hashlib
import json
import logging
import math
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.core.rules import Bounds, Count, OneOf
from evenrank.core.settings import check_types
from evenrank.core.storage import Remote, locate
from evenrank.datasets import schema
from evenrank.datasets.foreign import ListReader
from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    ITEM_ID,
    MANIFEST_NAME,
    USER_ID,
    IdSummary,
    Manifest,
    latest_version,
)
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import join_blocks
from evenrank.datasets.unpack import RowBlock, check_columns, wrap_parquet_errors

END_NAME = "_END"
"""Name of the file after which no file is added to a folder."""
_log = logging.getLogger("evenrank")
_NAMES_IN_MARK = 100
_Seconds = Annotated[float, Bounds(above=0)]
_UNKNOWN = 1 << 62  # the number of files in a mark that lacks it
_IN_ORDER = "add files in the order of their names"


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
    vocabulary_sizes: Mapping[str, Count],
    *,
    floats: Sequence[str] = (),
    extra_events: Mapping[str, Annotated[str, OneOf(schema.EXTRA_DTYPES)]] | None = None,
) -> Manifest:
    """Return the manifest of a log of which no dataset was made.

    Args:
        vocabulary_sizes: per column of ids, the largest id that may ever come + 1. Of lists, `item_id`, and `action` if
            there is one; of a row, `user_id` if there is one, and contextual features. All must be in every file.
        floats: contextual features that are floats.
        extra_events: types of further list columns: `int64`, `int32`, `float32` or, with missing values, `float32?`.
    """
    extra_events = extra_events or {}
    if ITEM_ID not in vocabulary_sizes:
        raise ConfigError(f"vocabulary_sizes must have {ITEM_ID}, they have {', '.join(vocabulary_sizes) or 'nothing'}")
    labelled = [name for name in vocabulary_sizes if name not in (USER_ID, *EVENT_DTYPES)]
    schema.check_new_names([*labelled, *floats, *extra_events])
    check_types(describe_log, {"vocabulary_sizes": vocabulary_sizes, "extra_events": extra_events})
    manifest = Manifest(
        dataset="log",
        contextual={**dict.fromkeys(labelled, "int64"), **dict.fromkeys(floats, schema.FLOAT)},
        extra_events=extra_events,
        vocabulary_sizes={USER_ID: 0, ACTION: 0, **vocabulary_sizes},
        context_labels=dict.fromkeys(labelled, (None,)),
        ids=dict.fromkeys((USER_ID, ITEM_ID), IdSummary(rule="keep", kind="int64")),
    )
    return replace(manifest, content_hash=schema.content_hash(manifest))


def rows_of_table(table: pa.Table, manifest: Manifest, place: str) -> SequenceStore:
    """Return the rows of an Arrow table with the columns of a manifest, checked; messages name their `place`."""
    return join_blocks([_checked_rows(table, manifest, place, 0)], len(table), manifest, "log", place)


def _columns(manifest: Manifest) -> list[str]:
    return [*(column.name for column in manifest.columns), schema.NUM_TARGETS]


def _checked_rows(table: pa.Table, manifest: Manifest, place: str, first_row: int) -> RowBlock:
    sizes = {name: size for name, size in manifest.vocabulary_sizes.items() if size}
    required = {*sizes, *manifest.contextual, *manifest.extra_events}
    columns = {name: name for name in _columns(manifest) if name in required or name in table.column_names}
    check_columns(columns, table.column_names, place, "write one, as the log's manifest says")
    block = ListReader(columns=columns, row_numbers=repeat(0)).rows(table, manifest, place, first_row)
    if (num_targets := block.columns.get(schema.NUM_TARGETS)) is not None:
        for row in np.flatnonzero(num_targets > block.lengths)[:1]:
            fault = f"{schema.NUM_TARGETS} is {num_targets[row]}, of {block.lengths[row]} events"
            raise DataError(f"{place}, row {first_row + row}: {fault}; it is the number of last events to predict")
    for name, values in block.columns.items():
        if name in sizes and (largest := int(values.max(initial=0))) >= sizes[name]:
            raise DataError(
                f"{place}: {name} has {largest}, which vocabulary_sizes[{name!r}] = {sizes[name]} of the log does not "
                "allow; open it with a manifest, and train a table, that has more"
            )
    return block


class FolderLog:
    """A folder, or prefix of an object store, to which Parquet files are added; each row is a record.

    Files come in the order of their paths, so a new one must sort after those that were read. Names that end otherwise
    than in `.parquet`, or begin with `.` or `_`, are not read, and an incomplete file waits, with those after it. Files
    before the one in the oldest state that may be loaded can be deleted. A file `_END` ends the log.

    Args:
        url: the folder, or a URL that `open_stream` supports.
        manifest: of a dataset, such as `read_manifest` returns, or what `describe_log` returns.
        incomplete_seconds: how long to wait for an incomplete file that does not grow, with a warning after a tenth of
            that; `math.inf` waits forever.

    Raises:
        ConfigError: the manifest has features with several values, which rows of a log cannot have.
        DataError: there is no such folder or bucket; later: a file is late, replaced, deleted or malformed, or stays
            incomplete.
    """

    _old: list[str] | None  # names of the files before `_before`, once they are listed
    _group_rows: tuple[int, tuple[int, ...]]  # index of the file that was read last, and the rows of its groups
    _block: tuple[int, int, RowBlock] | None  # the row group that was read last, after the indices of file and group

    def __init__(self, url: Path | str | Remote, manifest: Manifest, *, incomplete_seconds: _Seconds = 7200.0) -> None:
        check_types(FolderLog, {"incomplete_seconds": incomplete_seconds})
        if lists := [column.name for column in manifest.columns if column.kind == "list"]:
            raise ConfigError(f"rows of a log cannot have several values of a feature, as {lists[0]!r}")
        root = url if isinstance(url, Remote) else locate(url)
        if isinstance(root, Path):
            if not root.is_dir():
                raise DataError(f"{root} is no folder; make that of the log, to which its files will be added")
            root = Remote(files=fs.LocalFileSystem(), path=str(root.absolute()), url=str(root))
        elif not root.has_container():
            raise DataError(f"{root} is in no bucket that exists; check the URL")
        self.manifest = manifest
        self._root = root
        self._incomplete_seconds = incomplete_seconds
        self._incomplete = "", 0  # name and size of the file that is waited for
        self.resume(0, "")

    def end(self) -> LogEnd:
        """List the folder, and read the footers of new files."""
        is_final = (self._root / END_NAME).is_file()  # before listing, which then has all files written before it
        listed, last = self._list(), self._names[-1]
        if (newest := max(listed, default="")) > last:
            # The listing of a folder that grows can lack files that came before one that it has; the next one cannot.
            listed = {name: size for name, size in self._list().items() if name <= newest}
        if self._old is None:
            oldest = (self._before or self._names)[0]
            old = [name for name in listed if name < oldest]
            if len(old) >= self._num_before - len(self._before) > 0:  # these count the one before all
                raise DataError(f"{self._root} got files before {oldest} after it was read; {_IN_ORDER}")
            self._old = old
        for name in sorted(listed.keys() - {*self._old, *self._before, *self._names}):
            if name < last:
                raise DataError(f"{self._root} got {name} after {last}, which sorts after it, was read; {_IN_ORDER}")
            if (footer := self._read_footer(name)) is None:
                self._check_growth(name, listed[name])
                is_final = False
                break
            self._names.append(name)
            digest, group_rows = footer
            self._bounds.append(self._bounds[-1] + sum(group_rows))
            self._digests.append(digest)
        return LogEnd(self._bounds[-1], is_final)

    def _list(self) -> dict[str, int]:
        """Return the sizes of all files by their names."""
        return {name: info.size for name, info in self._root.files_below(("**", "*.parquet")).items()}

    def read(self, first: int, end: int) -> SequenceStore:
        """Read records first..end-1, a row group at a time, of which the last one is kept."""
        return join_blocks(self._blocks(first, end), max(0, end - first), self.manifest, "log", f"{self._root}")

    def _blocks(self, first: int, end: int) -> Iterator[RowBlock]:
        for index in range(bisect_right(self._bounds, first, 1) - 1, len(self._names)):
            if (begin := self._bounds[index]) >= end:
                break
            if self._group_rows[0] != index:
                self._group_rows = index, self._unchanged(self._names[index], self._digests[index])
            for group, group_first, group_end in _overlaps(self._group_rows[1], max(first - begin, 0), end - begin):
                yield self._read_group(index, group).rows(group_first, group_end)

    def mark(self, position: int) -> str:
        """Return the file of the last record before a position, and the names of some files before it."""
        if not position:
            return ""
        index = bisect_left(self._bounds, position, 1) - 1
        if position <= self._bounds[0] or index == len(self._names):
            raise StateError(f"position {position} of {self._root} is not known here; save one after the loaded state")
        before = [*self._before, *self._names[max(index - _NAMES_IN_MARK, 0) : index]][-_NAMES_IN_MARK:]
        file = self._names[index], *self._bounds[index : index + 2], f"{self._digests[index]:016x}"
        return json.dumps([*file, self._num_before + index, before])

    def resume(self, position: int, mark: str) -> None:
        """Go on at a position; a file that is partly trained must be there, unchanged."""
        before: list[str] = []
        name, first, end, digest, num_before = "", 0, 0, 0, 0  # before all files, as of one without records
        if position:
            try:
                name, first, end, footer, *rest = json.loads(mark)
                digest, (num_before, before) = int(footer, 16), rest or (_UNKNOWN, [])
            except (ValueError, TypeError):
                raise StateError(f"the state is of another log than {self._root}, a folder; load one of it") from None
            if position != end:
                self._unchanged(name, digest)
        # Files from that one on, of which there may be very many: names, first records and the end, and digests.
        self._names, self._bounds, self._digests = [name], array("q", [first, end]), array("Q", [digest])
        self._num_before, self._before = num_before, before
        self._old, self._group_rows, self._block = None, (-1, ()), None

    def _read_footer(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        """Return a digest of the footer of a file, and the rows of its groups, or None if the file is incomplete.

        Parquet ends with the footer, whose sizes and statistics of columns tell a replaced file.
        """
        with wrap_parquet_errors(f"{self._root}/{name}"):
            try:
                with self._root.files.open_input_file(f"{self._root.path}/{name}") as opened:
                    metadata = pq.read_metadata(opened)
                    opened.seek(opened.size() - metadata.serialized_size - 8)
                    digest = int(hashlib.sha256(opened.read()).hexdigest()[:16], 16)
            except (FileNotFoundError, pa.ArrowInvalid):
                return None
        return digest, tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))

    def _check_growth(self, name: str, size: int) -> None:
        """Log an incomplete file, warn if it does not grow, and at last raise an error: its writer may be dead."""
        now, limit = time.monotonic(), self._incomplete_seconds
        if self._incomplete != (name, size):
            if self._incomplete[0] != name:
                _log.info("waiting until %s/%s is complete", self._root, name)
            self._incomplete, self._incomplete_since, self._warn_at = (name, size), now, now + limit / 10
        waited = now - self._incomplete_since
        fault = f"{self._root}/{name} is no complete Parquet file, and has had {size:,} bytes for {waited:,.0f} s"
        if waited >= limit:
            raise DataError(f"{fault}; write it again, delete it, or raise incomplete_seconds")
        if now >= self._warn_at:
            _log.warning("%s; it and all files after it wait", fault)
            self._warn_at = math.inf

    def _unchanged(self, name: str, digest: int) -> tuple[int, ...]:
        """Return the rows of the groups of a file, which must be as it was."""
        footer = self._read_footer(name)
        if footer is None or footer[0] != digest:
            raise DataError(
                f"{self._root}/{name} was replaced or deleted before all of its records were trained; restore it"
            )
        return footer[1]

    def _read_group(self, index: int, group: int) -> RowBlock:
        if self._block is None or self._block[:2] != (index, group):
            path = self._root / self._names[index]
            group_rows = self._unchanged(self._names[index], self._digests[index])
            with wrap_parquet_errors(str(path)), self._root.files.open_input_file(path.path) as opened:
                table = pq.ParquetFile(opened, pre_buffer=True).read_row_group(group, columns=_columns(self.manifest))
            block = _checked_rows(table, self.manifest, str(path), sum(group_rows[:group]))
            self._block = index, group, block
        return self._block[2]


def _overlaps(sizes: Iterable[int], first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each consecutive part with some of rows first..end-1, and the range of these in the part."""
    begin = 0
    for index, size in enumerate(sizes):
        if begin < end and begin + size > first:
            yield index, max(first - begin, 0), min(end - begin, size)
        begin += size


def open_log(url: Path | str, split: str) -> FolderLog:
    """Open a split of a dataset to which files are added."""
    manifest, folder = latest_version(dataset := locate(url))
    parsed = schema.parse_manifest(manifest, f"{dataset / MANIFEST_NAME}")
    return FolderLog(folder / split, parsed)
