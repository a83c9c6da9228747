"""Longest first: the most expensive slot goes to the lightest rank with room."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.tournament_tree import ABSENT, enter, load_shift, play_all, rank_bits

NOBODY_STAYS = -1


@compiled
def longest_first(
    costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int, percent: int, stay_below: int
) -> NDArray[np.int32]:
    """Give each slot, the most expensive first, to the rank with the least load that has room for it.

    A rank that took a long sample early has many places open at the end, and cheap samples come into them. So a rank
    counts, for each place that is still open, a cheap sample, and takes none that leaves no room for those.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        world_size: W.
        percent: the quantile of the costs that is counted for an open place.
        stay_below: a slot stays with its own rank if that has room and its load stays at or below this.

    Returns:
        int32 [W * B], the rank of each slot; each rank B times.

    """
    size = len(costs)
    batch_size = size // world_size
    open_place = costs[order[size - 1 - size * percent // 100]]
    bits = rank_bits(world_size)
    shift = load_shift(costs.sum() + batch_size * open_place, bits)
    is_rank = (1 << bits) - 1
    loads = np.full(world_size, batch_size * open_place)
    places = np.full(world_size, batch_size)
    rank_of = np.empty(size, dtype=np.int32)
    tree = np.full(2 << bits, ABSENT)
    for rank in range(world_size):
        tree[(1 << bits) + rank] = (loads[rank] >> shift) << bits | rank
    play_all(tree)
    for slot in order:
        added = costs[slot] - open_place
        rank = tree[1] & is_rank
        if stay_below >= 0:
            home = slot // batch_size
            if places[home] and loads[home] + added <= stay_below:
                rank = home
        rank_of[slot] = rank
        loads[rank] += added
        places[rank] -= 1
        enter(tree, rank, (loads[rank] >> shift) << bits | rank if places[rank] else ABSENT)
    return rank_of
