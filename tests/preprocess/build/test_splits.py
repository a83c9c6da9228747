"""Filters, boundaries of splits by time, and which users a split by user takes."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.preprocess import Filters, preprocess
from evenrank.preprocess.build.buckets import Buckets, num_range_bits, write_run
from evenrank.preprocess.build.sequences import build_sequences
from evenrank.preprocess.build.splits import SplitFacts, k_core, keep_lengths, parse_split
from evenrank.preprocess.engine import threads
from tests.preprocess.decoded import read_rows, synthetic

HOUR, YEAR_2015 = 3_600_000, 1_420_070_400_000
BOUNDARIES = {
    "2015": YEAR_2015,
    "2015-02": YEAR_2015 + 31 * 24 * HOUR,
    "2015-01-06": YEAR_2015 + 5 * 24 * HOUR,
    "20150106": YEAR_2015 + 5 * 24 * HOUR,
    "2015-01-06T12:30:00": YEAR_2015 + 5 * 24 * HOUR + 45_000_000,
    "2015-01-06T12:30:00.5+01:00": YEAR_2015 + 5 * 24 * HOUR + 41_400_500,
    **dict.fromkeys(("1420070400", "1420070400000", "1420070400000000", "1420070400000000000"), YEAR_2015),
    "100": 100_000,
    "21000101": 21_000_101_000,  # seconds: dates are of 1900 to 2099
    # The last days exclude the moment at which they begin, given an event at 2015.
    **dict.fromkeys(("last:7d", "last:168h", "last:1w"), YEAR_2015 - 7 * 24 * HOUR + 1),
    "last:1h": YEAR_2015 - HOUR + 1,
}


@pytest.mark.parametrize("text", BOUNDARIES)
def test_a_split_by_time_predicts_the_events_from_the_boundary_on(text: str) -> None:
    times = np.array([BOUNDARIES[text] + shift for shift in (-1, 0, 1)])
    facts = SplitFacts(seed=0, last_ms=YEAR_2015, eval_users=np.empty(0, dtype=np.int64))
    for users in (np.full(3, 7), np.arange(3)):
        columns = {"user_id": users, "item_id": users, "timestamp_ms": times, "action": users.astype(np.int32)}
        splits = parse_split(f"time:{text}").divide(build_sequences(columns, np.positive)[0], facts)
        rows = splits["eval"]
        ends = zip(rows.ends.tolist(), rows.num_targets.tolist(), strict=True)
        places = np.concatenate([rows.order[end - count : end] for end, count in ends])
        assert splits["train"].values("timestamp_ms").tolist() == times[:1].tolist()
        assert sorted(rows.events["timestamp_ms"][places].tolist()) == times[1:].tolist()


def test_the_split_of_a_user_does_not_depend_on_other_users(tmp_path: Path) -> None:
    def eval_users(num_users: int, **options: Any) -> set[int]:
        preprocess(synthetic(tmp_path / "out", num_users, **options))
        rows = {name: [row["user_id"] for row in read_rows(tmp_path / "out" / name)] for name in ("train", "eval")}
        assert sorted(rows["train"] + rows["eval"]) == [*range(1, num_users + 1)]
        return {*rows["eval"]}

    few, many = eval_users(300), eval_users(900)
    assert few == {user for user in many if user <= 300}
    assert len(many) == pytest.approx(270, abs=60)
    assert eval_users(300, seed=1) != few


def _k_core_by_definition(events: list[tuple[int, int]], users: int, items: int) -> list[tuple[int, int]]:
    """Remove the events of users and items that are too rare, until none is left."""
    per_user, per_item = (Counter(event[place] for event in events) for place in (0, 1))
    kept = [(user, item) for user, item in events if per_user[user] >= users and per_item[item] >= items]
    return kept if len(kept) == len(events) else _k_core_by_definition(kept, users, items)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60),
    st.integers(1, 4),
    st.integers(2, 4),
    st.sampled_from([10, 10**9]),
)
def test_the_k_core_matches_its_definition(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int]], users: int, items: int, per_bucket: int
) -> None:
    folder, num_bits = tmp_path_factory.mktemp("k-core"), num_range_bits(len(events), per_bucket)
    runs = []
    for index, part in enumerate(np.array_split(np.array(events, dtype=np.int64).reshape(-1, 2), 3)):
        columns = {"user_id": part[:, 0].copy(), "item_id": part[:, 1].copy()}
        runs.append(write_run(folder / f"run-{index}", columns, num_bits))
    buckets = Buckets(folder=folder, runs=runs, dtypes=dict.fromkeys(columns, "int64"), num_bits=num_bits)
    with threads(2, folder) as engine:
        num_removed = k_core(buckets, Filters(min_user_events=users, min_item_events=items), engine)
    left = [buckets.read(index) for index in range(len(buckets))]
    kept = [event for bucket in left for event in zip(*(ids.tolist() for ids in bucket.values()), strict=True)]
    assert num_removed == len(events) - len(kept)
    assert sorted(kept) == sorted(_k_core_by_definition(events, users, items))


def test_users_that_a_killed_run_left_out_are_counted_again(tmp_path: Path) -> None:
    users = np.repeat(np.arange(9), np.arange(9))
    run = write_run(tmp_path / "run", {"user_id": users, "item_id": users}, 1)
    buckets = Buckets(folder=tmp_path, runs=[run], dtypes={"user_id": "int64", "item_id": "int64"}, num_bits=1)
    for name in ("killed", "continued"):  # without the results that the first one would have kept
        (tmp_path / name).mkdir()
        with threads(1, tmp_path / name) as engine:
            assert keep_lengths(buckets, Filters(min_length=4), engine) == 3
