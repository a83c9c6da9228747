from typing import Any

from evenrank.datasets.event_statistics import Statistics

FIELDS: dict[str, Any] = {"split": "user:0.3", "by": "user", "events": {"train": 9_000, "eval": 1_000}, "users": 300}
FIELDS |= {"first_ms": -1, "last_ms": 86_399_999, "largest_day_ms": 0, "largest_day_events": 9_999, "items": 20}
FIELDS |= {"hours_of_day": [6_000, *[0] * 22, 4_000], "bin_start_ms": 0, "bin_width_ms": 86_400_000, "bins": [1, 9_999]}
FIELDS |= {"ranks": [1, 20], "ranks_events": [7_500, 1], "top_events": 7_500, "early_eval_events": 0, "eval_items": 10}
FIELDS |= {"cold_items": 0, "cold_item_events": 0, "eval_users": 90, "cold_users": 90}


def test_statistics_are_described_in_words() -> None:
    assert Statistics(**FIELDS).describe() == {
        "events": "10,000, each counted once",
        "users": "300",
        "items": "20",
        "density": "167 % of users x items",
        "time": "1969-12-31 23:59:59 to 1970-01-01 23:59:59 UTC",
        "events per day": "5,000 on average, 9,999 on the busiest, 1970-01-01",
        "events per hour": "208 on average, most from 00:00 to 00:59 UTC, 60.0 %",
        "popularity": "75.0 % of events have one of the most popular 1 % of items",
        "eval events": "1,000 (10.0 %)",
        "eval events before the newest train event": "0 (expected: the split is by user, not by time)",
        "cold items of eval": "0 of 10, in 0 or 0.0 % of its events (expected: rare items)",
        "cold users of eval": "90 of 90 (expected: the split is by user)",
    }
