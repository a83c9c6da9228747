"""The columns of a split as memory-mapped files: random access by row, shared by all processes of a machine.

row         0          1     2
item_id   [ 7 3 9 | (none) | 4 4 ]      events, row after row
offsets   [ 0       3        3     5 ]  row r has the events offsets[r]..offsets[r+1]-1
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.files import locked, write_text
from evenrank.core.rules import NonNegative
from evenrank.core.settings import check_types
from evenrank.core.storage import Remote, locate
from evenrank.datasets.foreign import ListReader, describe_folder
from evenrank.datasets.schema import (
    ITEM_ID,
    LENGTH,
    MANIFEST_NAME,
    NUM_TARGETS,
    TARGETS,
    TIMESTAMP_MS,
    Manifest,
    latest_version,
    parse_manifest,
    read_manifest,
)
from evenrank.datasets.unpack import (
    OFFSETS,
    ROW_OFFSETS,
    ColumnWriter,
    find_or_build,
    map_column,
    open_file,
    path_of,
    read_row_group,
    unpack,
    wrap_parquet_errors,
)

_REMAPPED_LAYOUT = "v1"  # version of the cache's contents, part of the entry's name
_VALUES_AT_ONCE = 1 << 20
NEVER_MS = np.iinfo(np.int64).max  # later than every event


class ColumnMap(Protocol):
    """Replaces the values of a column, such as `dataloader.routing.KeyMap`."""

    @property
    def num_embeddings(self) -> int:
        """Limit to the values: old and new ones are below it."""

    @property
    def is_identity(self) -> bool:
        """Whether all values stay as they are."""

    def __call__(self, keys: NDArray[Any], /) -> NDArray[Any]:
        """Return the new values: integers of the same shape and dtype."""

    def inverse(self, rows: NDArray[Any], /) -> NDArray[Any]:
        """Return the old values."""

    def describe(self) -> Mapping[str, Any]:
        """Return everything that the result depends on, as JSON values, equal for equal maps."""


class Slices(NamedTuple):
    """Parts of rows, such as histories as they were at a time: int64 [n] each."""

    rows: NDArray[np.int64]
    """The row of the split that each is of."""
    begins: NDArray[np.int64]
    """Its first event, among all of the split."""
    ends: NDArray[np.int64]
    """The event after its last."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SequenceStore:
    """The rows of a split, open for reading. The arrays of `open_store` are read-only views of memory-mapped files.

    A store opened from a folder is pickled as the path of the folder and reopened by unpickling, so processes that
    receive it share its memory.
    """

    manifest: Manifest
    split: str
    offsets: NDArray[np.int64]
    """[rows + 1]: where each row's events begin."""
    columns: Mapping[str, NDArray[Any]]
    """The values of each column: [interactions] of events, [rows] of `user_id` and contextual features, and those of
    all rows of a feature with any number of values per row."""
    list_offsets: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Per such feature, [rows + 1]: where each row's values begin."""
    list_limits: Mapping[str, int] = field(default_factory=dict)
    """The most values of a row, per such feature of which it is known."""
    num_targets: NDArray[np.int32] | None = None
    """[rows or slices]: number of last events that are prediction targets; None if the split has no such column."""
    slices: Slices | None = None
    """What `len`, `lengths` and `num_targets` count in place of whole rows; None: those of `sliced` alone have any."""
    folder: Path | None = None
    """Folder of the dataset; None if the arrays exist only in memory."""
    column_maps: Mapping[str, ColumnMap] = field(default_factory=dict)
    """The remapped columns; see `remapped`."""
    names: Mapping[str, str] | None = None
    """The `columns` that a folder was opened with; see `open_store`."""
    source: Path | Remote | None = None
    """Where the Parquet files of the dataset are, if not in the folder; None after unpickling."""

    def __repr__(self) -> str:
        context = f"; context: {', '.join(self.manifest.contextual)}" if self.manifest.contextual else ""
        events = ", ".join(column.name for column in self.manifest.columns if column.kind == "event")
        return (
            f"SequenceStore({str(self.folder or 'in memory')!r}, split={self.split!r}, {len(self):,} rows, "
            f"{self.offsets[-1]:,} events: {events}{context})"
        )

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def place(self) -> Path | Remote | None:
        """Folder or URL of the dataset's files; None if the arrays exist only in memory."""
        return self.source or self.folder

    @property
    def begins(self) -> NDArray[np.int64]:
        """The first event of each row or slice: int64 [len]."""
        return self.offsets[:-1] if self.slices is None else self.slices.begins

    @property
    def ends(self) -> NDArray[np.int64]:
        """The event after the last of each row or slice: int64 [len]."""
        return self.offsets[1:] if self.slices is None else self.slices.ends

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events per row or slice: int64 [len]."""
        return self.ends - self.begins

    def rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the split that rows or slices [n] are of: int64 [n]."""
        return indices if self.slices is None else self.slices.rows[indices]

    def sliced(self, slices: Slices, num_targets: NDArray[np.int32]) -> "SequenceStore":
        """Return this store with slices [n] in place of rows, and the number of last events of each that are targets.

        Raises:
            IndexError: a slice is not within its row, or has fewer events than targets.
        """
        rows, begins, ends = slices
        is_row = len(rows) == 0 or 0 <= int(rows.min()) <= int(rows.max()) < len(self.offsets) - 1
        if not is_row or ((begins < self.offsets[rows]) | (ends > self.offsets[rows + 1]) | (ends < begins)).any():
            raise IndexError("slices must be within their rows")
        if ((num_targets < 0) | (num_targets > ends - begins)).any():
            raise IndexError("slices must have at least as many events as targets")
        return replace(self, slices=slices, num_targets=num_targets)

    def head(self, n: NonNegative = 5, *, max_events: NonNegative = 10) -> list[dict[str, Any]]:
        """Return the first n rows or slices to look at, as plain values by column.

        Ids are those of the log, times datetimes in UTC, and values of features their labels; None is missing, or
        unknown to the vocabulary. Ids that were hashed, and values that were `remapped`, stay numbers. `length` counts
        all events of a row, the newest `max_events` of which are shown.

        Raises:
            DataError: the vocabulary cannot be read.
        """
        check_types(SequenceStore.head, {"n": n, "max_events": max_events})
        return self.raw_rows(np.arange(min(n, len(self))), max_events)

    def raw_rows(self, indices: NDArray[np.int64], max_events: int) -> list[dict[str, Any]]:
        """Return rows or slices [n] as `head` does."""
        rows, ends = self.rows_of(indices), self.ends[indices]
        bounds = {"scalar": (rows, rows + 1), "event": (np.maximum(self.begins[indices], ends - max_events), ends)}
        found: list[dict[str, Any]] = [{} for _ in indices]
        for column in self.manifest.columns:
            name, values = column.name, self.columns[column.name]
            offsets = self.list_offsets.get(name)
            begins, lasts = bounds[column.kind] if offsets is None else (offsets[rows], offsets[rows + 1])
            pieces = [values[begin:end] for begin, end in zip(begins, lasts, strict=True)]
            shown = np.concatenate([values[:0], *pieces])
            is_mapped = name in self.column_maps
            raw = shown.tolist() if is_mapped else _raw_values(name, shown, self.manifest, self.place)
            for row, piece in zip(found, pieces, strict=True):
                of_row, raw = raw[: len(piece)], raw[len(piece) :]
                row[name] = of_row[0] if column.kind == "scalar" else of_row
        for row, index in zip(found, indices, strict=True):
            row[LENGTH] = int(self.lengths[index])
            if self.num_targets is not None:
                row[NUM_TARGETS] = int(self.num_targets[index])
        return found

    def raw_ids(self, name: str) -> pa.Array | None:
        """Return what the log has for the ids 1, 2, ... of users or items; None: there is no vocabulary of them.

        Raises:
            DataError: it cannot be read.
        """
        place = self.place
        if place is None or name not in self.manifest.ids or self.manifest.ids[name].rule != "dense":
            return None
        return _read_vocabulary(name, place).sort_by("id").column("value").combine_chunks()

    def item_counts(self, before_ms: int = NEVER_MS) -> NDArray[np.int64]:
        """Return the events of each item before a time, in `train` or, without it, in this split: int64 [items]."""
        counts, (items, times) = np.zeros(self.manifest.vocabulary_sizes[ITEM_ID], dtype=np.int64), self._trained()
        for first in range(0, len(items), _VALUES_AT_ONCE):
            part = slice(first, first + _VALUES_AT_ONCE)
            np.add.at(counts, items[part][times[part] < before_ms], 1)
        return counts

    def first_times(self) -> NDArray[np.int64]:
        """Return the time of the first of these events of each item, `NEVER_MS` without one: int64 [items]."""
        firsts = np.full(self.manifest.vocabulary_sizes[ITEM_ID], NEVER_MS)
        np.minimum.at(firsts, *self._trained())
        return firsts

    def _trained(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the items and the times of all events of `train` or, without it, of this split."""
        store = self
        if self.split != "train" and "train" in self.manifest.splits and self.folder is not None:
            store = _open(self.folder, "train", None, self.source)
        return store.columns[ITEM_ID], store.columns[TIMESTAMP_MS]

    def remapped(self, column_maps: Mapping[str, ColumnMap]) -> "SequenceStore":
        """Return this store with other values in some columns, cached next to the dataset's.

        Raises:
            ConfigError: there is no such column, it is remapped already, or has values that cannot be mapped.
            DataError: the cache cannot be written.
        """
        remapped = {name: self._remapped(name, column_map) for name, column_map in column_maps.items()}
        maps = {**self.column_maps, **column_maps}
        return replace(self, columns={**self.columns, **remapped}, column_maps=maps)

    def _remapped(self, name: str, column_map: ColumnMap) -> NDArray[np.int64]:
        if name not in self.columns:
            raise ConfigError(f"the dataset has no column {name!r} to map; known: {', '.join(self.columns)}")
        if name in self.column_maps:
            raise ConfigError(f"the column {name!r} is mapped already; map it once")
        size = self.manifest.vocabulary_sizes.get(name, 0)
        if size > column_map.num_embeddings:
            raise ConfigError(
                f"{name} is up to {size - 1:,} in the dataset, too large for a table of num_embeddings="
                f"{column_map.num_embeddings}; pass manifest.vocabulary_sizes[{name!r}] or more"
            )
        values = self.columns[name]
        if column_map.is_identity:
            return values.astype(np.int64, copy=False)
        if self.folder is None:
            return column_map(values.astype(np.int64))

        def build(path: Path) -> None:
            with ColumnWriter(path / "values.npy", "int64") as writer:
                for first in range(0, len(values), _VALUES_AT_ONCE):
                    writer.append(column_map(values[first : first + _VALUES_AT_ONCE].astype(np.int64)))

        description = json.dumps([name, column_map.describe()], sort_keys=True)
        digest = hashlib.sha256(description.encode()).hexdigest()[:32]
        entry = f"{self.manifest.content_hash}-{self.split}-mapped-{digest}-{_REMAPPED_LAYOUT}"
        return _map(find_or_build(self.folder, entry, build), "values", "int64", len(values))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder is None:
            fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
            return partial(SequenceStore, **fields), ()
        is_sorted = bool(self.manifest.options.get("sort_by_time"))
        opened = self.folder, self.split, self.manifest.content_hash, self.column_maps, self.names, is_sorted
        return _reopen, (*opened, None if self.slices is None else (self.slices, self.num_targets))


def _raw_values(name: str, values: NDArray[Any], manifest: Manifest, place: Path | Remote | None) -> list[Any]:
    """Return what the log has for the values [n] of a column; None is missing, or unknown to the vocabulary.

    `place` has the vocabularies; None: there are none. Raises a DataError if one cannot be read.
    """
    if name == TIMESTAMP_MS:
        times = values.astype("datetime64[ms]").tolist()  # integers where there is no such datetime
        return [time.replace(tzinfo=UTC) if isinstance(time, datetime) else time for time in times]
    if values.dtype == np.float32:
        return [None if value != value else value for value in values.tolist()]
    if (labels := manifest.context_labels.get(name)) is not None:
        return [labels[value] if value < len(labels) else value for value in values.tolist()]
    if place is None or name not in manifest.ids or manifest.ids[name].rule != "dense":
        return list(values.tolist())
    table = _read_vocabulary(name, place, pc.field("id").isin(np.unique(values)))  # of many more than fit, perhaps
    known = dict(zip(table["id"].to_pylist(), table["value"].to_pylist(), strict=True))
    return [known.get(value) for value in values.tolist()]


def _read_vocabulary(name: str, place: Path | Remote, filters: pc.Expression | None = None) -> pa.Table:
    path = place / f"vocabulary_{name}.parquet"
    with open_file(path) as opened, wrap_parquet_errors(str(path)):
        return pq.read_table(opened, columns=["id", "value"], filters=filters)


def _reopen(
    folder: Path,
    split: str,
    content_hash: str,
    column_maps: Mapping[str, ColumnMap],
    names: Mapping[str, str] | None,
    sort_by_time: bool,
    sliced: tuple[Slices, NDArray[np.int32]] | None,
) -> SequenceStore:
    store = open_store(folder, split, columns=names, sort_by_time=sort_by_time)
    if store.manifest.content_hash != content_hash:
        raise DataError(f"{folder} was replaced by other data after it was opened; open it again")
    store = store.remapped(column_maps)
    return store if sliced is None else store.sliced(*sliced)


def open_store(
    path: Path | str, split: str = "train", *, columns: Mapping[str, str] | None = None, sort_by_time: bool = False
) -> SequenceStore:
    """Open a split of a dataset; the first process of a machine to do so unpacks it.

    If the dataset is preprocessed again while a store is open, the store keeps the data that it opened.

    Args:
        path: the folder or URL that `evenrank preprocess` wrote or, with `columns`, any folder of Parquet files. Of a
            URL, the split is fetched once, into a folder in the user's cache.
        split: its name; with `columns`, all files below the folder are the one split, which gets this name.
        columns: names in the files by names in batches: `item_id`, and optionally `user_id` (else the row number),
            `timestamp_ms`, `action` (else 0) and any others. Lists become columns of events, and must be as long as the
            row's `item_id` and in the order of time; integers become contextual features. Ids are at least 0.
        sort_by_time: with `columns`, sort the lists of each row by `timestamp_ms`, as those of a dataset are. Events of
            equal times keep their order.

    Raises:
        ConfigError: `columns` lacks `item_id`, or has a name that no feature can have.
        DataError: the folder is not a dataset, has no such split, its Parquet files do not match the manifest, or times
            are not in order or not in milliseconds.
    """
    dataset = locate(path)
    if isinstance(dataset, Path):
        reader = None if columns is None else ListReader(columns=columns, sort_by_time=sort_by_time)
        return _open(dataset.absolute(), split, reader)
    if columns is not None:
        raise ConfigError(f"columns are for a folder of Parquet files, not for {dataset}; copy its files to a folder")
    manifest, source = latest_version(dataset)
    parse_manifest(manifest, f"{dataset / MANIFEST_NAME}").split(split, dataset)
    # In the user's cache: the manifest, and soon the unpacked columns.
    name = f"{hashlib.sha256(manifest).hexdigest()}-dataset"
    folder = find_or_build(None, name, lambda entry: write_text(entry / MANIFEST_NAME, manifest.decode()))
    try:
        return _open(folder, split, None, source)
    except _DamagedEntryError:
        with locked(folder / ".repair.lock"):  # or a process could remove what another one has fetched again
            try:
                return _open(folder, split, None, source)
            except _DamagedEntryError as error:
                shutil.rmtree(error.entry)
                return _open(folder, split, None, source)


class _DamagedEntryError(DataError):
    entry: Path  # of the cache, with a file that is not as it was written


def _damaged(entry: Path, name: str) -> _DamagedEntryError:
    error = _DamagedEntryError(f"{entry / name}.npy is damaged; delete {entry} to have it rebuilt")
    error.entry = entry
    return error


def _open(folder: Path, split: str, reader: ListReader | None, source: Path | Remote | None = None) -> SequenceStore:
    """Open a split of a folder, whose Parquet files may be in another one, `source`."""
    manifest = read_manifest(folder) if reader is None else describe_folder(folder, split, reader)
    info = manifest.split(split, folder)
    cache = unpack(folder, manifest, split, reader or read_row_group, source)
    offsets = _map_offsets(cache, OFFSETS, info.rows)
    if offsets[-1] != info.interactions:
        raise _damaged(cache, OFFSETS)
    columns, list_offsets = {}, {}
    for column in (*manifest.columns, *[TARGETS] * (cache / f"{path_of(TARGETS)}.npy").exists()):
        length = info.interactions if column.kind == "event" else info.rows
        if column.kind == "list":
            list_offsets[column.name] = _map_offsets(cache, f"{ROW_OFFSETS}/{column.name}", info.rows)
            length = int(list_offsets[column.name][-1])
        columns[column.name] = _map(cache, path_of(column), column.dtype, length)
    num_targets = columns.pop(NUM_TARGETS, None)
    if num_targets is not None and ((num_targets < 0) | (num_targets > np.diff(offsets))).any():
        raise _damaged(cache, path_of(TARGETS))
    return SequenceStore(
        manifest=manifest,
        split=split,
        offsets=offsets,
        columns=columns,
        list_offsets=list_offsets,
        num_targets=num_targets,
        folder=folder,
        names=None if reader is None else reader.columns,
        source=source,
    )


def _map_offsets(cache: Path, name: str, num_rows: int) -> NDArray[np.int64]:
    """Map offsets and check them: compiled loops use them as indices, without bounds checks, and files can change."""
    offsets = _map(cache, name, "int64", num_rows + 1)
    # Compared rather than subtracted, because differences can overflow.
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise _damaged(cache, name)
    return offsets


def _map(cache: Path, name: str, dtype: str, length: int) -> NDArray[Any]:
    try:
        return map_column(cache / f"{name}.npy", dtype, length)
    except (DataError, OSError) as error:
        raise _damaged(cache, name) from error
