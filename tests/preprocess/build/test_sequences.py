import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.datasets.schema import user_hash
from evenrank.preprocess.build import sequences as sequences_module
from evenrank.preprocess.build.sequences import build_sequences

# User, few or any 64-bit integer; item; action; time, with many ties.
EVENTS = st.lists(
    st.tuples(
        st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1), st.integers(0, 4), st.integers(0, 2), st.integers(0, 5)
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(EVENTS)
def test_sequences_match_a_plain_grouping(events: list[tuple[int, int, int, int]]) -> None:
    names = ("user_id", "item_id", "action", "timestamp_ms")
    columns = {name: np.array([event[n] for event in events], dtype=np.int64) for n, name in enumerate(names)}
    sequences, duplicates = build_sequences(columns | {"action": columns["action"].astype(np.int32)}, np.invert)
    order = sorted({user for user, *_ in events}, key=lambda user: (int(user_hash(np.array([user]))[0]), user))
    assert sequences.user_keys.tolist() == order
    assert sequences.user_ids.tolist() == [~user for user in order]
    expected = sorted(events, key=lambda event: (order.index(event[0]), event[3]))
    for n, name in enumerate(names[1:], start=1):
        assert sequences.values(name).tolist() == [event[n] for event in expected]
    assert duplicates == len(events) - len(set(events))


def test_many_users_are_grouped_and_too_many_events_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    users = np.random.default_rng(0).permutation(np.arange(50_000) * 2**32)  # the hash table grows
    columns = dict.fromkeys(("user_id", "item_id", "action", "timestamp_ms"), users)
    sequences, _ = build_sequences(columns, np.positive)
    assert sequences.values("item_id").tolist() == sequences.user_ids.tolist()
    assert sorted(sequences.user_ids.tolist()) == sorted(users.tolist())
    monkeypatch.setattr(sequences_module, "_MAX_EVENTS", 3)
    build_sequences({name: values[:3] for name, values in columns.items()}, np.positive)
    with pytest.raises(DataError, match=r"^4 events are of users whose hashes begin alike, more than 3; preprocess f"):
        build_sequences({name: values[:4] for name, values in columns.items()}, np.positive)
