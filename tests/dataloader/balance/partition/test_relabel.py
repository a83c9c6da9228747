import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.partition.relabel import relabel


@pytest.mark.parametrize(
    ("parts", "tokens", "home", "ranks"),
    [
        # Part 0 consists of slots 2 and 3, which are on rank 1; part 1 of slots 0 and 1.
        ([1, 1, 0, 0], [5, 5, 5, 5], [0, 0, 1, 1], [0, 0, 1, 1]),
        # Both parts have one slot of each rank, so the longest sample, slot 3, decides.
        ([0, 1, 1, 0], [1, 2, 3, 9], [0, 0, 1, 1], [1, 0, 0, 1]),
        # Without tokens, parts are assigned in order.
        ([1, 0, 2], [0, 0, 0], [0, 1, 2], [0, 1, 2]),
        # Rank 0 has slots 0 to 3, rank 1 none, rank 2 slot 4. Part 2 is most of rank 0, part 0 has the slot of rank 2.
        ([2, 2, 2, 1, 0], [1, 1, 1, 2, 7], [0, 0, 0, 0, 2], [0, 0, 0, 1, 2]),
    ],
)
def test_parts_go_to_their_tokens(parts: list[int], tokens: list[int], home: list[int], ranks: list[int]) -> None:
    relabelled = relabel(np.array(parts, np.int32), np.array(tokens), np.array(home, np.int32), max(parts) + 1)
    assert relabelled.tolist() == ranks


@settings(max_examples=200)
@given(st.data())
def test_the_partition_stays_the_same(data: st.DataObject) -> None:
    world_size, num_slots = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 30))

    def draw(high: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, high), min_size=num_slots, max_size=num_slots))

    parts, home = draw(world_size - 1), np.array(sorted(draw(world_size - 1)), dtype=np.int32)
    ranks = relabel(np.array(parts, np.int32), np.array(draw(9), np.int64), home, world_size).tolist()
    assert len(set(zip(parts, ranks, strict=True))) == len(set(parts)) == len(set(ranks))
    assert set(ranks) <= set(range(world_size))
