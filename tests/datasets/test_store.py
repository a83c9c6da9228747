"""Columns of a split, in memory-mapped files: those of Parquet, cached where nobody else can write, checked."""

import math
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import read_manifest
from evenrank.datasets.store import open_store
from evenrank.datasets.stream import open_stream
from tests.datasets.crafted import add_targets, change_table, copy_dataset, set_columns, write_in_parts


@dataclass(frozen=True)
class Reversed:
    """Counts keys from the end of the table, or raises an error."""

    num_embeddings: int = 600
    is_identity: bool = False
    error: Exception | None = None

    def __call__(self, keys: NDArray[Any], /) -> NDArray[Any]:
        if self.error:
            raise self.error
        return self.num_embeddings - 1 - keys

    def inverse(self, rows: NDArray[Any], /) -> NDArray[Any]:
        return self(rows)

    def describe(self) -> Mapping[str, Any]:
        return {"size": self.num_embeddings}


def test_columns_of_every_kind_equal_those_of_the_parquet_files_also_read_as_a_stream(
    rich_dataset: Path, tmp_path: Path
) -> None:
    store, table = open_store(rich_dataset), pq.read_table(rich_dataset / "train")
    stream = open_stream(write_in_parts(rich_dataset, tmp_path / "parts"), "train")  # row groups of 10
    copied, end = pickle.loads(pickle.dumps(store)), len(table)
    streamed = [(stream.read(*rows), *rows) for rows in ((7, 93), (3, 3), (64, 128), (190, end))]
    for read, first, last in ((store, 0, end), (copied, 0, end), *streamed):
        for column in store.manifest.columns:
            values = read.columns[column.name]
            offsets = read.offsets if column.kind == "event" else read.list_offsets.get(column.name)
            of_rows = values if offsets is None else [values[a:b].tolist() for a, b in pairwise(offsets)]
            expected = table[column.name].slice(first, last - first).to_pylist()
            assert (str(values.dtype), list(of_rows)) == (column.dtype, expected)
    for name in ("item_id", "price", "tags"):
        assert not store.columns[name].flags.writeable
        assert copied.columns[name].base.filename == store.columns[name].base.filename  # type: ignore[union-attr]
    assert store.lengths.tolist() == table["length"].to_pylist()
    assert len(pickle.dumps(store)) < 1000


WRONG_OFFSETS: list[dict[int, int]] = [{0: 1}, {5: 1 << 40}, {-1: 1 << 40}]
# Each of these is 2^62 or 1 above its predecessor, modulo 2^64.
WRONG_OFFSETS.append({1: 1 << 62, 2: (1 << 63) - 1, 3: -(1 << 63), 4: -(1 << 62)})
DAMAGES: dict[str, list[dict[int, int]]] = {"events/item_id": [{}], "num_targets": [{0: -1}, {0: 1000}]}
DAMAGES |= {"offsets": WRONG_OFFSETS, "row_offsets/tags": [*WRONG_OFFSETS, {4: 9, 5: 2}]}


def test_a_damaged_cache_says_what_to_delete(rich_dataset: Path, tmp_path: Path) -> None:
    dataset = copy_dataset(rich_dataset, tmp_path / "data")
    change_table(dataset, lambda table: add_targets(table, np.minimum(table["length"].to_numpy(), 1)))
    open_store(dataset)
    for name, values in ((name, values) for name, damages in DAMAGES.items() for values in damages):
        (cached,) = (dataset / ".cache").glob(f"*/{name}.npy")
        whole, changed = cached.read_bytes(), np.load(cached)
        changed[list(values)] = list(values.values())
        np.save(cached, changed) if values else cached.write_bytes(whole[:-8])
        with pytest.raises(DataError, match=rf"{cached.name} is damaged; delete .*-train-v5 to have it rebuilt"):
            open_store(dataset)
        cached.write_bytes(whole)


def _entries(dataset: Path) -> set[Path]:
    return {path for path in (dataset / ".cache").iterdir() if path.is_dir()}


