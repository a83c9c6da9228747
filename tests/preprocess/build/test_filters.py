from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.preprocess import Filters
from evenrank.preprocess.build.buckets import Buckets, num_range_bits, write_run
from evenrank.preprocess.build.splits import k_core, keep_lengths
from evenrank.preprocess.engine import threads

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
