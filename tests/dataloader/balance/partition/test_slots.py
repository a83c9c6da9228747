import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.dataloader.balance.partition.lower_bound import heaviest_load_bound
from evenrank.dataloader.balance.partition.slots import mark_padding, read_slots, slots_of_ranks


@given(st.data(), st.integers(1, 5), st.integers(1, 6))
def test_padding_has_no_cost_and_no_tokens(data: st.DataObject, world_size: int, batch_size: int) -> None:
    num_rows = world_size * batch_size
    values = st.lists(st.integers(0, 1 << 40), min_size=num_rows, max_size=num_rows)
    costs, tokens = (np.array(data.draw(values)) for _ in range(2))
    counts = data.draw(st.lists(st.integers(0, batch_size), min_size=world_size, max_size=world_size))
    rows = np.arange(num_rows).reshape(world_size, batch_size)
    padding = np.concatenate([of_rank[count:] for of_rank, count in zip(rows, counts, strict=True)])
    expected, expected_tokens = costs.copy(), tokens.copy()
    expected[padding] = expected_tokens[padding] = 0
    slots = read_slots(costs.copy(), tokens.copy(), np.array(counts))
    assert slots.costs.tolist() == expected.tolist()
    assert slots.tokens.tolist() == expected_tokens.tolist()
    assert slots.home.tolist() == [rank for rank in range(world_size) for _ in range(batch_size)]
    assert slots.order.tolist() == np.argsort(-expected, kind="stable").tolist()
    assert slots.lower_bound == heaviest_load_bound(expected, slots.order, world_size)
    assert (slots.are_costs_valid, slots.are_tokens_valid) == (True, True)
    rank_of = mark_padding(slots.home, np.array(counts))
    assert np.flatnonzero(rank_of.reshape(-1) < 0).tolist() == padding.tolist()
    assert (rank_of == np.where(rank_of < 0, -1, np.arange(world_size)[:, np.newaxis])).all()


@pytest.mark.parametrize(
    ("costs", "is_valid"),
    [([1 << 61, 1 << 61], True), ([1 << 62, 1 << 10], False), ([5, -1], False), ([(1 << 63) - 1] * 2, False)],
)
def test_costs_are_valid_as_long_as_their_sum_cannot_overflow(costs: list[int], is_valid: bool) -> None:
    both = read_slots(np.array(costs), np.array(costs), np.array([1, 1]))
    assert (both.are_costs_valid, both.are_tokens_valid) == (is_valid, is_valid)
    padding = read_slots(np.array([1, *costs]), np.empty(0, dtype=np.int64), np.array([1, 0, 0]))
    assert (padding.are_costs_valid, padding.are_tokens_valid) == (True, True)


def test_ranks_out_of_range_are_counted_apart() -> None:
    assert slots_of_ranks(np.array([0, 2, 2, 3, -1, 1 << 40]), 3).tolist() == [1, 0, 2, 3]
