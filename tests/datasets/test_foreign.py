import datetime
import multiprocessing
import os
import pickle
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import open_store

COLUMNS = {"item_id": "movies", "user_id": "uid", "timestamp_ms": "ts", "action": "stars", "shop": "shop", "age": "age"}
ROWS = [
    {"uid": 7, "movies": [3, 1, 4], "ts": [10, 20, 30], "stars": [1, 2, 3], "shop": [-1, 8, 9], "age": 30, "x": "a"},
    {"uid": -5, "movies": [], "ts": [], "stars": [], "shop": [], "age": 0, "x": "b"},
    {"uid": 9, "movies": [5], "ts": [5], "stars": [0], "shop": [2**40], "age": 41, "x": "c"},
]
SCHEMA = pa.schema(
    {
        "uid": pa.int64(),
        "movies": pa.large_list(pa.uint16()),
        "ts": pa.list_(pa.int64()),
        "stars": pa.list_(pa.int8()),
        "shop": pa.list_(pa.int64()),
        "age": pa.int16(),
        "x": pa.string(),
    }
)


def _write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = SCHEMA, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the rows in two files, which are read in the order of their paths."""
    _write(tmp_path / "lake/date=2/a.parquet", ROWS[2:])
    _write(tmp_path / "lake/date=1/b.parquet", ROWS[:2], row_group_size=1)
    (tmp_path / "lake/_temporary").mkdir()
    (tmp_path / "lake/_temporary/c.parquet").write_bytes(b"not written yet")
    return tmp_path / "lake"


def test_any_folder_of_lists_is_opened_by_the_names_of_its_columns(folder: Path) -> None:
    store = open_store(folder, columns=COLUMNS)
    assert store.lengths.tolist() == [3, 0, 1]
    assert {name: (str(values.dtype), values.tolist()) for name, values in store.columns.items()} == {
        "user_id": ("int64", [7, -5, 9]),
        "age": ("int64", [30, 0, 41]),
        "item_id": ("int64", [3, 1, 4, 5]),
        "action": ("int32", [1, 2, 3, 0]),
        "timestamp_ms": ("int64", [10, 20, 30, 5]),
        "shop": ("int64", [-1, 8, 9, 2**40]),
    }
    assert store.manifest.vocabulary_sizes == {"user_id": 10, "item_id": 6, "action": 4, "age": 42}
    assert store.manifest.splits["train"].lengths["max"] == 3
    assert isinstance(store.columns["item_id"].base, np.memmap)
    assert repr(store) == (
        f"SequenceStore('{folder}', split='train', 3 rows, 4 events: item_id, action, timestamp_ms, shop; context: age)"
    )


def test_only_items_are_needed_and_rows_are_numbered(folder: Path) -> None:
    store = open_store(folder, "all", columns={"item_id": "movies"})
    assert store.columns["user_id"].tolist() == [0, 1, 2]
    assert store.columns["action"].tolist() == store.columns["timestamp_ms"].tolist() == [0] * 4
    assert repr(store) == f"SequenceStore('{folder}', split='all', 3 rows, 4 events: item_id, action, timestamp_ms)"


def test_timestamps_of_arrow_become_milliseconds(tmp_path: Path) -> None:
    times = pa.array([[datetime.datetime(1970, 1, 2)], None], pa.list_(pa.timestamp("us")))
    pq.write_table(pa.table({"i": pa.array([[1], None], pa.list_(pa.int32())), "t": times}), tmp_path / "a.parquet")
    store = open_store(tmp_path, columns={"item_id": "i", "timestamp_ms": "t"})
    assert store.columns["timestamp_ms"].tolist() == [86_400_000]
    assert store.lengths.tolist() == [1, 0]  # a null list is an empty one


def test_lists_of_a_fixed_size_are_lists(tmp_path: Path) -> None:
    items = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    seconds = pa.array([[0.5, None], None, [1, 2]], pa.list_(pa.float64(), 2))
    pq.write_table(pa.table({"i": items, "s": seconds}), tmp_path / "a.parquet")
    store = open_store(tmp_path, columns={"item_id": "i", "seconds": "s"})
    assert store.lengths.tolist() == [2, 0, 2]
    assert store.columns["item_id"].tolist() == [1, 2, 3, 4]
    assert store.columns["seconds"].tolist() == [0.5, 0, 1, 2]  # a missing number is 0


@given(
    st.lists(st.lists(st.integers(0, 2**40), max_size=5), min_size=1, max_size=30),
    st.integers(1, 7),
    st.integers(1, 4),
)
def test_rows_are_those_of_the_files_in_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], rows_per_file: int, rows_per_group: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for number, first in enumerate(range(0, len(rows), rows_per_file)):
        lists = pa.array(rows[first : first + rows_per_file], pa.list_(pa.int64()))
        pq.write_table(pa.table({"i": lists}), folder / f"{number:03}.parquet", row_group_size=rows_per_group)
    store = open_store(folder, columns={"item_id": "i"})
    items, offsets = store.columns["item_id"], store.offsets
    assert [items[a:b].tolist() for a, b in pairwise(offsets)] == rows
    assert store.columns["user_id"].tolist() == list(range(len(rows)))


def test_the_hash_is_of_the_files_and_the_columns(folder: Path) -> None:
    hashes = {open_store(folder, columns=columns).manifest.content_hash for columns in (COLUMNS, COLUMNS)}
    swapped = COLUMNS | {"timestamp_ms": "shop", "shop": "ts"}
    hashes.add(open_store(folder, columns=swapped).manifest.content_hash)
    assert len(hashes) == 2
    entries = set((folder / ".cache").iterdir())
    _write(folder / "date=2/a.parquet", [ROWS[2] | {"stars": [3]}])
    changed = open_store(folder, columns=COLUMNS)
    assert changed.columns["action"].tolist() == [1, 2, 3, 3]
    assert changed.manifest.content_hash not in hashes
    assert set((folder / ".cache").iterdir()) > entries
    moved = folder.rename(folder.parent / "moved")
    assert open_store(moved, columns=COLUMNS).manifest.content_hash == changed.manifest.content_hash


def _sum(data: bytes, results: "multiprocessing.Queue[tuple[int, int]]") -> None:
    store = pickle.loads(data)
    results.put((int(store.columns["item_id"].sum()), os.stat(store.columns["item_id"].base.filename).st_ino))


def test_other_processes_map_the_same_file(folder: Path) -> None:
    store = open_store(folder, columns=COLUMNS)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, int]] = context.Queue()
    process = context.Process(target=_sum, args=(pickle.dumps(store), results))
    process.start()
    inode = os.stat(store.columns["item_id"].base.filename).st_ino  # type: ignore[union-attr]
    assert results.get(timeout=240) == (13, inode)
    process.join()


def test_a_loader_resumes_exactly(tmp_path: Path) -> None:
    rows = [{"i": [*range(1, 3 + n % 5)], "age": n} for n in range(40)]
    _write(tmp_path / "a.parquet", rows, None)
    config = LoaderConfig(batch_size=4, max_history_length=8)

    def batches(state: dict[str, Any] | None = None, until: int | None = None) -> tuple[list[list[int]], Any]:
        columns = {"item_id": "i", "age": "age"}
        loader = build_loader(open_store(tmp_path, "mine", columns=columns), config, rank=0, world_size=1)
        if state is not None:
            loader.load_state_dict(state)
        taken = [batch.sample_ids.tolist() for batch in islice(loader, until)]
        return taken, loader.state_dict()

    whole, _ = batches()
    first, state = batches(until=3)
    rest, _ = batches(state)
    assert sorted(chain.from_iterable(whole)) == list(range(40))
    assert first + rest == whole


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"item_id": "films"}, "a.parquet has 0 columns 'films'; known: movies, ts, name, floats"),
        ({"item_id": "name"}, "a.parquet: column 'name' (item_id) has no lists; map one that has"),
        ({"item_id": "movies", "timestamp_ms": "ts"}, "a.parquet, row 2: 'movies' has 1 values, 'ts' has 2; the lists"),
        ({"item_id": "ts"}, "column 'ts' (item_id) must have integers, from 0 if they are ids, it has -4; `even"),
        (
            {"item_id": "floats"},
            "column 'floats' (item_id) must have integers, from 0 if they are ids, it has 0 nulls and type double;",
        ),
        (
            {"item_id": "movies", "shop": "name"},
            "column 'name' (shop) must have integers, from 0 if they are ids, it has 0 nulls and",
        ),
    ],
)
def test_a_fault_names_the_file_and_the_column(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    rows = [
        {"movies": [1, 2], "ts": [-4, 5], "name": "a", "floats": [0.5]},
        {"movies": [3], "ts": [6], "name": "b", "floats": []},
        {"movies": [3], "ts": [6, 7], "name": "c", "floats": []},
    ]
    _write(tmp_path / "a.parquet", rows, None, row_group_size=2)
    with pytest.raises(DataError) as raised:
        open_store(tmp_path, columns=columns)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("value", "dtype"), [(1_600_000_001.0, "double"), (-(2.0**24), "double"), (np.inf, "float")])
def test_floats_that_would_be_rounded_or_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: str) -> None:
    columns = {"item_id": "item", "watched": "seen"}
    for values, type_ in (([2.0**24 - 1, 0.1], "double"), ([1_600_000_000.0], "float"), ([value], dtype)):
        seen = pa.array([values], pa.list_(pa.type_for_alias(type_)))
        pq.write_table(pa.table({"item": [[1] * len(values)], "seen": seen}), tmp_path / "a.parquet")
        if values == [value]:
            with pytest.raises(
                DataError, match=r"a\.parquet: column 'seen' \(watched\) has .*, not finite or from 2\^24 on"
            ):
                open_store(tmp_path, columns=columns)
        else:
            assert (
                open_store(tmp_path, columns=columns).columns["watched"].tolist()
                == np.array(values, np.float32).tolist()
            )


def test_columns_need_items_and_a_folder_needs_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"columns must name the column of item_id, they have user_id$"):
        open_store(tmp_path, columns={"user_id": "uid"})
    with pytest.raises(ConfigError, match="no feature can be called 'label'"):
        open_store(tmp_path, columns={"item_id": "movies", "label": "x"})
    with pytest.raises(DataError, match="has no Parquet files; pass a folder"):
        open_store(tmp_path, columns={"item_id": "movies"})
