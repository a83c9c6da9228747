"""Balance by cost alone: LPT, largest differencing, and the search that starts from both.

LPT, longest processing time first: each slot, most expensive first, goes to the lightest rank with room. Graham,
"Bounds on multiprocessing timing anomalies", 1969, with a limit of B slots per rank. A rank that takes a long sample
early has many open places at the end, which cheap samples fill. So each open place counts as a cheap sample from the
start (a low quantile of the costs); otherwise such a rank also takes medium samples, and ends too heavy. Cost: O(W B
log W). Trade-off: fast, but the last slots leave differences that only swaps remove.

`lpt_swap` is the best balance of the strategies: local search from up to three starts. Two starts differ in the cost
that an open place counts as in `lpt`; the third is `karmarkar_karp`, which levels a few slots per rank of similar costs
better. The first result within the target ends the search, and the best one is kept, so the heaviest rank is within the
target or no heavier than by `karmarkar_karp`.

Local search: the heaviest rank swaps a slot with another rank, until it is light enough or no swap helps. Interchange
between two ranks, as in Finn and Horowitz, "A linear time approximation algorithm for multiprocessor scheduling", 1979,
but one slot for one slot, so counts stay equal. The partner is the lightest rank that has a slot to offer. If none of
the lightest has one, the heaviest rank takes one of the cheapest slots of any rank below the target: a rank with one
very expensive slot becomes lighter only through cheaper slots next to it, and the lightest ranks need not have these.
Cost: O(W B log W), and O(B + log W) for most swaps, of which LPT leaves few. Trade-off: the search stops in a local
optimum, so the start matters. It moves the majority of samples; `relabel` afterwards keeps some of them on their ranks.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition import rank_loads
from evenrank.dataloader.balance.partition.rank_loads import NO_ENTRY, argsort_descending, make_entry

IGNORE_HOME = -1
# In the order in which they are tried. Found by trial over lognormal, Zipf and uniform costs, batches of 2 to 128: the
# first is enough except for some batches of 2 to 16.
_KARMARKAR_KARP = -1
_OPEN_PLACE_PERCENTILES = (5, 25, _KARMARKAR_KARP)
_LIGHTEST_RANKS = 16  # partners that are tried first
_CHEAPEST_SLOTS = 256  # candidates that are tried if no partner helps


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
    bits = rank_loads.rank_bits(world_size)
    shift = rank_loads.load_shift(costs.sum() + batch_size * open_place, bits)
    loads = np.full(world_size, batch_size * open_place)  # open places included
    room = np.full(world_size, batch_size)
    rank_of = np.empty(len(costs), dtype=np.int32)
    tree = rank_loads.empty_tree(bits)
    for rank in range(world_size):
        tree[(1 << bits) + rank] = make_entry(loads[rank], rank, bits, shift)
    rank_loads.build(tree)
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
        rank_loads.update(tree, rank, make_entry(loads[rank], rank, bits, shift) if room[rank] else NO_ENTRY)
    return rank_of


@compiled
def karmarkar_karp(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Assign slots by the largest differencing method with equal counts: the baseline that the other strategies beat.

    Each run of W slots in descending order starts as a group of W parts of one slot. The two groups with the largest
    spread (heaviest minus lightest part) are merged, the heaviest part of one with the lightest part of the other,
    until one group remains. Karmarkar and Karp, "The differencing method of set partitioning", 1982; with equal counts
    and more than two parts Michiels, Korst, Aarts and van Leeuwen, "Performance ratios for the differencing method
    applied to the balanced number partitioning problem", 2003.

    Cost: O(B (B + W log W)). Trade-off: every rank gets one slot of each sorted run of W, so a heavy tail of costs
    stays uneven, and nearly all slots change ranks.
    """
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


