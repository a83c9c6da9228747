"""Times of events that evenrank did not sort: in order and in milliseconds, or refused with row and column."""

import pickle
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path

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
from tests.datasets.crafted import windows_of

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
        as_is = None if faulty else open_store(folder, columns=COLUMNS).manifest.content_hash
        store = pickle.loads(pickle.dumps(open_store(folder, columns=COLUMNS, sort_by_time=True)))
        assert store.manifest.content_hash != as_is
        ends = np.cumsum([0, *map(len, times)]).tolist()
        numbered = [*enumerate(chain.from_iterable(times))]
        rows = [sorted(numbered[begin:end], key=lambda event: event[1]) for begin, end in pairwise(ends)]
        events = zip(store.columns["item_id"].tolist(), store.columns["timestamp_ms"].tolist(), strict=True)
        assert list(events) == [*chain.from_iterable(rows)]
        assert store.offsets.tolist() == ends


@pytest.mark.parametrize("door", DOORS)
def test_integers_in_another_unit_are_refused_and_timestamps_in_any_are_read(door: str, tmp_path: Path) -> None:
    days, factors = [FIRST_DAY, FIRST_DAY + DAY_MS], {"s": 0.001, "us": 1000, "ns": 1_000_000}
    in_units = {unit: [int(day * factor) for day in days] for unit, factor in factors.items()}
    in_units["s, then ms"] = [days[0] // 1000, days[1]]  # some producers write seconds, others milliseconds
    for unit, times in in_units.items():
        shown = f"{times[0]}, 2020-09-13 in {unit.partition(',')[0]}; store milliseconds"
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


def test_sorted_rows_have_the_windows_of_sorted_files(tmp_path: Path) -> None:
    _write(_table([[FIRST_DAY + day * DAY_MS for day in (0, 2, 1, 3)]]), tmp_path)
    store = open_store(tmp_path, columns=COLUMNS, sort_by_time=True)
    windows = windows_of(store, every="1d")
    cut = [windows.of_epoch(index, [store])[0] for index in range(windows.count)]
    assert [store.columns["item_id"][of_day.ends - 1].tolist() for of_day in cut] == [[0], [2], [1], [3]]
    assert [of_day.begins.tolist() for of_day in cut] == [[0]] * 4
    assert store.columns["user_id"].tolist() == [0]
