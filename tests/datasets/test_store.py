import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.distributions import Uniform
from evenrank.datasets.schema import read_manifest
from evenrank.datasets.store import open_store
from evenrank.datasets.stream import open_stream
from tests.datasets.crafted import add_targets, change_table, copy_dataset, write_in_parts


def test_rows_equal_those_of_the_parquet_files(small_dataset: Path) -> None:
    store = open_store(small_dataset, "train")
    table = pq.read_table(small_dataset / "train")
    assert len(store) == table.num_rows
    assert store.columns["user_id"].tolist() == table["user_id"].to_pylist()
    assert store.columns["segment"].tolist() == table["segment"].to_pylist()
    assert store.lengths.tolist() == table["length"].to_pylist()
    for name in ("item_id", "action", "timestamp_ms"):
        rows = [store.columns[name][a:b].tolist() for a, b in zip(store.offsets, store.offsets[1:], strict=False)]
        assert rows == table[name].to_pylist()
        assert isinstance(store.columns[name].base, np.memmap)
        assert not store.columns[name].flags.writeable
    assert store.columns["action"].dtype == np.int32


def test_columns_of_every_kind_equal_those_of_the_parquet_files_also_read_as_a_stream(
    rich_dataset: Path, tmp_path: Path
) -> None:
    store = open_store(rich_dataset)
    table = pq.read_table(rich_dataset / "train")
    assert store.columns["share"].dtype == store.columns["price"].dtype == np.float32
    assert store.columns["dwell"].dtype == np.int32
    in_parts = write_in_parts(rich_dataset, tmp_path / "parts")  # row groups of 10
    for read, first, end in ((store, 0, len(table)), (open_stream(in_parts, "train").read(7, 93), 7, 93)):
        rows = table.slice(first, end - first)
        assert {name: read.columns[name].tolist() for name in ("segment", "share")} == {
            name: rows[name].to_pylist() for name in ("segment", "share")
        }
        for name, offsets, values in (
            ("tags", read.list_offsets["tags"], read.columns["tags"]),
            *((name, read.offsets, read.columns[name]) for name in ("price", "dwell")),
        ):
            assert [values[a:b].tolist() for a, b in itertools.pairwise(offsets)] == rows[name].to_pylist()
    assert [open_stream(in_parts, "train").read(3, 3).columns[name].dtype for name in ("tags", "share")] == ["i8", "f4"]
    copy = pickle.loads(pickle.dumps(store))
    assert copy.list_offsets["tags"].tolist() == store.list_offsets["tags"].tolist()
    remapped = store.remapped({"tags": _Reversed()})
    assert remapped.columns["tags"].tolist() == (599 - store.columns["tags"]).tolist()


@pytest.mark.parametrize("values", [{0: 1}, {5: 1 << 40}, {-1: 1 << 40}, {-1: -1}, {4: 9, 5: 2}])
def test_offsets_of_a_feature_out_of_range_are_refused(
    rich_dataset: Path, tmp_path: Path, values: dict[int, int]
) -> None:
    dataset = copy_dataset(rich_dataset, tmp_path / "data")
    open_store(dataset)
    (cached,) = (dataset / ".cache").glob("*/row_offsets/tags.npy")
    changed = np.load(cached)
    changed[list(values)] = list(values.values())
    np.save(cached, changed)
    with pytest.raises(DataError, match=r"tags.npy is damaged; delete .*-train-v5 to have it rebuilt"):
        open_store(dataset)


def _open_and_sum(path: Path, results: "multiprocessing.Queue[tuple[int, ...]]") -> None:
    store = open_store(path)
    remapped = store.remapped({"item_id": _Reversed()})
    results.put(tuple(int(each.columns["item_id"].sum()) for each in (store, remapped)))


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
    assert built == sorted([f"{read_manifest(dataset).content_hash}-train-v5", *_entries(dataset)])
    assert len(built) == 2


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-8]), Path.unlink])
def test_a_damaged_cache_says_what_to_delete(dataset: Path, damage: Callable[[Path], object]) -> None:
    open_store(dataset)
    (cached,) = (dataset / ".cache").glob("*/events/item_id.npy")
    damage(cached)
    with pytest.raises(DataError, match=r"item_id.npy is damaged; delete .*-train-v5 to have it rebuilt"):
        open_store(dataset)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offsets", {0: 1}),
        ("offsets", {5: 1 << 40}),
        ("offsets", {-1: 1 << 40}),
        # Each of these is 2^62 or 1 above its predecessor, modulo 2^64.
        ("offsets", {1: 1 << 62, 2: (1 << 63) - 1, 3: -(1 << 63), 4: -(1 << 62)}),
        *(("num_targets", {0: value}) for value in (-1, 1000)),
    ],
)
def test_a_cache_with_indices_out_of_range_is_refused(dataset: Path, name: str, values: dict[int, int]) -> None:
    change_table(dataset, lambda table: add_targets(table, np.minimum(table["length"].to_numpy(), 1)))
    open_store(dataset)
    (cached,) = (dataset / ".cache").glob(f"*/{name}.npy")
    changed = np.load(cached)
    changed[list(values)] = list(values.values())
    np.save(cached, changed)
    with pytest.raises(DataError, match=rf"{name}.npy is damaged; delete .*-train-v5 to have it rebuilt"):
        open_store(dataset)


