import heapq
import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.karmarkar_karp import karmarkar_karp
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending


def _difference(groups: list[list[int]]) -> list[int]:
    """Merge groups of W sums each, by largest difference, with a heap of whole tuples; return the sums of the parts."""
    heap = [(min(group) - max(group), index, sorted(group)) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    for index in itertools.count(len(groups)):
        if len(heap) == 1:
            return heap[0][2]
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted(low + high for low, high in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (merged[0] - merged[-1], index, merged))
    raise AssertionError("not reached")


def _loads(costs: NDArray[np.int64], world_size: int) -> list[int]:
    loads = [0] * world_size
    rank_of = karmarkar_karp(costs, argsort_descending(costs), world_size)
    for cost, rank in zip(costs.tolist(), rank_of.tolist(), strict=True):
        loads[rank] += cost
    return sorted(loads)


# Costs that are drawn from 2^40 numbers: no two spreads are equal, so there is one result.
@pytest.mark.parametrize("seed", range(25))
def test_loads_equal_those_of_a_plain_implementation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world_size, batch_size = int(rng.integers(1, 17)), int(rng.integers(1, 12))
    costs = (rng.pareto(1.0, world_size * batch_size) * 2**40).astype(np.int64)
    descending = sorted(costs.tolist(), reverse=True)
    blocks = [descending[i : i + world_size] for i in range(0, len(descending), world_size)]
    assert _loads(costs, world_size) == _difference(blocks)
