import tempfile
from collections import Counter, defaultdict
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.event_statistics import DAY_MS, read_statistics
from evenrank.preprocess import Filters, job
from tests.preprocess.decoded import number, read_rows

HOUR = 3600
Event = tuple[int, int, int]  # user, item, seconds since 1970
EVENTS = st.tuples(st.integers(1, 8), st.sampled_from([0, 1, 2, 3, 2**40]), st.integers(0, 100 * HOUR))
SPLITS = ("user:0.4", "user:0", "user:1", "leave-last:1", "leave-last:3", f"time:{40 * HOUR}", "time:0", "none")
FILTERS = (Filters(), Filters(window=3), Filters(window=2, stride=1), Filters(window=4, stride=1, min_length=2))


def _expected(events: list[Event], split: str, filters: Filters, eval_users: set[int]) -> dict[str, Any]:
    """Count events one by one: `eval_users` are those of the split by user."""
    histories = defaultdict(list)
    for event in sorted(events, key=lambda event: event[2]):
        histories[event[0]].append(event)
    kind, _, argument = split.partition(":")
    train, targets = list[Event](), list[Event]()
    for user, history in histories.items():
        first_target = num_events = len(history)
        if num_events < filters.min_length:
            continue
        if kind == "user" and user in eval_users:
            first_target = 0
        elif kind == "leave-last" and num_events > int(argument):
            first_target -= int(argument)
        elif kind == "time":
            first_target = sum(time < int(argument) for _, _, time in history)
        train, targets = train + history[:first_target], targets + history[first_target:]
    kept, newest = train + targets, max((time for _, _, time in train), default=-1)
    per_item = sorted(Counter(item for _, item, _ in kept).values())
    times = [datetime.fromtimestamp(time, tz=UTC) for _, _, time in kept]
    (trained_users, trained_items), (users, items) = (
        [{event[place] for event in of} for place in (0, 1)] for of in (train, targets)
    )
    (largest_day, largest), *_ = sorted(Counter(time.date() for time in times).items(), key=lambda day: (-day[1], day))
    return {
        "split": split,
        "events": {"train": len(train)} | ({} if kind == "none" else {"eval": len(targets)}),
        "users": len(trained_users | users),
        "items": len(per_item),
        "first_ms": min(times).timestamp() * 1000,
        "last_ms": max(times).timestamp() * 1000,
        "largest_day_ms": (largest_day - datetime(1970, 1, 1).date()).days * DAY_MS,
        "largest_day_events": largest,
        "hours_of_day": [sum(time.hour == hour for time in times) for hour in range(24)],
        "top_events": sum(per_item[-ceil(len(per_item) / 100) :]),
        "early_eval_events": sum(time < newest for _, _, time in targets),
        "eval_items": len(items),
        "cold_items": len(items - trained_items),
        "cold_item_events": sum(item not in trained_items for _, item, _ in targets),
        "eval_users": len(users),
        "cold_users": len(users - trained_users),
    }


@settings(max_examples=30)
@given(
    st.lists(EVENTS, min_size=1, max_size=60),
    st.sampled_from(SPLITS),
    st.sampled_from(FILTERS),
    st.sampled_from([5, 10**6]),
)
def test_every_event_is_counted_once(events: list[Event], split: str, filters: Filters, per_bucket: int) -> None:
    events += [(9, 1, 0), (9, 1, 1)]  # a user whom no filter leaves out
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "EVENTS_PER_BUCKET", per_bucket)
        patched.setattr(job, "EVENTS_PER_FILE", per_bucket)
        (log := Path(name, "log.csv")).write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in events))
        options: dict[str, Any] = {"split": split, "filters": filters, "ids": "keep", "allow_empty": True}
        statistics = read_statistics(number(Path(name, "out"), log, log={"timestamp_unit": "s"}, **options))
        eval_users = {row["user_id"] for row in read_rows(Path(name, "out", "eval"))}
    expected = _expected(events, split, filters, eval_users)
    assert {field: getattr(statistics, field) for field in expected} == expected
    assert statistics.bin_width_ms == HOUR * 1000
    assert 0 <= statistics.first_ms - statistics.bin_start_ms < HOUR * 1000
    assert sum(statistics.bins) == sum(statistics.ranks_events) == sum(expected["events"].values())
    assert statistics.ranks == list(range(1, statistics.items + 1))