def test_features_can_have_the_names_of_the_caches_own_files_and_splits_no_rows(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="hosts that only train have no Polars to make data with")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    names = ("offsets", "num_targets_2", "events", "rows", "timestamp", "Offsets_npy")
    synthetic = SyntheticConfig(num_users=30, contextual=dict.fromkeys(names, Uniform(low=1, high=9)))
    preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "data", split="user:0", synthetic=synthetic))
    store = open_store(tmp_path / "data")
    table = pq.read_table(tmp_path / "data" / "train")
    for name in names:
        assert store.columns[name].tolist() == table[name].to_pylist()
    assert len(store) == 30
    empty = open_store(tmp_path / "data", "eval")
    assert len(empty) == len(empty.columns["item_id"]) == 0


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
@pytest.mark.parametrize("name", ["manifest.json", "train/part-00000.parquet"])
def test_a_named_pipe_is_refused_instead_of_waited_for(dataset: Path, name: str) -> None:
    (dataset / name).unlink()
    os.mkfifo(dataset / name)
    for opens in (open_store, lambda path: open_stream(path, "train").read(0, 1)):
        with pytest.raises(DataError, match=f"{name} is a named pipe, not a regular file"):
            opens(dataset)


@dataclass(frozen=True)
class _Reversed:
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


def _entries(dataset: Path) -> list[str]:
    return sorted(path.name for path in (dataset / ".cache").iterdir() if path.is_dir() and "mapped" in path.name)


def test_the_named_columns_are_replaced_and_no_others(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    remapped = store.remapped({"item_id": _Reversed(), "segment": _Reversed(9)})
    assert remapped.columns["item_id"].tolist() == [599 - item for item in store.columns["item_id"].tolist()]
    assert remapped.columns["segment"].tolist() == [8 - segment for segment in store.columns["segment"].tolist()]
    for name in ("action", "timestamp_ms"):
        assert remapped.columns[name] is store.columns[name]
    assert remapped.columns["user_id"] is store.columns["user_id"]
    assert remapped.offsets is store.offsets
    assert len(store.column_maps) == 0


def test_a_column_is_mapped_once_and_shared_as_a_file(dataset: Path) -> None:
    store = open_store(dataset)
    fails = DataError("mapped again")
    unchanged = store.remapped({"item_id": _Reversed(is_identity=True, error=fails)})
    assert unchanged.columns["item_id"] is store.columns["item_id"]
    with pytest.raises(DataError, match=r"^mapped again$"):
        store.remapped({"item_id": _Reversed(error=fails)})
    assert _entries(dataset) == []  # neither for what changes nothing nor for what fails half-way
    first = store.remapped({"item_id": _Reversed()})
    again = open_store(dataset).remapped({"item_id": _Reversed(error=fails)})
    assert again.columns["item_id"].tolist() == first.columns["item_id"].tolist()
    assert isinstance(again.columns["item_id"].base, np.memmap)
    assert not again.columns["item_id"].flags.writeable
    (entry,) = _entries(dataset)
    path = dataset / ".cache" / entry / "values.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"^{path} is damaged; delete {path.parent} to have it rebuilt$"):
        open_store(dataset).remapped({"item_id": _Reversed()})


def test_other_maps_columns_and_splits_have_files_of_their_own(dataset: Path) -> None:
    store = open_store(dataset)
    for size in (600, 601, 602):
        items = store.remapped({"item_id": _Reversed(size)}).columns["item_id"]
        assert items.tolist() == (size - 1 - store.columns["item_id"]).tolist()
    store.remapped({"segment": _Reversed()})
    eval_store = open_store(dataset, "eval")
    remapped = eval_store.remapped({"item_id": _Reversed()}).columns["item_id"]
    assert remapped.tolist() == (599 - eval_store.columns["item_id"]).tolist()
    assert len(_entries(dataset)) == 5


def test_a_pickled_store_maps_the_same_files_with_the_remapped_columns(small_dataset: Path) -> None:
    plain = open_store(small_dataset)
    assert len(pickle.dumps(plain)) < 1000
    store = plain.remapped({"item_id": _Reversed()}).remapped({"segment": _Reversed()})
    copied = pickle.loads(pickle.dumps(store))
    assert copied.columns["segment"].tolist() == store.columns["segment"].tolist()
    for name in ("item_id", "action"):
        assert copied.columns[name].tolist() == store.columns[name].tolist()
        assert copied.columns[name].base.filename == store.columns[name].base.filename  # type: ignore[union-attr]
    in_memory = replace(plain, folder=None).remapped({"item_id": _Reversed()})
    assert not isinstance(in_memory.columns["item_id"].base, np.memmap)
    assert pickle.loads(pickle.dumps(in_memory)).columns["item_id"].tolist() == store.columns["item_id"].tolist()


def test_columns_that_cannot_be_mapped_are_refused(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    mapped = store.remapped({"item_id": _Reversed()})
    size = store.manifest.vocabulary_sizes["item_id"]
    known = "user_id, segment, item_id, action, timestamp_ms"
    too_small = "too large for a table of num_embeddings=100; pass manifest.vocabulary_sizes['item_id'] or more"
    for opened, name, table, message in (
        (store, "video_id", 600, f"the dataset has no column 'video_id' to map; known: {known}"),
        (store, "item_id", 100, f"item_id is up to {size - 1} in the dataset, {too_small}"),
        (mapped, "item_id", 600, "the column 'item_id' is mapped already; map it once"),
    ):
        with pytest.raises(ConfigError) as raised:
            opened.remapped({name: _Reversed(table)})
        assert str(raised.value) == message
