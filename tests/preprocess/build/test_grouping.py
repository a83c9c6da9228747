import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.datasets.schema import user_hash
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


@settings(max_examples=300)
@given(EVENTS)
def test_sequences_match_a_plain_grouping(events: list[tuple[int, int, int, int]]) -> None:
    users, items, actions, times = (np.array([event[i] for event in events], dtype=np.int64) for i in range(4))
    sequences, duplicates = build_sequences(
        {"user_id": users, "item_id": items, "action": actions.astype(np.int32), "timestamp_ms": times}
    )
    by_user: dict[int, list[tuple[int, int, int, int]]] = {}
    for event in events:
        by_user.setdefault(event[0], []).append(event)
    order = sorted(by_user, key=lambda user: (int(user_hash(np.array([user], dtype=np.int64))[0]), user))
    assert sequences.user_ids.tolist() == order
    expected = [event for user in order for event in sorted(by_user[user], key=lambda event: event[3])]
    assert sequences.values("item_id").tolist() == [event[1] for event in expected]
    assert sequences.values("action").tolist() == [event[2] for event in expected]
    assert sequences.values("timestamp_ms").tolist() == [event[3] for event in expected]
    assert duplicates == len(events) - len(set(events))


def test_the_hash_table_of_users_grows() -> None:
    users = np.random.default_rng(0).permutation(np.arange(50_000) * 2**32)
    zeros = np.zeros(len(users), dtype=np.int64)
    columns = {"user_id": users, "item_id": users, "action": zeros.astype(np.int32), "timestamp_ms": zeros}
    sequences, _ = build_sequences(columns)
    assert sequences.values("item_id").tolist() == sequences.user_ids.tolist()
    assert sorted(sequences.user_ids.tolist()) == sorted(users.tolist())
