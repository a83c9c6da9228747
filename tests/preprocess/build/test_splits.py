"""Filters, and which users a split by user takes; for boundaries of splits by time, see golden/boundaries.toml."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.preprocess import Filters, preprocess
from evenrank.preprocess.build.buckets import Buckets, num_range_bits, write_run
from evenrank.preprocess.build.splits import k_core, keep_lengths
from evenrank.preprocess.engine import threads
from tests.preprocess.decoded import read_rows, synthetic


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