def _sums(path: Path) -> list[int]:
    store = open_store(path)
    return [int(each.columns["item_id"].sum()) for each in (store, store.remapped({"item_id": Reversed()}))]


def test_processes_unpack_and_remap_a_column_once_and_share_it(dataset: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sums, entries = pool.map(_sums, [dataset] * 3, chunksize=1), _entries(dataset)
    assert len(entries) == 2
    store, fails = open_store(dataset), DataError("mapped again")
    items = store.columns["item_id"]
    assert sums == [[items.sum(), (599 - items).sum()]] * 3
    assert store.remapped({"item_id": Reversed(is_identity=True, error=fails)}).columns["item_id"] is items
    again = store.remapped({"item_id": Reversed(error=fails)}).columns["item_id"]
    assert again.tolist() == (599 - items).tolist()
    with pytest.raises(DataError, match=r"^mapped again$"):
        store.remapped({"item_id": Reversed(601, error=fails)})
    assert _entries(dataset) == entries  # none for what changes nothing, nor for what fails half-way
    for split, name, size in (("train", "item_id", 601), ("train", "segment", 600), ("eval", "item_id", 600)):
        other = open_store(dataset, split)
        mapped = other.remapped({name: Reversed(size)}).columns[name]
        assert mapped.tolist() == (size - 1 - other.columns[name]).tolist()
    assert len(_entries(dataset)) == 2 + 4  # each has its own
    (path,) = (entry / "values.npy" for entry in entries if (entry / "values.npy").exists())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"^{path} is damaged; delete {path.parent} to have it rebuilt$"):
        open_store(dataset).remapped({"item_id": Reversed()})


def test_the_named_columns_are_remapped_and_no_others_in_memory_and_after_pickling(rich_dataset: Path) -> None:
    store = open_store(rich_dataset)
    maps = {"item_id": Reversed(), "segment": Reversed(9), "tags": Reversed(9)}
    remapped = store.remapped({"item_id": maps["item_id"]}).remapped({name: maps[name] for name in ("segment", "tags")})
    in_memory = replace(store, folder=None).remapped(maps)
    for mapped in (remapped, in_memory, pickle.loads(pickle.dumps(remapped)), pickle.loads(pickle.dumps(in_memory))):
        for name, values in store.columns.items():
            expected = maps[name].num_embeddings - 1 - values if name in maps else values
            assert mapped.columns[name].tolist() == expected.tolist()
    assert remapped.columns["action"] is store.columns["action"]
    assert len(store.column_maps) == 0


STRANGER = 54321  # a user id without an entry in the password database


def _place(dataset: Path) -> Path:
    base: Any = open_store(dataset).offsets.base
    return Path(base.filename).parent


def test_only_caches_that_nobody_else_can_write_are_used(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, home = _place(dataset), tmp_path / "home" / ".cache" / "evenrank"
    if os.geteuid() == 0:  # this user, root and the owner of the dataset are trusted
        for path, place in ((cached, home), (dataset, cached.parent), (dataset / ".cache", home)):
            os.chown(path, STRANGER + (path.name == ".cache"), -1)
            assert _place(dataset).parent == place
        for path in (cached, dataset, dataset / ".cache"):
            os.chown(path, 0, -1)
    (dataset / ".cache").chmod(0o777)
    assert _place(dataset) == home / cached.name
    home.chmod(0o770)
    in_temporary = tmp_path / f"evenrank-{os.geteuid()}"
    assert _place(dataset) == in_temporary / cached.name
    assert in_temporary.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))  # of an unknown user without HOME
    assert _place(dataset) == in_temporary / cached.name
    in_temporary.chmod(0o707)
    with pytest.raises(DataError, match=r"has no place for its unpacked columns: none of .*\.cache, [^\n]*evenrank"):
        open_store(dataset)
    dataset.chmod(0o777)  # who can write the dataset can change all of it anyway
    assert _place(dataset) == cached


