import multiprocessing
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import DataError
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
        assert not store.columns[name].flags.writeable
        assert copied.columns[name].base.filename == store.columns[name].base.filename  # type: ignore[union-attr]
    assert store.lengths.tolist() == table["length"].to_pylist()
    assert len(pickle.dumps(store)) < 1000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("events/item_id", None),
        *(
            (name, values)
            for name in ("offsets", "row_offsets/tags")
            for values in ({0: 1}, {5: 1 << 40}, {-1: 1 << 40})
        ),
        ("row_offsets/tags", {4: 9, 5: 2}),
        # Each of these is 2^62 or 1 above its predecessor, modulo 2^64.
        ("offsets", {1: 1 << 62, 2: (1 << 63) - 1, 3: -(1 << 63), 4: -(1 << 62)}),
        *(("num_targets", {0: value}) for value in (-1, 1000)),
    ],
)
def test_a_damaged_cache_says_what_to_delete(
    rich_dataset: Path, tmp_path: Path, name: str, values: dict[int, int] | None
) -> None:
    dataset = copy_dataset(rich_dataset, tmp_path / "data")
    change_table(dataset, lambda table: add_targets(table, np.minimum(table["length"].to_numpy(), 1)))
    open_store(dataset)
    (cached,) = (dataset / ".cache").glob(f"*/{name}.npy")
    if values is None:
        cached.write_bytes(cached.read_bytes()[:-8])
    else:
        changed = np.load(cached)
        changed[list(values)] = list(values.values())
        np.save(cached, changed)
    with pytest.raises(DataError, match=rf"{cached.name} is damaged; delete .*-train-v5 to have it rebuilt"):
        open_store(dataset)


def _open_and_sum(path: Path, results: "multiprocessing.Queue[tuple[int, ...]]") -> None:
    store = open_store(path)
    remapped = store.remapped({"item_id": Reversed()})
    results.put(tuple(int(each.columns["item_id"].sum()) for each in (store, remapped)))


def _entries(dataset: Path) -> list[Path]:
    return [path for path in (dataset / ".cache").iterdir() if path.is_dir()]


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
    assert len(_entries(dataset)) == 2


def test_the_named_columns_are_remapped_and_no_others_in_memory_and_after_pickling(rich_dataset: Path) -> None:
    store = open_store(rich_dataset)
    maps = {"item_id": Reversed(), "segment": Reversed(9), "tags": Reversed(9)}
    remapped = store.remapped({"item_id": maps["item_id"]}).remapped({name: maps[name] for name in ("segment", "tags")})
    in_memory = replace(store, folder=None).remapped(maps)
    for mapped in (remapped, in_memory, pickle.loads(pickle.dumps(remapped)), pickle.loads(pickle.dumps(in_memory))):
        for name, values in store.columns.items():
            expected = values if name not in maps else maps[name].num_embeddings - 1 - values
            assert mapped.columns[name].tolist() == expected.tolist()
    assert remapped.columns["action"] is store.columns["action"]
    assert len(store.column_maps) == 0


def test_a_column_is_mapped_once_and_shared_as_a_file(dataset: Path) -> None:
    store, fails = open_store(dataset), DataError("mapped again")
    unchanged = store.remapped({"item_id": Reversed(is_identity=True, error=fails)})
    assert unchanged.columns["item_id"] is store.columns["item_id"]
    with pytest.raises(DataError, match=r"^mapped again$"):
        store.remapped({"item_id": Reversed(error=fails)})
    (unpacked,) = _entries(dataset)  # none for what changes nothing, nor for what fails half-way
    store.remapped({"item_id": Reversed()})
    again = open_store(dataset).remapped({"item_id": Reversed(error=fails)}).columns["item_id"]
    assert again.tolist() == (599 - store.columns["item_id"]).tolist()
    (entry,) = {*_entries(dataset)} - {unpacked}
    for split, name, size in (("train", "item_id", 601), ("train", "segment", 600), ("eval", "item_id", 600)):
        other = open_store(dataset, split)
        mapped = other.remapped({name: Reversed(size)}).columns[name]
        assert mapped.tolist() == (size - 1 - other.columns[name]).tolist()
    assert len(_entries(dataset)) == 2 + 4  # each has its own
    path = entry / "values.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"^{path} is damaged; delete {entry} to have it rebuilt$"):
        open_store(dataset).remapped({"item_id": Reversed()})
