import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.partition.parts import (
    heaviest_load_bound,
    mark_padding,
    read_slots,
    relabel,
)


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
def test_padding_has_no_cost_and_no_tokens(
    data: st.DataObject, num_steps: int, world_size: int, batch_size: int
) -> None:
    num_rows = world_size * batch_size
    values = st.lists(st.integers(0, 1 << 40), min_size=num_steps * num_rows, max_size=num_steps * num_rows)
    costs, tokens = (np.array(data.draw(values)).reshape(num_steps, num_rows) for _ in range(2))
    counts = [
        data.draw(st.lists(st.integers(0, batch_size), min_size=world_size, max_size=world_size))
        for _ in range(num_steps)
    ]
    rows = np.arange(num_rows).reshape(world_size, batch_size)
    expected, expected_tokens = costs.copy(), tokens.copy()
    slot_costs, slot_tokens = costs.copy(), tokens.copy()
    home, order, bounds, *are_valid = read_slots(slot_costs, slot_tokens, np.array(counts))
    rank_of = mark_padding(np.tile(home, (num_steps, 1)), np.array(counts))
    assert home.tolist() == [rank for rank in range(world_size) for _ in range(batch_size)]
    assert are_valid == [True, True]
    for step, of_step in enumerate(counts):
        padding = np.concatenate([of_rank[count:] for of_rank, count in zip(rows, of_step, strict=True)])
        expected[step, padding] = expected_tokens[step, padding] = 0
        assert order[step].tolist() == np.argsort(-expected[step], kind="stable").tolist()
        assert bounds[step] == heaviest_load_bound(expected[step], order[step], world_size)
        assert np.flatnonzero(rank_of[step].reshape(-1) < 0).tolist() == padding.tolist()
    assert slot_costs.tolist() == expected.tolist()
    assert slot_tokens.tolist() == expected_tokens.tolist()
    assert (rank_of == np.where(rank_of < 0, -1, np.arange(world_size)[:, np.newaxis])).all()


@pytest.mark.parametrize(
    ("costs", "is_valid"),
    [([1 << 61, 1 << 61], True), ([1 << 62, 1 << 10], False), ([5, -1], False), ([(1 << 63) - 1] * 2, False)],
)
def test_costs_are_valid_as_long_as_the_sum_of_no_step_can_overflow(costs: list[int], is_valid: bool) -> None:
    steps, counts = np.array([[1, 2], costs, [1 << 61, 1 << 61]]), np.ones((3, 2), dtype=np.int64)
    assert read_slots(steps.copy(), steps.copy(), counts)[3:] == (is_valid, is_valid)
    padding = read_slots(np.array([[1, *costs]]), np.empty((1, 0), dtype=np.int64), np.array([[1, 0, 0]]))
    assert padding[3:] == (True, True)


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
