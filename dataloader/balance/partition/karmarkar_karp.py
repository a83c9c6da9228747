"""Karmarkar-Karp: the largest differencing method with equal counts. The baseline that the other strategies beat.

Each run of W slots in descending order starts as a group of W parts of one slot. The two groups with the largest spread
(heaviest minus lightest part) are merged, the heaviest part of one with the lightest part of the other, until one group
remains. Karmarkar and Karp, "The differencing method of set partitioning", 1982; with equal counts and more than two
parts Michiels, Korst, Aarts and van Leeuwen, "Performance ratios for the differencing method applied to the balanced
number partitioning problem", 2003.

Cost: O(B (B + W log W)). Trade-off: every rank gets one slot of each sorted run of W, so a heavy tail of costs stays
uneven, and nearly all slots change ranks.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending


@compiled
def karmarkar_karp(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Assign slots by largest differencing."""
    num_groups = len(costs) // world_size
    sums = costs[order].reshape(num_groups, world_size)  # of each part, descending within a group
    # Each part is a linked list of slots.
    heads = order.copy().reshape(num_groups, world_size)
    tails = heads.copy()
    next_slot = np.full(len(costs), -1, dtype=np.int64)
    spread = sums[:, 0] - sums[:, world_size - 1]
    alive = np.ones(num_groups, dtype=np.bool_)
    scratch = np.empty(world_size, dtype=np.int64)
    for _ in range(num_groups - 1):
        first, second = -1, -1  # the groups with the largest spread, ties by the lower index
        for group in range(num_groups):
            if alive[group]:
                if first < 0 or spread[group] > spread[first]:
                    first, second = group, first
                elif second < 0 or spread[group] > spread[second]:
                    second = group
        for part in range(world_size):
            other = world_size - 1 - part
            sums[first, part] += sums[second, other]
            next_slot[tails[first, part]] = heads[second, other]
            tails[first, part] = tails[second, other]
        descending = argsort_descending(sums[first])
        for row in (sums[first], heads[first], tails[first]):
            _permute(row, descending, scratch)
        spread[first] = sums[first, 0] - sums[first, world_size - 1]
        alive[second] = False
    rank_of = np.empty(len(costs), dtype=np.int32)
    remaining = np.argmax(alive)
    for part in range(world_size):
        slot = heads[remaining, part]
        while slot >= 0:
            rank_of[slot] = part
            slot = next_slot[slot]
    return rank_of


@compiled
def _permute(values: NDArray[np.int64], order: NDArray[np.int64], scratch: NDArray[np.int64]) -> None:
    """Put values[order] in place of `values`; all are int64 [W]."""
    for i in range(len(order)):  # Numba takes seconds to compile the assignment of a slice
        scratch[i] = values[order[i]]
    for i in range(len(order)):
        values[i] = scratch[i]
