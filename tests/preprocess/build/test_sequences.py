import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import user_hash
from evenrank.preprocess.build import sequences as sequences_module
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.build.sequences import build_sequences

EVENTS = st.lists(
    st.tuples(
        st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)),  # users: few, and any 64-bit integer
        st.integers(0, 4),  # items
        st.integers(0, 2),  # actions
        st.integers(0, 5),  # times, with many ties
    ),
    max_size=80,
)


def _columns(users: NDArray[np.int64], items: NDArray[np.int64] | None = None) -> Columns:
    zeros = np.zeros(len(users), dtype=np.int64)
    return {"user_id": users, "item_id": zeros if items is None else items, "action": zeros, "timestamp_ms": zeros}


@settings(max_examples=200)
@given(EVENTS)
def test_sequences_match_a_plain_grouping(events: list[tuple[int, int, int, int]]) -> None:
    users, items, actions, times = (np.array([event[i] for event in events], dtype=np.int64) for i in range(4))
    columns: Columns = {"user_id": users, "item_id": items, "action": actions.astype(np.int32), "timestamp_ms": times}
    sequences, duplicates = build_sequences(columns, lambda keys: ~keys)
    by_user: dict[int, list[tuple[int, int, int, int]]] = {}
    for event in events:
        by_user.setdefault(event[0], []).append(event)
    order = sorted(by_user, key=lambda user: (int(user_hash(np.array([user], dtype=np.int64))[0]), user))
    assert sequences.user_keys.tolist() == order
    assert sequences.user_ids.tolist() == [~user for user in order]
    expected = [event for user in order for event in sorted(by_user[user], key=lambda event: event[3])]
    for column, name in enumerate(("item_id", "action", "timestamp_ms"), start=1):
        assert sequences.values(name).tolist() == [event[column] for event in expected]
    assert duplicates == len(events) - len(set(events))


def test_many_users_are_grouped_and_too_many_events_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    users = np.random.default_rng(0).permutation(np.arange(50_000) * 2**32)  # the hash table grows
    sequences, _ = build_sequences(_columns(users, users), lambda keys: keys)
    assert sequences.values("item_id").tolist() == sequences.user_ids.tolist()
    assert sorted(sequences.user_ids.tolist()) == sorted(users.tolist())
    monkeypatch.setattr(sequences_module, "_MAX_EVENTS", 3)
    build_sequences(_columns(users[:3]), lambda keys: keys)
    with pytest.raises(
        DataError, match=r"^4 events are of users whose hashes begin alike, more than 3; preprocess few"
    ):
        build_sequences(_columns(users[:4]), lambda keys: keys)
