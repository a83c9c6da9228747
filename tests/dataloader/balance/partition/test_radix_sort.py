import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.partition.rank_loads import argsort_descending


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
