"""LPT followed by local search, from up to three starts. The best balance of the strategies.

Two starts differ in the cost that an open place counts as in `lpt`; the third is `karmarkar_karp`, which levels a few
slots per rank of similar costs better. The first result within the target ends the search, and the best one is kept, so
the heaviest rank is within the target or no heavier than by `karmarkar_karp`.

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

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition import rank_loads
from evenrank.dataloader.balance.partition.karmarkar_karp import karmarkar_karp
from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, lpt

# In the order in which they are tried. Found by trial over lognormal, Zipf and uniform costs, batches of 2 to 128: the
# first is enough except for some batches of 2 to 16.
_KARMARKAR_KARP = -1
_OPEN_PLACE_PERCENTILES = (5, 25, _KARMARKAR_KARP)
_LIGHTEST_RANKS = 16  # partners that are tried first
_CHEAPEST_SLOTS = 256  # candidates that are tried if no partner helps


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