@compiled
def lpt_swap(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int, target: int) -> NDArray[np.int32]:
    """Assign slots by swaps from a start, from another as long as a rank is above `target`; the best result is kept.

    All slots stay if no rank is above `target` before balancing, or if the result would not be lighter.
    """
    best = (np.arange(len(costs)) // (len(costs) // world_size)).astype(np.int32)
    best_load = rank_loads.sums_by_rank(costs, best, world_size).max()
    for percentile in _OPEN_PLACE_PERCENTILES:
        if best_load <= target:
            break
        if percentile == _KARMARKAR_KARP:
            rank_of = karmarkar_karp(costs, order, world_size)
        else:
            rank_of = lpt(costs, order, world_size, percentile, IGNORE_HOME)
        state = rank_loads.make_rank_loads(costs, order, rank_of, world_size)
        local_search(state, costs, order, target)
        if state.loads.max() < best_load:
            best, best_load = rank_of, state.loads.max()
    return best


@compiled
def local_search(state: rank_loads.RankLoads, costs: NDArray[np.int64], order: NDArray[np.int64], target: int) -> None:
    """Swap slots of the heaviest rank until no load is above `target`, or no swap makes it lighter."""
    while True:
        heavy = rank_loads.heaviest_rank(state)
        if state.loads[heavy] <= target:
            return
        i, light, j = _swap_with_lightest(state, heavy)
        if i < 0:
            i, light, j = _swap_for_cheapest(state, costs, order, heavy, target)
        if i < 0:
            return
        rank_loads.swap(state, heavy, i, light, j)


@compiled
def _swap_with_lightest(state: rank_loads.RankLoads, heavy: int) -> tuple[int, int, int]:
    """Return the best swap with the lightest rank that has one: index in slots[heavy] (-1: none), rank, index there."""
    i, light, j = -1, -1, -1
    for _ in range(min(_LIGHTEST_RANKS, len(state.loads))):
        light = rank_loads.lightest_rank(state)
        gap = state.loads[heavy] - state.loads[light]
        if gap <= 0:
            break
        i, j = _best_swap(state.costs[heavy], state.costs[light], gap)
        if i >= 0:
            break
        rank_loads.hide(state, light)
    rank_loads.show_all(state)
    return i, light, j


@compiled
def _best_swap(heavy: NDArray[np.int64], light: NDArray[np.int64], gap: int) -> tuple[int, int]:
    """Find the swap that makes the loads of two ranks, `gap` apart, most nearly equal.

    Given the costs of each rank's slots, descending; returns an index in each, or -1, -1 if no swap narrows the gap.
    """
    best_i, best_j, best_gap = -1, -1, gap
    j = 0
    for i in range(len(heavy)):
        # Moving a difference of gap / 2 would equalize them. As heavy[i] falls, so does the cost sought in `light`.
        while j < len(light) and 2 * light[j] > 2 * heavy[i] - gap:
            j += 1
        for candidate in (j - 1, j):
            if 0 <= candidate < len(light):
                new_gap = abs(gap - 2 * (heavy[i] - light[candidate]))
                if new_gap < best_gap:
                    best_i, best_j, best_gap = i, candidate, new_gap
    return best_i, best_j


@compiled
def _swap_for_cheapest(
    state: rank_loads.RankLoads, costs: NDArray[np.int64], order: NDArray[np.int64], heavy: int, target: int
) -> tuple[int, int, int]:
    """Return, like `_swap_with_lightest`, the best swap for one of the cheapest slots of ranks below `target`."""
    best_i, best_slot, best_load = -1, -1, state.loads[heavy]
    heavy_costs = state.costs[heavy]
    tried = 0
    for index in range(len(order) - 1, -1, -1):
        slot = order[index]
        other = state.rank_of[slot]
        if other == heavy or state.loads[other] >= target:
            continue
        doubled = 2 * costs[slot] + state.loads[heavy] - state.loads[other]
        i, end = 0, len(heavy_costs)  # i becomes the number of costs above half of `doubled`
        while i < end:
            middle = (i + end) // 2
            if 2 * heavy_costs[middle] > doubled:
                i = middle + 1
            else:
                end = middle
        for candidate in (i - 1, i):
            if 0 <= candidate < len(heavy_costs):
                difference = heavy_costs[candidate] - costs[slot]
                load = max(state.loads[heavy] - difference, state.loads[other] + difference)
                if load < best_load:
                    best_i, best_slot, best_load = candidate, slot, load
        tried += 1
        if tried == _CHEAPEST_SLOTS:
            break
    if best_i < 0:
        return -1, -1, -1
    light = state.rank_of[best_slot]
    j = 0
    while state.slots[light, j] != best_slot:
        j += 1
    return best_i, light, j
