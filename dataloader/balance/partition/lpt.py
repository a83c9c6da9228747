"""LPT, longest processing time first: each slot, most expensive first, goes to the lightest rank with room.

Graham, "Bounds on multiprocessing timing anomalies", 1969, with a limit of B slots per rank. A rank that takes a long
sample early has many open places at the end, which cheap samples fill. So each open place counts as a cheap sample
from the start (a low quantile of the costs); otherwise such a rank also takes medium samples, and ends too heavy.

Cost: O(W B log W). Trade-off: fast, but the last slots leave differences that only swaps remove (see `lpt_swap`).
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled

# A tournament tree: finds the lightest of W ranks, and updates one rank's load in O(log W).
#
# A complete binary tree in an array (Knuth, The Art of Computer Programming, volume 3, section 5.4.1): node 1 is the
# overall winner, nodes 2k and 2k + 1 play for node k, and rank r is leaf W' + r, where W' is W rounded up to a power of
# two. Compared with a heap, any rank's entry can be changed without searching for it.
#
# An entry is one int64 with the load in its high bits and the rank in its low bits, so comparing two words compares
# loads
# first and ranks second. Where both do not fit, loads lose low bits.
#
# Cost: O(W) to build, one comparison a level to update. Trade-off: very large loads are compared approximately.


_ENTRY_BITS = 62
NO_ENTRY = 1 << _ENTRY_BITS  # loses against every entry


@compiled
def rank_bits(world_size: int) -> int:
    """Return the number of low bits of an entry that hold the rank."""
    bits = 0
    while (1 << bits) < world_size:
        bits += 1
    return bits


@compiled
def load_shift(max_load: int, bits: int) -> int:
    """Return the number of low bits that loads up to `max_load` lose to fit next to a rank of `bits` bits."""
    shift = 0
    while max_load >> shift >= 1 << (_ENTRY_BITS - bits):
        shift += 1
    return shift


@compiled
def make_entry(load: int, rank: int, bits: int, shift: int) -> int:
    """Return the entry of a rank; `bits` and `shift` as returned by `rank_bits` and `load_shift`."""
    return (load >> shift) << bits | rank


@compiled
def empty_tree(bits: int) -> NDArray[np.int64]:
    """Return a tree without entries: int64 [2 W']. Write entries to tree[W' + rank], then call `build`."""
    return np.full(2 << bits, NO_ENTRY)


@compiled
def build(tree: NDArray[np.int64]) -> None:
    """Play all games, given the leaves of `tree`, int64 [2 W']; changed in place."""
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


@compiled
def update(tree: NDArray[np.int64], rank: int, entry: int) -> None:
    """Replace a rank's entry and replay the games on its path to the root; `tree`, int64 [2 W'], changes in place."""
    node = len(tree) // 2 + rank
    tree[node] = entry
    while node > 1:
        entry = min(entry, tree[node ^ 1])
        node >>= 1
        tree[node] = entry


IGNORE_HOME = -1


@compiled
def lpt(
    costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int, open_place_percentile: int, keep_below: int
) -> NDArray[np.int32]:
    """Assign each slot, most expensive first, to the lightest rank with room.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        world_size: W.
        open_place_percentile: percentile of the costs, from the cheapest, that an open place counts as.
        keep_below: a slot stays on its own rank if that has room and its load remains at most this; IGNORE_HOME treats
            all ranks alike.

    Returns:
        int32 [W * B], the rank of each slot; each rank occurs B times.

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
    """Assign slots as `lpt` does; there may be fewer than there are places.

    Args:
        costs: int64 [n], n <= W * B.
        order: int64 [n], the slots by descending cost.
        world_size: W.
        batch_size: B, the places of a rank.
        open_place: cost that an open place counts as.
        keep_below: see `lpt`.

    Returns:
        int32 [n], the rank of each slot; none occurs more than B times.

    """
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
