import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.partition.relabel import relabel


def test_parts_go_to_the_rank_that_has_most_of_their_tokens() -> None:
    # Part 0 consists of slots 2 and 3, which are on rank 1; part 1 of slots 0 and 1.
    assert relabel(np.array([1, 1, 0, 0], dtype=np.int32), np.array([5, 5, 5, 5]), 2).tolist() == [0, 0, 1, 1]
    # Both parts have one slot of each rank, so the longest sample, slot 3, decides.
    assert relabel(np.array([0, 1, 1, 0], dtype=np.int32), np.array([1, 2, 3, 9]), 2).tolist() == [1, 0, 0, 1]


def test_parts_without_tokens_are_assigned_in_order() -> None:
    assert relabel(np.array([1, 0, 2], dtype=np.int32), np.array([0, 0, 0]), 3).tolist() == [0, 1, 2]


@settings(max_examples=200)
@given(st.data())
def test_the_partition_stays_the_same(data: st.DataObject) -> None:
    world_size, batch_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    parts = np.array(data.draw(st.permutations(np.repeat(np.arange(world_size), batch_size).tolist())), dtype=np.int32)
    tokens = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(parts), max_size=len(parts))))
    ranks = relabel(parts, tokens, world_size)
    assert sorted(set(ranks.tolist())) == list(range(world_size))
    assert len(set(zip(parts.tolist(), ranks.tolist(), strict=True))) == world_size
