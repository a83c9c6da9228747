from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.preprocess import buckets as buckets_module
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.build.filters import Filters, cut_windows, k_core, keep_lengths
from evenrank.preprocess.build.sequences import Sequences, build_sequences

DTYPES = {"user_id": "int64", "item_id": "int64"}


def _core(events: list[tuple[int, int]], users: int, items: int) -> list[tuple[int, int]]:
    """By the definition: remove what is too rare until nothing changes."""
    while True:
        per_user = {user: sum(1 for event in events if event[0] == user) for user, _ in events}
        per_item = {item: sum(1 for event in events if event[1] == item) for _, item in events}
        left = [event for event in events if per_user[event[0]] >= users and per_item[event[1]] >= items]
        if len(left) == len(events):
            return left
        events = left


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60),
    st.integers(1, 4),
    st.integers(2, 4),
    st.sampled_from([10, 10**9]),
)
def test_the_k_core_is_that_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[tuple[int, int]],
    users: int,
    items: int,
    events_per_bucket: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets_module, "EVENTS_PER_BUCKET", events_per_bucket)
        patch.setattr(buckets_module, "BYTES_IN_MEMORY", 100)
        buckets = Buckets(tmp_path_factory.mktemp("k-core") / "buckets", len(events), DTYPES)
    columns = np.array(events, dtype=np.int64).reshape(-1, 2)
    buckets.append({"user_id": columns[:, 0].copy(), "item_id": columns[:, 1].copy()})
    kept = k_core(buckets, Filters(min_user_events=users, min_item_events=items))
    assert kept is not None
    left = [
        event
        for columns_of, mask in zip(buckets, kept, strict=True)
        for event in zip(columns_of["user_id"][mask].tolist(), columns_of["item_id"][mask].tolist(), strict=True)
    ]
    assert sorted(left) == sorted(_core(events, users, items))


def _sequences(lengths: list[int]) -> Sequences:
    users = np.repeat(np.arange(len(lengths)), lengths)
    events = np.arange(len(users))
    columns = {"user_id": users, "item_id": events, "action": events.astype(np.int32), "timestamp_ms": events}
    return build_sequences(columns)[0]


def test_short_and_long_histories_are_left_out() -> None:
    kept = keep_lengths(_sequences([1, 2, 3, 4, 5]), Filters(min_length=2, max_length=4))
    assert sorted(kept.lengths.tolist()) == [2, 3, 4]


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_windows_hold_every_event_in_as_few_rows_as_the_stride_allows(
    length: int, window: int, data: st.DataObject
) -> None:
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
        ({"min_length": 0}, "min_length must be at least 1, got 0"),
        ({"min_length": 5, "max_length": 4}, "max_length must not be below min_length, got 4 and 5"),
        ({"stride": 4}, "stride goes with window; give both"),
        ({"window": 4, "stride": 5}, r"stride must not be above window \(4\), or events are lost; got 5"),
    ],
)
def test_wrong_filters_name_the_value(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Filters(**options)


def test_bucket_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "EVENTS_PER_BUCKET", 2)
    monkeypatch.setattr(buckets_module, "BYTES_IN_MEMORY", 0)
    buckets = Buckets(tmp_path / "buckets", 10, DTYPES)
    buckets.append({"user_id": np.arange(10), "item_id": np.arange(10)})
    assert len(buckets) == 8
    assert list(tmp_path.iterdir()) != []
    buckets.close()
    assert list(tmp_path.iterdir()) == []
