"""Which events are targets, and in what order, against a plain reading of the events, one at a time."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets import SequenceStore, permute, slices
from evenrank.datasets.event_statistics import DAY_MS
from evenrank.datasets.slices import Targets
from tests.dataloader.collate.stores import STORE
from tests.datasets.crafted import windows_of

HALF_DAY_MS = DAY_MS // 2


class Event(NamedTuple):
    time: int
    """In half days."""
    action: int
    price: float
    user: int = 0
    sex: int = 0


def fraction(user: int, salt: int) -> float:
    """The finalizer of SplitMix64, in integers of any size."""
    word = (user + 0x9E3779B97F4A7C15 + salt) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return ((word ^ (word >> 31)) >> 11) / 2**53


CONDITIONS: dict[str | None, Callable[[Event], bool]] = {
    None: lambda event: True,
    "action in (1, 4)": lambda event: event.action in (1, 4),
    "price >= 0.5 or action == 2": lambda event: event.price >= 0.5 or event.action == 2,
    "sex == 1 and not action == 0": lambda event: event.sex == 1 and event.action != 0,
    "fraction(user_id, 7) < 0.5": lambda event: fraction(event.user, 7) < 0.5,
    "action * 1000000000 > 2500000000": lambda event: event.action > 2,  # beyond int32
    "timestamp_ms // 43200000 % 2 == 0": lambda event: event.time % 2 == 0,
    "1 > 2": lambda event: False,
}
EVENTS = st.builds(Event, st.integers(0, 9), st.integers(0, 4), st.sampled_from((0.25, 0.5, math.nan)))
ROWS = st.lists(st.tuples(st.integers(-5, 50), st.integers(0, 2), st.lists(EVENTS, max_size=8)), max_size=6)


def store_of(rows: list[list[Event]], num_targets: list[int] | None) -> SequenceStore:
    events = [event for row in rows for event in row]
    columns: dict[str, Any] = {
        "user_id": np.array([row[0].user if row else 99 for row in rows], dtype=np.int64),
        "sex": np.array([row[0].sex if row else 0 for row in rows], dtype=np.int64),
        "age": np.zeros(len(rows), dtype=np.int64),
        "item_id": np.arange(len(events)),
        "action": np.array([event.action for event in events], dtype=np.int32),
        "price": np.array([event.price for event in events], dtype=np.float32),
        "timestamp_ms": np.array([event.time * HALF_DAY_MS for event in events], dtype=np.int64),
    }
    return replace(
        STORE,
        manifest=replace(STORE.manifest, extra_events={"price": "float32?"}),
        offsets=np.cumsum([0, *map(len, rows)]),
        columns=columns,
        num_targets=None if num_targets is None else np.array(num_targets, dtype=np.int32),
    )


Sample = tuple[int, int, int, int]  # row, begin, end, number of targets


def samples_of(store: SequenceStore) -> list[Sample]:
    assert store.slices is not None
    assert store.num_targets is not None
    return list(zip(*(values.tolist() for values in (*store.slices, store.num_targets)), strict=True))


@pytest.mark.parametrize("where", CONDITIONS)
def test_targets_are_those_of_a_plain_reading_all_at_once_and_by_window(where: str | None) -> None:
    @settings(max_examples=30)
    @given(
        ROWS,
        st.integers(0, 3),
        st.sampled_from(("shuffle", "time", "user")),
        st.sampled_from((None, "first", "1970-01-03")),
        st.integers(1, 9),
        st.data(),
    )
    def of_rows(drawn: Any, min_history: int, within: Any, start: str | None, events_at_once: int, data: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slices, "_EVENTS_AT_ONCE", events_at_once)
            check_targets(drawn, {"where": where, "min_history": min_history, "within": within}, start, data)

    of_rows()


def check_targets(
    drawn: list[tuple[int, int, list[Event]]], options: dict[str, Any], start: str | None, data: Any
) -> None:
    rows = [
        sorted((event._replace(user=user, sex=sex) for event in events), key=lambda event: event.time)
        for user, sex, events in [*drawn, (8, 1, [Event(7, 4, 0.5)])]
    ]
    targets = [data.draw(st.integers(0, len(row))) for row in rows] if data.draw(st.booleans()) else None
    store = store_of(rows, targets)
    expected: list[tuple[int, Sample]] = []  # with times
    for row, events in enumerate(rows):
        begin, first = int(store.offsets[row]), 0 if targets is None else len(events) - targets[row]
        for index, event in enumerate(events):
            if index >= max(first, options["min_history"]) and CONDITIONS[options["where"]](event):
                expected.append((event.time * HALF_DAY_MS, (row, begin, begin + index + 1, 1)))

    def ordered(found: list[tuple[int, Sample]]) -> list[Sample]:
        return [one for _, one in (sorted(found) if options["within"] == "time" else found)]

    if not expected:
        line = "^no event in the split 'train' of the dataset is a target with where=.*; choose others$"
        with pytest.raises(ValueError, match=line):
            Targets(**options).open(store, lambda opened: opened, 1)
        return
    _, (cut,) = Targets(**options).open(store, lambda opened: opened, 1)
    assert samples_of(cut) == ordered(expected)
    start_ms = {None: None, "first": min(expected)[0], "1970-01-03": 2 * DAY_MS}[start]
    left = [each for each in expected if start_ms is None or each[0] >= start_ms]
    if not left and (options["where"] or options["min_history"]):
        with pytest.raises(ValueError, match=r"^no event in the split 'train'"):
            windows_of(store, every="1d", start=start, **options)
        return
    windows = windows_of(store, every="1d", start=start, **options)
    assert start_ms in (None, windows.start_ms)
    for index in range(windows.count + 1):
        begin_ms, end_ms = windows.begin(index), windows.begin(index + 1)
        (cut,) = windows.of_epoch(index, [store])
        assert samples_of(cut) == ordered([each for each in left if begin_ms <= each[0] < end_ms])
    assert all(time < windows.begin(windows.count) for time, _ in left)


def test_targets_without_a_filter_may_share_samples() -> None:
    store = store_of([[Event(time, 0, 0.5) for time in range(5)], [], [Event(9, 0, 0.5)]], None)
    _, (cut,) = Targets(within="time").open(store, lambda opened: opened, 2)
    assert samples_of(cut) == [(0, 0, 2, 2), (0, 0, 4, 2), (0, 0, 5, 1), (2, 5, 6, 1)]


@given(st.integers(1, 300), st.integers(1, 400), st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000))
def test_samples_stay_in_their_segments_wherever_the_order_is_asked(
    num_samples: int, size: int, seed: int, epoch: int
) -> None:
    options: Any = {"seed": seed, "epoch": epoch}
    order = permute(np.arange(num_samples), num_samples, segment_size=size, **options)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    assert np.array_equal(order // size, np.arange(num_samples) // size)
    some = np.array([num_samples - 1, 0, num_samples // 2])
    assert np.array_equal(permute(some, num_samples, segment_size=size, **options), order[some])
    first = min(size, num_samples)
    assert np.array_equal(order[:first], permute(np.arange(first), first, **options))


def test_segments_are_shuffled_differently() -> None:
    of_epochs = [
        permute(np.arange(4000), 4000, segment_size=1000, seed=3, epoch=epoch).reshape(4, 1000) for epoch in (0, 1)
    ]
    shuffled = [segment % 1000 for order in of_epochs for segment in order]
    agreeing = [np.count_nonzero(a == b) for i, a in enumerate(shuffled) for b in shuffled[:i]]
    assert max(agreeing) < 10  # two independent permutations agree at about one position
