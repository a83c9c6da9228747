"""Largest differencing with equal counts: the usual way, and the measure of ours."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled


@compiled
def karmarkar_karp(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Largest differencing with equal counts (Karmarkar and Karp, 1982; for more parts Michiels et al., 2003).

    Each run of W slots in descending order starts as W parts of one slot. The two groups of parts with the largest
    spread are merged, the heaviest part of one with the lightest of the other, and so on, until one group is left.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        world_size: W.

    Returns:
        int32 [W * B], the rank of each slot; each rank B times.

    """
    num_groups = len(costs) // world_size
    sums = costs[order].copy().reshape(num_groups, world_size)  # of each part, descending
    heads = order.copy().reshape(num_groups, world_size)  # each part is a chain of slots: first, last, and who follows
    tails = heads.copy()
    follows = np.full(len(costs), -1, dtype=np.int64)
    spread = sums[:, 0] - sums[:, world_size - 1]
    alive = np.ones(num_groups, dtype=np.bool_)
    for _ in range(num_groups - 1):
        first, second = -1, -1  # the two with the largest spread; the lower index among equals
        for group in range(num_groups):
            if alive[group]:
                if first < 0 or spread[group] > spread[first]:
                    first, second = group, first
                elif second < 0 or spread[group] > spread[second]:
                    second = group
        for part in range(world_size):
            other = world_size - 1 - part
            sums[first, part] += sums[second, other]
            follows[tails[first, part]] = heads[second, other]
            tails[first, part] = tails[second, other]
        descending = np.argsort(-sums[first], kind="mergesort")
        sums[first] = sums[first][descending]
        heads[first] = heads[first][descending]
        tails[first] = tails[first][descending]
        spread[first] = sums[first, 0] - sums[first, world_size - 1]
        alive[second] = False
    rank_of = np.empty(len(costs), dtype=np.int32)
    last = np.argmax(alive)
    for part in range(world_size):
        slot = heads[last, part]
        while slot >= 0:
            rank_of[slot] = part
            slot = follows[slot]
    return rank_of
