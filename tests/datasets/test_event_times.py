"""Times of events that evenrank did not sort: in order and in milliseconds, or refused with row and column."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
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
from evenrank.datasets.schema import read_manifest
from evenrank.datasets.stream import open_stream
from tests.datasets.crafted import change_table, copy_dataset, set_columns, windows_of

COLUMNS = {"item_id": "item_id", "timestamp_ms": "timestamp_ms"}
MANIFEST = describe_log({"item_id": 1000})
FIRST_DAY = 1_600_000_000_000 // DAY_MS * DAY_MS  # 2020-09-13


def _table(times: Sequence[Sequence[int]], dtype: pa.DataType | None = None) -> pa.Table:
    """Return rows whose items number the events."""
    ends = np.cumsum([0, *map(len, times)]).tolist()
    items = pa.array([[*range(*ends_of_row)] for ends_of_row in pairwise(ends)], pa.list_(pa.int64()))
    return pa.table({"item_id": items, "timestamp_ms": pa.array(times, pa.list_(dtype or pa.int64()))})


def _read_log(table: pa.Table, folder: Path) -> SequenceStore:
    log = FolderLog(_write(table, folder), MANIFEST)
    return log.read(0, log.end().position)


def _write(table: pa.Table, folder: Path) -> Path:
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder


DOORS: dict[str, Callable[[pa.Table, Path], SequenceStore]] = {
    "folder": lambda table, folder: open_store(_write(table, folder), columns=COLUMNS),
    "log": _read_log,
    "table": lambda table, _: rows_of_table(table, MANIFEST, "topic"),
}


@pytest.mark.parametrize("door", DOORS)
@given(times=st.lists(st.lists(st.integers(0, 3).map(lambda day: FIRST_DAY + day * DAY_MS), max_size=3), max_size=4))
def test_rows_are_read_if_their_times_ascend_and_else_the_first_that_does_not_is_named(
    door: str, times: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    faulty = [row for row, of_row in enumerate(times) if of_row != sorted(of_row)]
    if not faulty:
        assert DOORS[door](_table(times), folder).columns["timestamp_ms"].tolist() == [*chain.from_iterable(times)]
    else:
        with pytest.raises(DataError, match=rf", row {faulty[0]}: 'timestamp_ms' goes back from \d+ to \d+; sort"):
            DOORS[door](_table(times), folder)
    if door == "folder":
        store = open_store(folder, columns=COLUMNS, sort_by_time=True)
        ends = np.cumsum([0, *map(len, times)]).tolist()
        numbered = [*enumerate(chain.from_iterable(times))]
        rows = [sorted(numbered[begin:end], key=lambda event: event[1]) for begin, end in pairwise(ends)]
        events = zip(store.columns["item_id"].tolist(), store.columns["timestamp_ms"].tolist(), strict=True)
        assert list(events) == [*chain.from_iterable(rows)]
        assert store.offsets.tolist() == ends


@pytest.mark.parametrize("door", DOORS)
def test_integers_in_another_unit_are_refused_and_timestamps_in_any_are_read(door: str, tmp_path: Path) -> None:
    days = [FIRST_DAY, FIRST_DAY + DAY_MS]
    in_units = {
        "s": [day // 1000 for day in days],
        "us": [1000 * day for day in days],
        "ns": [10**6 * day for day in days],
    }
    in_units["s, then ms"] = [days[0] // 1000, days[1]]  # some producers write seconds, others milliseconds
    for unit, times in in_units.items():
        shown = f"{times[0]}, 2020-09-13 in {unit[:2].rstrip(',')}; store milliseconds"
        with pytest.raises(DataError, match=rf", row 2: 'timestamp_ms' has {shown}"):
            DOORS[door](_table([[], [5], times]), tmp_path)
        if "," not in unit:
            stored = DOORS[door](_table([[], [], times], pa.timestamp(unit)), tmp_path)
            assert stored.columns["timestamp_ms"].tolist() == days
    hours = [hour * DAY_MS // 24 for hour in range(50)]  # counted from 0, by programs that know no dates
    early = [400 * DAY_MS // 10, 40 * DAY_MS]  # 1970, and said to be
    for times, dtype in ((hours, None), (early, pa.timestamp("ms"))):
        assert DOORS[door](_table([times], dtype), tmp_path).columns["timestamp_ms"].tolist() == times
    for time in (-(2**62), 253_402_300_800_000):
        with pytest.raises(DataError, match="store milliseconds since 1970"):
            DOORS[door](_table([[time]], pa.timestamp("ms")), tmp_path)


def test_a_followed_dataset_may_begin_in_1970(small_dataset: Path) -> None:
    manifest, table = read_manifest(small_dataset), pq.read_table(small_dataset / "train")
    times = [[400_000_000 + 1000 * event for event in range(len(row))] for row in table["item_id"].to_pylist()]
    table = set_columns({"timestamp_ms": pa.array(times, pa.list_(pa.int64()))})(table)
    with pytest.raises(DataError, match="has 400000000, 1982-09-04 in s"):
        rows_of_table(table, manifest, "here")
    statistics: dict[str, Any] = manifest.options["statistics"] | {"first_ms": 0}  # as of --timestamp-unit row
    manifest = replace(manifest, options={**manifest.options, "statistics": statistics})
    assert rows_of_table(table, manifest, "here").columns["timestamp_ms"].tolist() == [*chain.from_iterable(times)]


def test_a_dataset_whose_files_were_changed_is_refused_when_it_is_unpacked_and_streamed(
    small_dataset: Path, tmp_path: Path
) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "data")

    def newest_first(table: pa.Table) -> pa.Table:
        times = [row[::-1] for row in table["timestamp_ms"].to_pylist()]
        return set_columns({"timestamp_ms": pa.array(times, pa.list_(pa.int64()))})(table)

    change_table(dataset, newest_first)
    for read in (open_store, lambda path: open_stream(path, "train").read(0, 50)):
        with pytest.raises(DataError, match=r"part-00000\.parquet, row \d+ of row group 0: 'timestamp_ms' goes back"):
            read(dataset)


def test_sorted_rows_are_other_data_and_have_the_windows_of_sorted_files(tmp_path: Path) -> None:
    folder = _write(_table([[FIRST_DAY + day * DAY_MS for day in (0, 1, 2, 3)]]), tmp_path)
    as_is, by_time = (open_store(folder, columns=COLUMNS, sort_by_time=sort) for sort in (False, True))
    assert as_is.manifest.content_hash != by_time.manifest.content_hash
    _write(_table([[FIRST_DAY + day * DAY_MS for day in (0, 2, 1, 3)]]), tmp_path)
    store = pickle.loads(pickle.dumps(open_store(folder, columns=COLUMNS, sort_by_time=True)))
    windows = windows_of(store, every="1d")
    cut = [windows.of_epoch(index, [store])[0] for index in range(windows.count)]
    assert [store.columns["item_id"][of_day.ends - 1].tolist() for of_day in cut] == [[0], [2], [1], [3]]
    assert [of_day.begins.tolist() for of_day in cut] == [[0]] * 4
    assert store.columns["user_id"].tolist() == [0]