Change = Callable[[pa.Table], pa.Table]


def _first(name: str, value: object, type_: pa.DataType | None = None) -> Change:
    """Change what the first row with one event has in a column."""

    def change(table: pa.Table) -> pa.Table:
        column = table[name].to_pylist()
        column[table["length"].to_pylist().index(1)] = value
        return set_columns({name: pa.array(column, type_ or table.schema.field(name).type)})(table)

    return change


def _targets(more_than_length: int) -> Change:
    return lambda table: add_targets(table, table["length"].to_numpy() + more_than_length)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_first("item_id", [1], pa.list_(pa.int32())), "column 'item_id' must be int64 .*type int32"),
        (_first("item_id", None), "'item_id' must be list<int64> .*, it has 1 null lists"),
        (_first("item_id", [None]), "'item_id' must be int64 .*, it has 1 nulls"),
        (_first("item_id", [-1]), "'item_id' has values from -1 to"),
        (_first("item_id", [1 << 40]), r"to 1099511627776, which must be in 0\.\.\d+; preprocess"),
        (_first("action", [1, 1]), "a list of column 'action' has another length than its row's"),
        (_first("segment", 9), r"to 9, which must be in 0\.\.8"),
        (_first("user_id", 301), "to 301, which must be below 301"),
        (_first("share", math.nan), "'share' has infinite values or NaN; preprocess"),
        (_first("tags", [1, 9]), r"'tags' has values from 1 to 9, which must be in 0\.\.8"),
        (_first("price", [math.inf]), "'price' has infinite values or NaN; preprocess"),
        (lambda table: table.append_column("segment", table["segment"]), " has 2 columns 'segment'"),
        (_targets(-10_000), "column 'num_targets' has values from"),
        (_targets(1), "a row has more 'num_targets' than"),
    ],
)
def test_a_value_that_does_not_fit_the_manifest_is_named_by_stores_and_streams(
    rich_dataset: Path, tmp_path: Path, change: Change, fault: str
) -> None:
    change_table(dataset := copy_dataset(rich_dataset, tmp_path / "data"), change)
    num_rows = read_manifest(dataset).splits["train"].rows
    for read in (open_store, lambda path: open_stream(path, "train").read(0, num_rows)):
        with pytest.raises(DataError, match=rf"^[^\n]*part-00000\.parquet[^\n]*{fault}"):
            read(dataset)
    assert not _entries(dataset)


def _write_another_file_of_equal_size_and_time(path: Path) -> None:
    status = path.stat()
    path.unlink()
    path.write_bytes(b"PAR1" + bytes(status.st_size - 4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[Callable[[Path], object], str] = {
    lambda path: path.write_bytes(path.read_bytes()[:-50]): "cannot be read as Parquet",
    Path.unlink: "cannot be read as Parquet",
    lambda path: pq.write_table(pq.read_table(path).slice(0, 5), path): "has 5 rows, its manifest says 64; prep",
    lambda path: pq.write_table(pq.read_table(path).take([*range(63), 0]), path): "",  # other values
    _write_another_file_of_equal_size_and_time: "cannot be read as Parquet",
}


def test_a_stream_names_damaged_and_replaced_files(small_dataset: Path, tmp_path: Path) -> None:
    parts = write_in_parts(small_dataset, tmp_path / "parts")
    replaced = "was changed, replaced or deleted after the dataset was opened; its SHA-256 is not the one"
    for number, (damage, message) in enumerate(CHANGES.items()):
        data = shutil.copytree(parts, tmp_path / str(number))
        before = open_stream(data, "train")
        before.read(0, before.num_rows)
        damage(data / "train" / "part-00001.parquet")
        for source, fault in ((before, replaced), (open_stream(data, "train"), message)):
            if fault:
                with pytest.raises(DataError, match=rf"^[^\n]*part-00001\.parquet {fault}"):
                    source.read(0, source.num_rows)
