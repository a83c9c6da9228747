import heapq
import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, karmarkar_karp, lpt
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending


def _assign(costs: list[int], world_size: int, percentile: int = 0, keep_below: int = IGNORE_HOME) -> list[int]:
    values = np.array(costs)
    rank_of: list[int] = lpt(values, argsort_descending(values), world_size, percentile, keep_below).tolist()
    return rank_of


@pytest.mark.parametrize(
    ("costs", "world_size", "keep_below", "ranks"),
    [
        ([4, 9, 5, 1], 2, IGNORE_HOME, [1, 0, 1, 0]),  # 9 to rank 0, 5 to rank 1, 4 to rank 1, which is full then
        ([5, 5, 5, 5, 5, 0], 3, IGNORE_HOME, [0, 1, 2, 0, 1, 2]),  # ties go to the lower rank
        ([5] * 6, 3, IGNORE_HOME, [0, 0, 1, 1, 2, 2]),  # open places count as 5 each, so all ranks start equal
        ([8, 7, 3, 2], 2, 10, [0, 1, 1, 0]),  # 8 stays on rank 0, 7 does not fit below 10
        ([8, 7, 3, 2], 2, 15, [0, 0, 1, 1]),
    ],
)
def test_the_lightest_rank_gets_largest(costs: list[int], world_size: int, keep_below: int, ranks: list[int]) -> None:
    assert _assign(costs, world_size, keep_below=keep_below) == ranks


def test_open_places_count_as_cheap_samples() -> None:
    costs = [20, 9, 8, 4, 4, 4]
    assert _assign(costs, 2, percentile=0) == _assign(costs, 2, percentile=25)
    costs = [10, 6, 5, 3, 3, 3]
    ranks = np.array(_assign(costs, 2, percentile=25))
    loads = [int(np.array(costs)[ranks == rank].sum()) for rank in range(2)]
    assert sorted(loads) == [14, 16]


def test_costs_near_the_limit_do_not_overflow() -> None:
    giant = 2**61
    ranks = _assign([giant, giant // 2, giant // 4, 1, 1, 1], 2)
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]
    assert ranks[0] != ranks[1] == ranks[2]


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
