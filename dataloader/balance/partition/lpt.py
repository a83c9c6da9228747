"""LPT, longest processing time first: each slot, most expensive first, goes to the lightest rank with room.

Graham, "Bounds on multiprocessing timing anomalies", 1969, with a limit of B slots per rank. A rank that takes a long
sample early has many open places at the end, which cheap samples fill. So each open place counts as a cheap sample
from the start (a low quantile of the costs); otherwise such a rank also takes medium samples, and ends too heavy.

Cost: O(W B log W). Trade-off: fast, but the last slots leave differences that only swaps remove (see `lpt_swap`).
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition.rank_loads import (
    NO_ENTRY,
    build,
    empty_tree,
    load_shift,
    make_entry,
    rank_bits,
    update,
)

IGNORE_HOME = -1


@compiled
def lpt(
    costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int, open_place_percentile: int, keep_below: int
) -> NDArray[np.int32]:
    """Assign each slot, most expensive first, to the lightest rank with room.

    An open place counts as the cost at `open_place_percentile`, from the cheapest. A slot stays on its own rank if that
    has room and its load remains at most `keep_below`; IGNORE_HOME treats all ranks alike.
    """
    size = len(costs)
    open_place = costs[order[size - 1 - size * open_place_percentile // 100]]
    return lpt_with_room(costs, order, world_size, size // world_size, open_place, keep_below)


@compiled
def lpt_with_room(
    costs: NDArray[np.int64],
    order: NDArray[np.int64],
    world_size: int,
    batch_size: int,
    open_place: int,
    keep_below: int,
) -> NDArray[np.int32]:
    """Assign n <= W * B slots as `lpt` does, given the cost that an open place counts as."""
    bits = rank_bits(world_size)
    shift = load_shift(costs.sum() + batch_size * open_place, bits)
    loads = np.full(world_size, batch_size * open_place)  # open places included
    room = np.full(world_size, batch_size)
    rank_of = np.empty(len(costs), dtype=np.int32)
    tree = empty_tree(bits)
    for rank in range(world_size):
        tree[(1 << bits) + rank] = make_entry(loads[rank], rank, bits, shift)
    build(tree)
    for slot in order:
        added = costs[slot] - open_place
        rank = tree[1] & ((1 << bits) - 1)
        if keep_below >= 0:
            home = slot // batch_size
            if room[home] and loads[home] + added <= keep_below:
                rank = home
        rank_of[slot] = rank
        loads[rank] += added
        room[rank] -= 1
        update(tree, rank, make_entry(loads[rank], rank, bits, shift) if room[rank] else NO_ENTRY)
    return rank_of
