"""Columns whose values are replaced are made once per machine, and never stand in for other data."""

import multiprocessing
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.store import SequenceStore, open_store
from tests.datasets.crafted import copy_dataset


@dataclass(frozen=True)
class _Reversed:
    """Counts keys from the end of the table."""

    num_embeddings: int = 600
    is_identity: bool = False

    def __call__(self, keys: NDArray[Any], /) -> NDArray[Any]:
        return self.num_embeddings - 1 - keys

    def describe(self) -> Mapping[str, Any]:
        return {"size": self.num_embeddings}


class _Unused(_Reversed):
    def __call__(self, keys: NDArray[Any], /) -> NDArray[Any]:
        raise AssertionError("mapped again")


def _copy(dataset: Path, tmp_path: Path) -> Path:
    return copy_dataset(dataset, tmp_path / "copy")


def _entries(dataset: Path) -> list[str]:
    return sorted(path.name for path in (dataset / ".cache").iterdir() if path.is_dir() and "mapped" in path.name)


def test_the_named_columns_are_replaced_and_no_others(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    mapped = store.remapped({"item_id": _Reversed(), "segment": _Reversed(9)})
    assert mapped.events["item_id"].tolist() == [599 - item for item in store.events["item_id"].tolist()]
    assert mapped.rows["segment"].tolist() == [8 - segment for segment in store.rows["segment"].tolist()]
    for name in ("action", "timestamp_ms"):
        assert mapped.events[name] is store.events[name]
    assert mapped.rows["user_id"] is store.rows["user_id"]
    assert mapped.offsets is store.offsets
    assert len(store.column_maps) == 0


def test_a_column_is_mapped_once_and_shared_as_a_file(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _copy(small_dataset, tmp_path)
    first = open_store(dataset).remapped({"item_id": _Reversed()})
    again = open_store(dataset).remapped({"item_id": _Unused()})
    assert again.events["item_id"].tolist() == first.events["item_id"].tolist()
    assert isinstance(again.events["item_id"].base, np.memmap)
    assert not again.events["item_id"].flags.writeable
    assert len(_entries(dataset)) == 1


def _map_and_sum(path: Path, results: "multiprocessing.Queue[int]") -> None:
    results.put(int(open_store(path).remapped({"item_id": _Reversed()}).events["item_id"].sum()))


def test_processes_that_start_together_map_once(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _copy(small_dataset, tmp_path)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=_map_and_sum, args=(dataset, results)) for _ in range(3)]
    for process in processes:
        process.start()
    sums = {results.get(timeout=240) for _ in processes}
    for process in processes:
        process.join()
    assert sums == {int((599 - open_store(small_dataset).events["item_id"]).sum())}
    assert len(_entries(dataset)) == 1


def test_other_maps_columns_and_splits_have_files_of_their_own(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _copy(small_dataset, tmp_path)
    store = open_store(dataset)
    for size in (600, 601, 602):
        items = store.remapped({"item_id": _Reversed(size)}).events["item_id"]
        assert items.tolist() == (size - 1 - store.events["item_id"]).tolist()
    store.remapped({"segment": _Reversed()})
    eval_store = open_store(dataset, "eval")
    mapped = eval_store.remapped({"item_id": _Reversed()}).events["item_id"]
    assert mapped.tolist() == (599 - eval_store.events["item_id"]).tolist()
    assert len(_entries(dataset)) == 5


def test_a_pickled_store_has_the_replaced_columns(small_dataset: Path) -> None:
    store = open_store(small_dataset).remapped({"item_id": _Reversed()}).remapped({"segment": _Reversed()})
    copied = pickle.loads(pickle.dumps(store))
    assert copied.events["item_id"].tolist() == store.events["item_id"].tolist()
    assert copied.rows["segment"].tolist() == store.rows["segment"].tolist()
    assert isinstance(copied.events["item_id"].base, np.memmap)
    in_memory = replace(open_store(small_dataset), folder=None).remapped({"item_id": _Reversed()})
    assert pickle.loads(pickle.dumps(in_memory)).events["item_id"].tolist() == store.events["item_id"].tolist()


def test_columns_in_memory_are_mapped_there(small_dataset: Path) -> None:
    store = replace(open_store(small_dataset), folder=None)
    items = store.remapped({"item_id": _Reversed()}).events["item_id"]
    assert items.tolist() == (599 - store.events["item_id"]).tolist()
    assert not isinstance(items.base, np.memmap)


def test_a_map_that_changes_nothing_needs_no_file(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _copy(small_dataset, tmp_path)
    store = open_store(dataset)
    mapped = store.remapped({"item_id": _Unused(is_identity=True)})
    assert mapped.events["item_id"] is store.events["item_id"]
    assert _entries(dataset) == []


def test_a_damaged_file_is_reported(small_dataset: Path, tmp_path: Path) -> None:
    dataset = _copy(small_dataset, tmp_path)
    open_store(dataset).remapped({"item_id": _Reversed()})
    (entry,) = _entries(dataset)
    path = dataset / ".cache" / entry / "values.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"^{path} is damaged; delete {path.parent} to have it rebuilt$"):
        open_store(dataset).remapped({"item_id": _Reversed()})


def test_what_fails_half_way_leaves_no_file(small_dataset: Path, tmp_path: Path) -> None:
    class Fails(_Reversed):
        def __call__(self, keys: NDArray[Any], /) -> NDArray[Any]:
            raise DataError("no such key")

    dataset = _copy(small_dataset, tmp_path)
    with pytest.raises(DataError, match=r"^no such key$"):
        open_store(dataset).remapped({"item_id": Fails()})
    assert not any("mapped" in path.name and path.is_dir() for path in (dataset / ".cache").iterdir())


def _refuse(store: SequenceStore, maps: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        store.remapped(maps)
    assert str(raised.value) == message


def test_columns_that_cannot_be_mapped_are_refused(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    _refuse(
        store,
        {"video_id": _Reversed()},
        "the dataset has no column 'video_id' to map; known: user_id, segment, item_id, action, timestamp_ms",
    )
    size = store.manifest.vocabulary_sizes["item_id"]
    _refuse(
        store,
        {"item_id": _Reversed(100)},
        f"item_id is up to {size - 1} in the dataset, too large for a table of num_embeddings=100; pass "
        "manifest.vocabulary_sizes['item_id'] or more",
    )
    _refuse(
        store.remapped({"item_id": _Reversed()}),
        {"item_id": _Reversed()},
        "the column 'item_id' is mapped already; map it once",
    )
