import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.partition.relabel import relabel

HOME = np.array([0, 0, 1, 1], dtype=np.int32)


def test_parts_go_to_the_rank_that_has_most_of_their_tokens() -> None:
    # Part 0 consists of slots 2 and 3, which are on rank 1; part 1 of slots 0 and 1.
    assert relabel(np.array([1, 1, 0, 0], dtype=np.int32), np.array([5, 5, 5, 5]), HOME, 2).tolist() == [0, 0, 1, 1]
    # Both parts have one slot of each rank, so the longest sample, slot 3, decides.
    assert relabel(np.array([0, 1, 1, 0], dtype=np.int32), np.array([1, 2, 3, 9]), HOME, 2).tolist() == [1, 0, 0, 1]


def test_parts_without_tokens_are_assigned_in_order() -> None:
    assert relabel(
        np.array([1, 0, 2], dtype=np.int32), np.array([0, 0, 0]), np.arange(3, dtype=np.int32), 3
    ).tolist() == [0, 1, 2]


def test_parts_of_any_size_go_home_too() -> None:
    # Rank 0 has slots 0 to 3, rank 1 none, rank 2 slot 4. Part 2 is most of rank 0, part 0 has the slot of rank 2.
    home = np.array([0, 0, 0, 0, 2], dtype=np.int32)
    assert relabel(np.array([2, 2, 2, 1, 0], dtype=np.int32), np.array([1, 1, 1, 2, 7]), home, 3).tolist() == [
        *[0, 0, 0, 1, 2]
    ]


@settings(max_examples=200)
@given(st.data())
def test_the_partition_stays_the_same(data: st.DataObject) -> None:
    world_size, num_slots = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 30))
    ranks_of_slots = st.lists(st.integers(0, world_size - 1), min_size=num_slots, max_size=num_slots)
    parts = np.array(data.draw(ranks_of_slots), dtype=np.int32)
    home = np.array(sorted(data.draw(ranks_of_slots)), dtype=np.int32)
    tokens = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num_slots, max_size=num_slots)), dtype=np.int64)
    ranks = relabel(parts, tokens, home, world_size)
    pairs = set(zip(parts.tolist(), ranks.tolist(), strict=True))
    assert len(pairs) == len(set(parts.tolist())) == len(set(ranks.tolist()))
    assert set(ranks.tolist()) <= set(range(world_size))
