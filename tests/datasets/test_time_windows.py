from datetime import UTC, datetime
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenrank.datasets import SequenceStore
from evenrank.datasets.event_statistics import DAY_MS
from tests.dataloader.collate.stores import STORE
from tests.datasets.crafted import windows_of


def store_of(times_of_rows: list[list[int]], num_targets: list[int] | None = None) -> SequenceStore:
    times = np.array([time for times in times_of_rows for time in times], dtype=np.int64)
    columns = {"user_id": np.arange(len(times_of_rows)), "timestamp_ms": times}
    return SequenceStore(
        manifest=STORE.manifest,
        split="train",
        offsets=np.cumsum([0, *map(len, times_of_rows)]),
        columns=columns | {name: np.arange(len(times)) for name in ("item_id", "action")},
        num_targets=None if num_targets is None else np.array(num_targets, dtype=np.int32),
    )


@given(
    rows=st.lists(st.lists(st.integers(0, 9).map(lambda half_days: half_days * DAY_MS // 2), max_size=7), max_size=6),
    max_targets=st.integers(1, 4),
    late=st.booleans(),
    data=st.data(),
)
def test_each_event_is_a_target_once_in_its_window_after_all_before_it(
    rows: list[list[int]], max_targets: int, late: bool, data: Any
) -> None:
    rows = [sorted(row) for row in rows] + [[5 * DAY_MS]]
    targets = [data.draw(st.integers(0, len(row))) for row in rows] if data.draw(st.booleans()) else None
    store = store_of(rows, targets)
    windows = windows_of(store, max_targets, every="1d", start="1970-01-03" if late else None, within="time")
    start, seen = 2 * DAY_MS if late else windows.start_ms, list[int]()
    for index in range(windows.count + 1):
        (cut,) = windows.of_epoch(index, [store])
        firsts = []
        for row, begin, end, count in zip(*cut.slices, cut.num_targets, strict=True):  # type: ignore[misc,arg-type]
            assert 1 <= count <= max_targets
            assert begin == store.offsets[row]
            times = store.columns["timestamp_ms"][end - count : end].tolist()
            assert all(start + index * DAY_MS <= time < start + (index + 1) * DAY_MS for time in times)
            seen += range(end - count, end)
            firsts.append(times[0])
        assert firsts == sorted(firsts)
    assert sorted(seen) == [
        event
        for row, times in enumerate(rows)
        for event, time in enumerate(times, int(store.offsets[row]))
        if time >= start and (targets is None or event >= store.offsets[row + 1] - targets[row])
    ]


def test_windows_begin_at_multiples_of_their_length_or_at_the_start() -> None:
    store = store_of([[DAY_MS + 5], [], [3 * DAY_MS, 15 * DAY_MS]])
    days = windows_of(store, every="1d")
    assert (days.count, days.times(1)) == (15, (datetime(1970, 1, 3, tzinfo=UTC), datetime(1970, 1, 4, tzinfo=UTC)))
    weeks = windows_of(store, every="1w")
    assert (weeks.start_ms, weeks.count) == (0, 3)
    late = windows_of(store, every="12h", start="1970-01-15T06:00+06:00")
    assert (late.start_ms, late.count) == (14 * DAY_MS, 3)
