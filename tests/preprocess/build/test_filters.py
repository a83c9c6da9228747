import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.preprocess.build.buckets import Buckets, Columns, num_range_bits, write_run
from evenrank.preprocess.build.filters import Filters, cut_windows, k_core, keep_lengths
from evenrank.preprocess.build.sequences import Sequences, build_sequences
from evenrank.preprocess.engine import Engine, Threads

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


@settings(max_examples=60)
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
    for number, part in enumerate(np.array_split(np.array(events, dtype=np.int64).reshape(-1, 2), 3)):
        columns = {"user_id": part[:, 0].copy(), "item_id": part[:, 1].copy()}
        runs.append(write_run(folder / f"run-{number}", columns, num_bits))
    buckets = Buckets(folder=folder, runs=runs, dtypes=DTYPES, num_bits=num_bits)
    with Threads(2) as threads:
        num_removed = k_core(buckets, Filters(min_user_events=users, min_item_events=items), Engine(threads, folder))
    left = [buckets.read(index) for index in range(len(buckets))]
    kept = [event for bucket in left for event in zip(*(bucket[name].tolist() for name in DTYPES), strict=True)]
    assert num_removed == len(events) - len(kept)
    assert sorted(kept) == sorted(_k_core_by_definition(events, users, items))


def _sequences(lengths: list[int]) -> Sequences:
    users = np.repeat(np.arange(len(lengths)), lengths)
    events = np.arange(len(users))
    columns: Columns = {"user_id": users, "item_id": events, "action": events.astype(np.int32), "timestamp_ms": events}
    return build_sequences(columns, lambda keys: keys)[0]


def test_users_with_short_or_long_histories_are_left_out() -> None:
    kept = keep_lengths(_sequences([1, 2, 3, 4, 5]), Filters(min_length=2, max_length=4))
    assert sorted(kept.lengths.tolist()) == [2, 3, 4]


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_windows_cover_every_event_in_as_few_rows_as_they_can(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    rows = cut_windows(_sequences([length]), Filters(window=window, stride=stride))
    items = [rows.take(np.array([row])).values("item_id").tolist() for row in range(len(rows))]
    assert rows.windows.tolist() == list(range(len(rows)))
    assert set().union(*items) == set(range(length))
    for number, row in enumerate(items):
        assert row == list(range(number * stride, min(number * stride + window, length)))
    assert items[-1][-1] == length - 1
    assert all(row[-1] < length - 1 for row in items[:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 0}, "min_length must be between 1 and 2147483647, got 0"),
        ({"min_length": 5, "max_length": 4}, "must be at least min_length, got max_length=4 and min_length=5"),
        ({"stride": 4}, "stride 4 has no effect without window; set both"),
        ({"window": 4, "stride": 5}, r"stride must be at most window \(4\), or events are lost; got 5"),
    ],
)
def test_invalid_filters_name_the_value(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Filters(**options)
