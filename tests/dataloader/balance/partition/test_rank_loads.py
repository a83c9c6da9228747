import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.partition import rank_loads
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending, load_shift, make_entry, rank_bits

LOADS = st.integers(0, 20)


@settings(max_examples=300)
@given(st.lists(st.one_of(st.integers(-5, 5), st.integers(-(2**61), 2**61)), min_size=1, max_size=200))
def test_slots_are_sorted_by_descending_cost_then_by_slot(costs: list[int]) -> None:
    values = np.array(costs)
    assert argsort_descending(values).tolist() == sorted(range(len(costs)), key=lambda slot: (-costs[slot], slot))


@pytest.mark.parametrize("highest", [1, 255, 256, 2**20, 2**62 - 1])
@pytest.mark.parametrize("size", [64, 65, 4095, 4096, 50_000])
def test_every_digit_width_and_number_of_passes_sorts(size: int, highest: int) -> None:
    costs = np.random.default_rng(size).integers(0, highest, size, endpoint=True)
    assert np.array_equal(argsort_descending(costs), np.argsort(-costs, kind="stable"))


@settings(max_examples=200)
@given(st.lists(LOADS, min_size=1, max_size=20), st.lists(st.tuples(st.integers(0, 19), LOADS), max_size=30))
def test_the_lightest_rank_wins_or_the_lower_of_equals(loads: list[int], changes: list[tuple[int, int]]) -> None:
    world_size, bits = len(loads), rank_bits(len(loads))
    tree = rank_loads.empty_tree(bits)
    for rank, load in enumerate(loads):
        tree[(1 << bits) + rank] = make_entry(load, rank, bits, 0)
    rank_loads.build(tree)
    assert tree[1] & ((1 << bits) - 1) == min(range(world_size), key=lambda rank: (loads[rank], rank))
    for rank, load in ((number % world_size, load) for number, load in changes):
        loads[rank] = load
        rank_loads.update(tree, rank, make_entry(load, rank, bits, 0))
        assert tree[1] & ((1 << bits) - 1) == min(range(world_size), key=lambda rank: (loads[rank], rank))


def test_loads_lose_only_the_bits_that_do_not_fit_next_to_a_rank() -> None:
    assert load_shift(2**40, 10) == 0
    assert load_shift(2**52 - 1, 10) == 0
    assert load_shift(2**52, 10) == 1
    assert load_shift(2**62, 14) == 15
    assert [rank_bits(world_size) for world_size in (1, 2, 3, 4, 5, 16_384)] == [0, 1, 2, 2, 3, 14]
