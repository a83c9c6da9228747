"""Files and tables that evenrank did not write: their columns, and times in order and in milliseconds, or refused."""

import pickle
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.datasets import FolderLog, SequenceStore, describe_log, open_store
from evenrank.datasets.continuous_log import rows_of_table
from evenrank.datasets.event_statistics import DAY_MS

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


def test_any_folder_of_lists_is_opened_by_the_names_of_its_columns(tmp_path: Path) -> None:
    folder = tmp_path / "lake"
    _write(folder / "date=2/a.parquet", ROWS[2:])
    _write(folder / "date=1/b.parquet", ROWS[:2], row_group_size=1)  # read in the order of paths
    (folder / "_temporary").mkdir()
    (folder / "_temporary/c.parquet").write_bytes(b"not written yet")
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
    known = f"SequenceStore('{folder}', split='train', 3 rows, 4 events: item_id, action, timestamp_ms"
    assert repr(store) == f"{known}, shop; context: age)"
    least = open_store(folder, columns={"item_id": "movies"})
    assert least.columns["action"].tolist() == least.columns["timestamp_ms"].tolist() == [0] * 4
    assert repr(least) == f"{known})"
    # The hash is of the files and the columns, wherever they are.
    swapped = open_store(folder, columns=COLUMNS | {"timestamp_ms": "shop", "shop": "ts"})
    _write(folder / "date=2/a.parquet", [ROWS[2] | {"stars": [3]}])
    changed = open_store(folder, columns=COLUMNS)
    assert changed.columns["action"].tolist() == [1, 2, 3, 3]
    moved = open_store(folder.rename(tmp_path / "moved"), columns=COLUMNS)
    assert len({each.manifest.content_hash for each in (store, swapped, changed, moved)}) == 3
    assert moved.manifest.content_hash == changed.manifest.content_hash


TIMED = {"item_id": "item_id", "timestamp_ms": "timestamp_ms"}
MANIFEST = describe_log({"item_id": 1000})
FIRST_DAY = 1_600_000_000_000 // DAY_MS * DAY_MS  # 2020-09-13
DAYS = [FIRST_DAY, FIRST_DAY + DAY_MS]


def _table(times: Sequence[Sequence[int]], dtype: pa.DataType | None = None) -> pa.Table:
    """Return rows whose items number the events."""
    number = count()
    items = pa.array([[next(number) for _ in of_row] for of_row in times], pa.list_(pa.int64()))
    return pa.table({"item_id": items, "timestamp_ms": pa.array(times, pa.list_(dtype or pa.int64()))})


def _open(door: str, table: pa.Table, folder: Path) -> SequenceStore:
    if door == "table":
        return rows_of_table(table, MANIFEST, "topic")
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    log = FolderLog(folder, MANIFEST)
    return open_store(folder, columns=TIMED) if door == "folder" else log.read(0, log.end().position)


def _times(door: str, table: pa.Table, folder: Path) -> list[int]:
    times: list[int] = _open(door, table, folder).columns["timestamp_ms"].tolist()
    return times


doors = pytest.mark.parametrize("door", ["folder", "log", "table"])


@doors
@given(times=st.lists(st.lists(st.integers(0, 3).map(lambda day: FIRST_DAY + day * DAY_MS), max_size=3), max_size=4))
def test_rows_are_read_if_their_times_ascend_and_else_the_first_that_does_not_is_named(
    door: str, times: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, table = tmp_path_factory.mktemp("rows"), _table(times)
    if faulty := [row for row, of_row in enumerate(times) if of_row != sorted(of_row)]:
        with pytest.raises(DataError, match=rf", row {faulty[0]}: 'timestamp_ms' goes back from \d+ to \d+; sort"):
            _open(door, table, folder)
    else:
        assert _times(door, table, folder) == [*chain.from_iterable(times)]
    if door == "folder":
        store = pickle.loads(pickle.dumps(open_store(folder, columns=TIMED, sort_by_time=True)))
        assert faulty or store.manifest.content_hash != open_store(folder, columns=TIMED).manifest.content_hash
        rows = np.repeat(np.arange(len(times)), store.lengths).tolist()
        found = zip(rows, store.columns["timestamp_ms"].tolist(), store.columns["item_id"].tolist(), strict=True)
        events = enumerate((row, time) for row, of_row in enumerate(times) for time in of_row)
        assert [*found] == sorted((row, time, item) for item, (row, time) in events)


@doors
def test_integers_in_another_unit_are_refused_and_timestamps_in_any_are_read(door: str, tmp_path: Path) -> None:
    in_units = {"s": [day // 1000 for day in DAYS], "us": [day * 1000 for day in DAYS]}
    in_units |= {"ns": [day * 1_000_000 for day in DAYS], "s, then ms": [DAYS[0] // 1000, DAYS[1]]}  # as some write
    for unit, times in in_units.items():
        shown = f"{times[0]}, 2020-09-13 in {unit.partition(',')[0]}; store milliseconds"
        with pytest.raises(DataError, match=rf", row 2: 'timestamp_ms' has {shown}"):
            _open(door, _table([[], [5], times]), tmp_path)
        if "," not in unit:
            assert _times(door, _table([[], [], times], pa.timestamp(unit)), tmp_path) == DAYS
    hours = [hour * DAY_MS // 24 for hour in range(50)]  # counted from 0, by programs that know no dates
    early = [400 * DAY_MS // 10, 40 * DAY_MS]  # 1970, and said to be
    for times, dtype in ((hours, None), (early, pa.timestamp("ms"))):
        assert _times(door, _table([times], dtype), tmp_path) == times
    for time in (-(2**62), 253_402_300_800_000):
        with pytest.raises(DataError, match="store milliseconds since 1970"):
            _open(door, _table([[time]], pa.timestamp("ms")), tmp_path)
