from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.core.hashing import mix64
from evenrank.datasets.schema import user_hash
from evenrank.preprocess.build import sequences as sequences_module
from evenrank.preprocess.build.sequences import build_sequences, encode_users, slot_of

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
    for column, name in enumerate(("item_id", "action", "timestamp_ms"), start=1):
        assert sequences.values(name).tolist() == [event[column] for event in expected]
    assert duplicates == len(events) - len(set(events))


def test_the_hash_table_of_users_grows() -> None:
    users = np.random.default_rng(0).permutation(np.arange(50_000) * 2**32)
    zeros = np.zeros(len(users), dtype=np.int64)
    sequences, _ = build_sequences({"user_id": users, "item_id": users, "action": zeros, "timestamp_ms": zeros})
    assert sequences.values("item_id").tolist() == sequences.user_ids.tolist()
    assert sorted(sequences.user_ids.tolist()) == sorted(users.tolist())


def _unmix64(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the words whose `mix64` are these hashes."""
    words: NDArray[np.uint64] = hashes ^ (hashes >> np.uint64(31)) ^ (hashes >> np.uint64(62))
    words *= np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    words ^= (words >> np.uint64(27)) ^ (words >> np.uint64(54))
    words *= np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    words ^= (words >> np.uint64(30)) ^ (words >> np.uint64(60))
    return words


COUNTS = np.arange(10_000, dtype=np.uint64)
CRAFTED = {
    "consecutive": COUNTS,
    "only leading bits": COUNTS << np.uint64(50),
    "hashes that end alike": _unmix64(COUNTS << np.uint64(40)),
    "hashes that begin alike": _unmix64(COUNTS | np.uint64(0xABCD << 48)),
    "products that are alike": (COUNTS << np.uint64(40)) * np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64)),
}


def _longest_search(user_ids: NDArray[np.int64], seed: int, capacity: int) -> int:
    """Return the largest number of slots that are looked at to insert a user into a table."""
    is_taken = np.zeros(capacity, dtype=bool)
    longest = 0
    for user_id in user_ids:
        first = slot = int(slot_of(user_id, np.uint64(seed), capacity - 1))
        while is_taken[slot]:
            slot = (slot + 1) % capacity
        is_taken[slot] = True
        longest = max(longest, (slot - first) % capacity + 1)
    return longest


@pytest.mark.parametrize("name", CRAFTED)
def test_users_can_not_be_chosen_so_that_searching_them_is_slow(name: str) -> None:
    user_ids = CRAFTED[name].view(np.int64)
    assert (mix64(_unmix64(CRAFTED[name])) == CRAFTED[name]).all()
    for seed in np.random.default_rng(0).integers(1, 2**64, 5, dtype=np.uint64):
        # Random ids need up to 30 in a table that is at most half full.
        assert _longest_search(user_ids, int(seed), 1 << 15) < 60
    if name == "hashes that end alike":
        assert _longest_search(user_ids[:500], 0, 1 << 15) == 500  # without a seed they can


def test_the_seed_is_random_and_does_not_change_the_result() -> None:
    user_ids = np.random.default_rng(0).integers(-50, 50, 1000)
    expected = encode_users(user_ids, np.uint64(0))
    for seed in (1, 2**63, 2**64 - 1):
        for array, same in zip(encode_users(user_ids, np.uint64(seed)), expected, strict=True):
            np.testing.assert_array_equal(array, same)
    zeros = np.zeros(1000, dtype=np.int64)
    with mock.patch("secrets.randbits", return_value=2**64 - 1) as randbits:
        build_sequences({"user_id": user_ids, "item_id": zeros, "action": zeros, "timestamp_ms": zeros})
    randbits.assert_called_once_with(64)


def test_more_events_than_an_int32_can_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences_module, "_MAX_EVENTS", 3)
    zeros = np.zeros(4, dtype=np.int64)
    with pytest.raises(DataError, match="4 events are of users whose hashes begin alike, more than 3; preprocess few"):
        build_sequences({"user_id": zeros, "item_id": zeros, "action": zeros, "timestamp_ms": zeros})
