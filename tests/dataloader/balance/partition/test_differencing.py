"""Karmarkar-Karp with and without equal counts, next to a plain implementation with a heap of whole tuples."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.karmarkar_karp import karmarkar_karp, largest_differencing
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending
from evenrank.dataloader.balance.partition.strategies import lower_bound
from tests.dataloader.balance.partition.steps import costs as step_costs


def _difference(groups: list[list[int]]) -> list[int]:
    """Return the sums of the parts after merging groups of W sums each, by largest difference."""
    heap = [(min(group) - max(group), index, sorted(group)) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    for index in itertools.count(len(groups)):
        if len(heap) == 1:
            return heap[0][2]
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted(low + high for low, high in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (merged[0] - merged[-1], index, merged))
    raise AssertionError("not reached")


def _loads(costs: NDArray[np.int64], rank_of: NDArray[np.int32], world_size: int) -> list[int]:
    loads = [0] * world_size
    for cost, rank in zip(costs.tolist(), rank_of.tolist(), strict=True):
        loads[rank] += cost
    return sorted(loads)


def _assign(costs: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    return largest_differencing(costs, argsort_descending(costs), world_size)


# Costs that are drawn from 2^40 numbers: no two spreads are equal, so there is one result.
@pytest.mark.parametrize("seed", range(25))
def test_loads_equal_those_of_a_plain_implementation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world_size, batch_size = int(rng.integers(1, 17)), int(rng.integers(1, 12))
    costs = (rng.pareto(1.0, world_size * batch_size) * 2**40).astype(np.int64)
    some = costs[: int(rng.integers(1, len(costs) + 1))]
    singles = [[cost] + [0] * (world_size - 1) for cost in some.tolist()]
    assert _loads(some, _assign(some, world_size), world_size) == _difference(singles)
    descending = sorted(costs.tolist(), reverse=True)
    blocks = [descending[i : i + world_size] for i in range(0, len(descending), world_size)]
    with_equal_counts = karmarkar_karp(costs, argsort_descending(costs), world_size)
    assert _loads(costs, with_equal_counts, world_size) == _difference(blocks)


def test_the_textbook_example() -> None:
    # 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2.
    costs = np.array([8, 7, 6, 5, 4])
    assert _loads(costs, _assign(costs, 2), 2) == [14, 16]


@settings(max_examples=500)
@given(data=st.data(), world_size=st.integers(1, 9), num_slots=st.integers(0, 40))
def test_every_slot_gets_a_rank_and_every_rank_a_slot(data: st.DataObject, world_size: int, num_slots: int) -> None:
    costs = data.draw(step_costs(num_slots))
    rank_of = _assign(costs, world_size)
    assert rank_of.shape == (num_slots,)
    counts = np.bincount(rank_of, minlength=world_size)
    assert len(counts) == world_size
    assert np.count_nonzero(counts) == min(num_slots, world_size)
    if num_slots:
        assert _loads(costs, rank_of, world_size)[-1] >= lower_bound(costs, world_size, equal_counts=False)
    assert np.array_equal(_assign(costs.copy(), world_size), rank_of)


def test_the_number_of_parts_costs_no_memory() -> None:
    costs = np.random.default_rng(0).integers(1, 1 << 40, 3000)
    loads = np.bincount(_assign(costs, 2000), minlength=2000)
    assert loads.min() == 1
    assert loads.sum() == 3000
