import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.datasets import open_store

COLUMNS = {"item_id": "movies", "user_id": "uid", "timestamp_ms": "ts", "action": "stars", "shop": "shop", "age": "age"}
ROWS = [
    {"uid": 7, "movies": [3, 1, 4], "ts": [10, 20, 30], "stars": [1, 2, 3], "shop": [-1, 8, 9], "age": 30, "x": "a"},
    {"uid": -5, "movies": [], "ts": [], "stars": [], "shop": [], "age": 0, "x": "b"},
    {"uid": 9, "movies": [5], "ts": [5], "stars": [0], "shop": [2**40], "age": 41, "x": "c"},
]
LISTS = {"ts": pa.list_(pa.int64()), "stars": pa.list_(pa.int8()), "shop": pa.list_(pa.int64())}
SCHEMA = pa.schema(
    {"uid": pa.int64(), "movies": pa.large_list(pa.uint16()), **LISTS, "age": pa.int16(), "x": pa.string()}
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
    known = f"SequenceStore('{folder}', split='train', 3 rows, 4 events: item_id, action, timestamp_ms"
    assert repr(store) == f"{known}, shop; context: age)"
    least = open_store(folder, "all", columns={"item_id": "movies"})
    assert least.columns["user_id"].tolist() == [0, 1, 2]
    assert least.columns["action"].tolist() == least.columns["timestamp_ms"].tolist() == [0] * 4
    assert repr(least) == f"{known})".replace("train", "all")


def test_timestamps_missing_lists_and_lists_of_a_fixed_size_are_read(tmp_path: Path) -> None:
    times = pa.array([[datetime.datetime(1970, 1, 2)] * 2, None, [datetime.datetime(1970, 1, 3)] * 2])
    items = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    seconds = pa.array([[0.5, None], None, [1, 2]], pa.list_(pa.float64(), 2))
    table = pa.table({"i": items, "s": seconds, "t": times.cast(pa.list_(pa.timestamp("us")))})
    pq.write_table(table, tmp_path / "a.parquet")
    store = open_store(tmp_path, columns={"item_id": "i", "seconds": "s", "timestamp_ms": "t"})
    assert store.lengths.tolist() == [2, 0, 2]
    assert store.columns["item_id"].tolist() == [1, 2, 3, 4]
    assert store.columns["seconds"].tolist() == [0.5, 0, 1, 2]  # a missing number is 0
    assert store.columns["timestamp_ms"].tolist() == [86_400_000] * 2 + [2 * 86_400_000] * 2


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
    assert [store.columns["item_id"][a:b].tolist() for a, b in pairwise(store.offsets)] == rows
    assert store.columns["user_id"].tolist() == list(range(len(rows)))


def test_the_hash_is_of_the_files_and_the_columns(folder: Path) -> None:
    swapped = COLUMNS | {"timestamp_ms": "shop", "shop": "ts"}
    hashes = {open_store(folder, columns=names).manifest.content_hash for names in (COLUMNS, COLUMNS, swapped)}
    assert len(hashes) == 2
    _write(folder / "date=2/a.parquet", [ROWS[2] | {"stars": [3]}])
    changed = open_store(folder, columns=COLUMNS)
    assert changed.columns["action"].tolist() == [1, 2, 3, 3]
    assert changed.manifest.content_hash not in hashes
    moved = folder.rename(folder.parent / "moved")
    assert open_store(moved, columns=COLUMNS).manifest.content_hash == changed.manifest.content_hash


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"item_id": "films"}, "a.parquet has 0 columns 'films'; known: movies, ts, name, floats"),
        ({"item_id": "name"}, "a.parquet: column 'name' (item_id) has no lists; map one that has"),
        ({"item_id": "movies", "timestamp_ms": "ts"}, "a.parquet, row 2: 'movies' has 1 values, 'ts' has 2; the lists"),
        ({"item_id": "ts"}, "column 'ts' (item_id) must have integers, from 0 if they are ids, it has -4; `even"),
        (
            {"item_id": "floats"},
            "(item_id) must have integers, from 0 if they are ids, it has 0 nulls and type double;",
        ),
        (
            {"item_id": "movies", "shop": "name"},
            "(shop) must have integers, from 0 if they are ids, it has 0 nulls and",
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
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("values", "dtype", "is_read"),
    [
        ([2.0**24 - 1, 0.1], pa.float64(), True),
        ([1_600_000_000.0], pa.float32(), True),
        ([1_600_000_001.0], pa.float64(), False),
        ([-(2.0**24)], pa.float64(), False),
        ([np.inf], pa.float32(), False),
    ],
)
def test_floats_that_would_be_rounded_or_are_not_finite_are_refused(
    tmp_path: Path, values: list[float], dtype: pa.DataType, is_read: bool
) -> None:
    table = pa.table({"item": [[1] * len(values)], "seen": pa.array([values], pa.list_(dtype))})
    pq.write_table(table, tmp_path / "a.parquet")
    columns = {"item_id": "item", "watched": "seen"}
    if is_read:
        watched = open_store(tmp_path, columns=columns).columns["watched"]
        assert watched.tolist() == np.array(values, np.float32).tolist()
    else:
        fault = r"a\.parquet: column 'seen' \(watched\) has .*, not finite or from 2\^24 on"
        with pytest.raises(DataError, match=fault):
            open_store(tmp_path, columns=columns)
