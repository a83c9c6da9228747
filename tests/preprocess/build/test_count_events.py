import tempfile
from collections import Counter, defaultdict
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.event_statistics import DAY_MS, Statistics, read_statistics
from evenrank.preprocess import Filters, PreprocessConfig, TabularConfig, job, preprocess
from tests.preprocess.decoded import read_rows

HOUR = 3600
Event = tuple[int, int, int]  # user, item, seconds since 1970
SPLITS = ("user:0.4", "user:0", "user:1", "leave-last:1", "leave-last:3", f"time:{40 * HOUR}", "time:0", "none")
FILTERS = (Filters(), Filters(window=3), Filters(window=2, stride=1), Filters(window=4, stride=1, min_length=2))


def _preprocess(folder: Path, events: list[Event], split: str, filters: Filters = FILTERS[0]) -> Statistics:
    log = folder / "log.csv"
    log.write_text("user_id,item_id,timestamp\n" + "".join(f"{user},{item},{time}\n" for user, item, time in events))
    custom = TabularConfig(events=(log,), timestamp_unit="s", timestamp_column="timestamp")
    options: dict[str, Any] = {"custom": custom, "split": split, "filters": filters, "ids": "keep", "allow_empty": True}
    return read_statistics(preprocess(PreprocessConfig(dataset="custom", out=folder / "out", **options)))


def _expected(events: list[Event], split: str, filters: Filters, eval_users: set[int]) -> dict[str, Any]:
    """Count events one by one: `eval_users` are those of the split by user."""
    histories = defaultdict(list)
    for event in sorted(events, key=lambda event: event[2]):
        histories[event[0]].append(event)
    kind, _, argument = split.partition(":")
    train, targets = [], []
    for user, history in histories.items():
        if len(history) < filters.min_length:
            continue
        first_target = len(history)
        if kind == "user" and user in eval_users:
            first_target = 0
        elif kind == "leave-last" and len(history) > int(argument):
            first_target = len(history) - int(argument)
        elif kind == "time":
            first_target = sum(time < int(argument) for _, _, time in history)
        train += history[:first_target]
        targets += history[first_target:]
    kept = train + targets
    items = sorted(Counter(item for _, item, _ in kept).values())
    times = [datetime.fromtimestamp(time, tz=UTC) for _, _, time in kept]
    trained_users, trained_items = ({event[place] for event in train} for place in (0, 1))
    (largest_day, largest), *_ = sorted(Counter(time.date() for time in times).items(), key=lambda day: (-day[1], day))
    newest = max((time for _, _, time in train), default=-1)
    return {
        "split": split,
        "events": {"train": len(train)} | ({} if kind == "none" else {"eval": len(targets)}),
        "users": len({user for user, _, _ in kept}),
        "items": len(items),
        "first_ms": min(times).timestamp() * 1000,
        "last_ms": max(times).timestamp() * 1000,
        "largest_day_ms": (largest_day - datetime(1970, 1, 1).date()).days * 24 * HOUR * 1000,
        "largest_day_events": largest,
        "hours_of_day": [sum(time.hour == hour for time in times) for hour in range(24)],
        "top_events": sum(items[-ceil(len(items) / 100) :]),
        "early_eval_events": sum(time < newest for _, _, time in targets),
        "eval_items": len({item for _, item, _ in targets}),
        "cold_items": len({item for _, item, _ in targets} - trained_items),
        "cold_item_events": sum(item not in trained_items for _, item, _ in targets),
        "eval_users": len({user for user, _, _ in targets}),
        "cold_users": len({user for user, _, _ in targets} - trained_users),
    }


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from([0, 1, 2, 3, 2**40]), st.integers(0, 100 * HOUR)),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from(SPLITS),
    st.sampled_from(FILTERS),
    st.sampled_from([5, 10**6]),
)
def test_every_event_is_counted_once(events: list[Event], split: str, filters: Filters, per_bucket: int) -> None:
    events += [(9, 1, 0), (9, 1, 1)]  # a user whom no filter leaves out
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "EVENTS_PER_BUCKET", per_bucket)
        patched.setattr(job, "EVENTS_PER_FILE", per_bucket)
        statistics = _preprocess(Path(name), events, split, filters)
        eval_users = {row["user_id"] for row in read_rows(Path(name, "out", "eval"))}
    expected = _expected(events, split, filters, eval_users)
    assert {field: getattr(statistics, field) for field in expected} == expected
    start, hours = statistics.bin_start_ms // 1000, statistics.bin_width_ms // 1000
    assert hours == HOUR
    assert sum(statistics.bins) == sum(expected["events"].values())
    assert start <= statistics.first_ms // 1000 < start + hours
    assert statistics.ranks == list(range(1, statistics.items + 1))
    assert sum(statistics.ranks_events) == sum(statistics.bins)


@pytest.mark.parametrize(
    ("days", "width_days"),
    [(0, 1 / 24), (4, 1 / 24), (5, 1), (300, 7), (8000, 91), (145_600, 3640), (2_915_000, 36_400)],
)
def test_the_width_of_time_bins_suits_the_range(tmp_path: Path, days: int, width_days: float) -> None:
    begin = 13_000 * 24 * HOUR  # in 2005
    statistics = _preprocess(tmp_path, [(1, 1, begin), (1, 2, begin + days * 24 * HOUR)], "none")
    assert statistics.bin_width_ms == width_days * DAY_MS
    assert (sum(statistics.bins), len(statistics.bins) <= 120) == (2, True)
    assert statistics.bins[0] == statistics.bins[-1] == (1 if days else 2)
