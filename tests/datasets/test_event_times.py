"""Times of events that evenrank did not sort: in order and in milliseconds, or refused with row and column."""

import pickle
from collections.abc import Sequence
from itertools import chain, count
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

COLUMNS = {"item_id": "item_id", "timestamp_ms": "timestamp_ms"}
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
    return open_store(folder, columns=COLUMNS) if door == "folder" else log.read(0, log.end().position)


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
        store = pickle.loads(pickle.dumps(open_store(folder, columns=COLUMNS, sort_by_time=True)))
        assert faulty or store.manifest.content_hash != open_store(folder, columns=COLUMNS).manifest.content_hash
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
