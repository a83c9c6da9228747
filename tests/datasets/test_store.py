import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import read_manifest
from evenrank.datasets.store import open_store
from evenrank.datasets.stream import open_stream
from tests.datasets.crafted import add_targets, change_table, copy_dataset, write_in_parts


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

    def describe(self) -> Mapping[str, Any]:
        return {"size": self.num_embeddings}


def test_columns_of_every_kind_equal_those_of_the_parquet_files_also_read_as_a_stream(
    rich_dataset: Path, tmp_path: Path
) -> None:
    store, table = open_store(rich_dataset), pq.read_table(rich_dataset / "train")
    stream = open_stream(write_in_parts(rich_dataset, tmp_path / "parts"), "train")  # row groups of 10
    copied = pickle.loads(pickle.dumps(store))
    for read, first, end in (
        *((store, 0, len(table)), (copied, 0, len(table))),
        *((stream.read(first, end), first, end) for first, end in ((7, 93), (3, 3), (64, 128), (190, len(table)))),
    ):
        rows = table.slice(first, end - first)
        for column in store.manifest.columns:
            values = read.columns[column.name]
            offsets = read.offsets if column.kind == "event" else read.list_offsets.get(column.name)
            of_rows = values if offsets is None else [values[a:b].tolist() for a, b in pairwise(offsets)]
            assert (str(values.dtype), list(of_rows)) == (column.dtype, rows[column.name].to_pylist())
    for name in ("item_id", "price", "tags"):
        assert isinstance(store.columns[name].base, np.memmap)
        assert not store.columns[name].flags.writeable
        assert copied.columns[name].base.filename == store.columns[name].base.filename  # type: ignore[union-attr]
    assert store.lengths.tolist() == table["length"].to_pylist()
    assert len(pickle.dumps(store)) < 1000


def _set(values: Mapping[int, int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        changed = np.load(path)
        changed[list(values)] = list(values.values())
        np.save(path, changed)

    return damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("events/item_id", lambda path: path.write_bytes(path.read_bytes()[:-8])),
        ("events/item_id", Path.unlink),
        *((name, _set(values)) for name in ("offsets", "row_offsets/tags") for values in ({0: 1}, {5: 1 << 40})),
        *((name, _set({-1: 1 << 40})) for name in ("offsets", "row_offsets/tags")),
        ("row_offsets/tags", _set({4: 9, 5: 2})),
        # Each of these is 2^62 or 1 above its predecessor, modulo 2^64.
        ("offsets", _set({1: 1 << 62, 2: (1 << 63) - 1, 3: -(1 << 63), 4: -(1 << 62)})),
        *(("num_targets", _set({0: value})) for value in (-1, 1000)),
    ],
)
def test_a_damaged_cache_says_what_to_delete(
    rich_dataset: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    dataset = copy_dataset(rich_dataset, tmp_path / "data")
    change_table(dataset, lambda table: add_targets(table, np.minimum(table["length"].to_numpy(), 1)))
    open_store(dataset)
    (cached,) = (dataset / ".cache").glob(f"*/{name}.npy")
    damage(cached)
    with pytest.raises(DataError, match=rf"{cached.name} is damaged; delete .*-train-v5 to have it rebuilt"):
        open_store(dataset)


def _open_and_sum(path: Path, results: "multiprocessing.Queue[tuple[int, ...]]") -> None:
    store = open_store(path)
    remapped = store.remapped({"item_id": Reversed()})
    results.put(tuple(int(each.columns["item_id"].sum()) for each in (store, remapped)))


def _entries(dataset: Path) -> list[str]:
    return sorted(path.name for path in (dataset / ".cache").iterdir() if path.is_dir() and "mapped" in path.name)


def test_processes_that_start_together_unpack_and_remap_once(small_dataset: Path, dataset: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, ...]] = context.Queue()
    processes = [context.Process(target=_open_and_sum, args=(dataset, results)) for _ in range(3)]
    for process in processes:
        process.start()
    sums = {results.get(timeout=240) for _ in processes}
    for process in processes:
        process.join()
    items = open_store(small_dataset).columns["item_id"]
    assert sums == {(int(items.sum()), int((599 - items).sum()))}
    built = sorted(path.name for path in (dataset / ".cache").iterdir() if path.is_dir())
    (remapped,) = _entries(dataset)
    assert built == sorted([f"{read_manifest(dataset).content_hash}-train-v5", remapped])


def test_the_named_columns_are_remapped_and_no_others_in_memory_and_after_pickling(rich_dataset: Path) -> None:
    store = open_store(rich_dataset)
    maps = {"item_id": Reversed(), "segment": Reversed(9), "tags": Reversed(9)}
    remapped = store.remapped({"item_id": maps["item_id"]}).remapped({name: maps[name] for name in ("segment", "tags")})
    in_memory = replace(store, folder=None).remapped(maps)
    for mapped in (remapped, in_memory, pickle.loads(pickle.dumps(remapped)), pickle.loads(pickle.dumps(in_memory))):
        for name, values in store.columns.items():
            last = maps[name].num_embeddings - 1 if name in maps else None
            assert mapped.columns[name].tolist() == (values if last is None else last - values).tolist()
    for name in ("action", "user_id"):
        assert remapped.columns[name] is store.columns[name]
    assert remapped.offsets is store.offsets
    assert not isinstance(in_memory.columns["item_id"].base, np.memmap)
    assert len(store.column_maps) == 0


def test_a_column_is_mapped_once_and_shared_as_a_file(dataset: Path) -> None:
    store, fails = open_store(dataset), DataError("mapped again")
    unchanged = store.remapped({"item_id": Reversed(is_identity=True, error=fails)})
    assert unchanged.columns["item_id"] is store.columns["item_id"]
    with pytest.raises(DataError, match=r"^mapped again$"):
        store.remapped({"item_id": Reversed(error=fails)})
    assert _entries(dataset) == []  # neither for what changes nothing nor for what fails half-way
    store.remapped({"item_id": Reversed()})
    again = open_store(dataset).remapped({"item_id": Reversed(error=fails)}).columns["item_id"]
    assert again.tolist() == (599 - store.columns["item_id"]).tolist()
    assert isinstance(again.base, np.memmap)
    assert not again.flags.writeable
    (entry,) = _entries(dataset)
    for split, name, size in (("train", "item_id", 601), ("train", "segment", 600), ("eval", "item_id", 600)):
        other = open_store(dataset, split)
        mapped = other.remapped({name: Reversed(size)}).columns[name]
        assert mapped.tolist() == (size - 1 - other.columns[name]).tolist()
    assert len(_entries(dataset)) == 4  # each has its own
    path = dataset / ".cache" / entry / "values.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"^{path} is damaged; delete {path.parent} to have it rebuilt$"):
        open_store(dataset).remapped({"item_id": Reversed()})
