"""Longest first, then swaps, from several starts."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.local_search import swap_down
from evenrank.dataloader.balance.partition.lpt import NOBODY_STAYS, longest_first
from evenrank.dataloader.balance.partition.rank_loads import deal

# Quantiles of the costs, in per cent, that a place still open is reckoned at, in the order in which they are tried. By
# trial over lognormal and Zipf lengths and batches of 4 to 128: the first is enough but for some batches of 4 to 16.
_OPEN_PLACES = (5, 0, 25)


@compiled
def longest_first_and_swaps(
    costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int, target: int
) -> NDArray[np.int32]:
    """Deal longest first and level by swaps, from another start as long as a rank is above `target`.

    Nothing moves where no rank is above it as the slots are dealt, or where none of this makes the heaviest lighter.

    Args:
        costs: int64 [W * B], rank after rank as they are dealt.
        order: int64 [W * B], the slots by descending cost.
        world_size: W.
        target: the load that is good enough.

    Returns:
        int32 [W * B], the rank of each slot: the first way that is good enough, else the best.

    """
    batch_size = len(costs) // world_size
    best = np.empty(len(costs), dtype=np.int32)
    best_load = np.int64(0)
    for rank in range(world_size):
        best[rank * batch_size : (rank + 1) * batch_size] = rank
        best_load = max(best_load, costs[rank * batch_size : (rank + 1) * batch_size].sum())
    for percent in _OPEN_PLACES:
        if best_load <= target:
            break
        rank_of = longest_first(costs, order, world_size, percent, NOBODY_STAYS)
        dealt = deal(costs, order, rank_of, world_size)
        swap_down(dealt, costs, order, target)
        if dealt.loads.max() < best_load:
            best, best_load = rank_of, dealt.loads.max()
    return best
