"""Filters, boundaries of splits by time, and which users a split by user takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.preprocess import Filters, PreprocessConfig, SyntheticConfig, preprocess
from evenrank.preprocess.build.buckets import Buckets, num_range_bits, write_run
from evenrank.preprocess.build.sequences import build_sequences
from evenrank.preprocess.build.splits import SplitFacts, k_core, keep_lengths, parse_split
from evenrank.preprocess.engine import threads
from tests.preprocess.decoded import read_rows

DAY = 86_400_000
YEAR_2015 = 1_420_070_400_000
BOUNDARIES = {
    "time:2015": YEAR_2015,
    "time:2015-02": YEAR_2015 + 31 * DAY,
    "time:2015-01-06": YEAR_2015 + 5 * DAY,
    "time:20150106": YEAR_2015 + 5 * DAY,
    "time:2015-01-06T12:30:00": YEAR_2015 + 5 * DAY + 45_000_000,
    "time:2015-01-06T12:30:00.5+01:00": YEAR_2015 + 5 * DAY + 41_400_500,
    "time:1420070400": YEAR_2015,
    "time:1420070400000": YEAR_2015,
    "time:1420070400000000": YEAR_2015,
    "time:1420070400000000000": YEAR_2015,
    "time:100": 100_000,
    "time:21000101": 21_000_101_000,  # seconds: dates are of 1900 to 2099
    # The last days exclude the moment at which they begin, given an event at 2015.
    "time:last:7d": YEAR_2015 - 7 * DAY + 1,
    "time:last:168h": YEAR_2015 - 7 * DAY + 1,
    "time:last:1w": YEAR_2015 - 7 * DAY + 1,
    "time:last:1h": YEAR_2015 - 3_600_000 + 1,
    "time:last:60m": YEAR_2015 - 3_600_000 + 1,
    "time:first:1d": YEAR_2015,
    "time:first:90m,gap:1h,eval:1h": YEAR_2015 - DAY + 5_400_000,
}


@pytest.mark.parametrize("text", BOUNDARIES)
def test_a_split_by_time_predicts_the_events_from_the_boundary_on(text: str) -> None:
    times = np.array([BOUNDARIES[text] + shift for shift in (-1, 0, 1)])
    facts = SplitFacts(seed=0, limits_ms=(YEAR_2015 - DAY, YEAR_2015), eval_users=np.empty(0, dtype=np.int64))
    for users in (np.full(3, 7), np.arange(3)):
        columns = {"user_id": users, "item_id": users, "timestamp_ms": times, "action": users.astype(np.int32)}
        splits = parse_split(text).divide(build_sequences(columns, lambda keys: keys)[0], facts)
        rows = splits["eval"]
        ends = zip(rows.ends.tolist(), rows.num_targets.tolist(), strict=True)
        places = np.concatenate([rows.order[end - count : end] for end, count in ends])
        assert splits["train"].values("timestamp_ms").tolist() == times[:1].tolist()
        assert sorted(rows.events["timestamp_ms"][places].tolist()) == times[1:].tolist()


def test_the_split_of_a_user_does_not_depend_on_other_users(tmp_path: Path) -> None:
    def eval_users(num_users: int, **options: Any) -> set[int]:
        synthetic = SyntheticConfig(num_users=num_users)
        preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "out", synthetic=synthetic, **options))
        train, evaluated = (
            {row["user_id"] for row in read_rows(tmp_path / "out" / name)} for name in ("train", "eval")
        )
        assert train | evaluated == set(range(1, num_users + 1))
        assert not train & evaluated
        return evaluated

    few, many = eval_users(300), eval_users(900)
    assert few == {user for user in many if user <= 300}
    assert len(many) == pytest.approx(270, abs=60)
    assert eval_users(300, seed=1) != few


DTYPES = {"user_id": "int64", "item_id": "int64"}


def _k_core_by_definition(events: list[tuple[int, int]], users: int, items: int) -> list[tuple[int, int]]:
    """Remove the events of users and items that are too rare, until none is left."""
    while True:
        per_user = {user: sum(1 for event in events if event[0] == user) for user, _ in events}
        per_item = {item: sum(1 for event in events if event[1] == item) for _, item in events}
        kept = [event for event in events if per_user[event[0]] >= users and per_item[event[1]] >= items]
        if len(kept) == len(events):
            return kept
        events = kept


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
    buckets = Buckets(folder=folder, runs=runs, dtypes=DTYPES, num_bits=num_bits)
    with threads(2, folder) as engine:
        num_removed = k_core(buckets, Filters(min_user_events=users, min_item_events=items), engine)
    left = [buckets.read(index) for index in range(len(buckets))]
    kept = [event for bucket in left for event in zip(*(bucket[name].tolist() for name in DTYPES), strict=True)]
    assert num_removed == len(events) - len(kept)
    assert sorted(kept) == sorted(_k_core_by_definition(events, users, items))


def test_users_that_a_killed_run_left_out_are_counted_again(tmp_path: Path) -> None:
    users = np.repeat(np.arange(9), np.arange(9))
    run = write_run(tmp_path / "run", {"user_id": users, "item_id": users}, 1)
    buckets = Buckets(folder=tmp_path, runs=[run], dtypes=DTYPES, num_bits=1)
    for name in ("killed", "continued"):  # without the results that the first one would have kept
        (tmp_path / name).mkdir()
        with threads(1, tmp_path / name) as engine:
            assert keep_lengths(buckets, Filters(min_length=4), engine) == 3
