"""Balance by moving as few tokens as possible: swaps that start from where the samples are.

The heaviest rank swaps with one of the lightest. Among the swaps that narrow their gap, the one with the best score is
taken: the tokens that leave their home rank (tokens that return count negative), plus an estimate of what it costs to
move on what remains above the target on either side. Where swaps alone do not reach the target, a second start assigns
slots by LPT, each to its own rank as long as that has room: more moves than the first start, fewer than without homes.

Cost: O(6 B) for each swap, and as many swaps as there is imbalance. Trade-off: less exact than `lpt_swap` at the same
tolerance, but most samples stay.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition import rank_loads
from evenrank.dataloader.balance.partition.lpt import lpt
from evenrank.dataloader.balance.partition.lpt_swap import local_search

_LIGHTEST_RANKS = 6  # partners that are compared for each swap
# Weights of the remaining excess and of what exceeds the partner's room, in tokens moved per token of cost. Found by
# trial over lognormal and Zipf lengths and batches of 4 to 128.
_EXCESS_WEIGHT = 3.0
_OVERSHOOT_WEIGHT = 6.0
_OPEN_PLACE_PERCENTILE = 5  # see lpt


@compiled
def min_move(
    costs: NDArray[np.int64], tokens: NDArray[np.int64], order: NDArray[np.int64], world_size: int, target: int
) -> NDArray[np.int32]:
    """Swap as few tokens as possible until no load is above `target`; return the first such result, else the best."""
    home = (np.arange(len(costs)) // (len(costs) // world_size)).astype(np.int32)
    best, best_load = home, np.int64(-1)
    for start in range(2):
        rank_of = home if start == 0 else lpt(costs, order, world_size, _OPEN_PLACE_PERCENTILE, target)
        state = rank_loads.make_rank_loads(costs, order, rank_of, world_size)
        _swap_few_tokens(state, costs, tokens, target)
        local_search(state, costs, order, target)
        load = state.loads.max()
        if best_load < 0 or load < best_load:
            best, best_load = rank_of, load
        if best_load <= target:
            break
    return best


@compiled
def _swap_few_tokens(
    state: rank_loads.RankLoads, costs: NDArray[np.int64], tokens: NDArray[np.int64], target: int
) -> None:
    """Swap slots of the heaviest rank with light ranks until no load is above `target`, or no swap is found."""
    tokens_per_cost = tokens.sum() / max(costs.sum(), 1)
    while True:
        heavy = rank_loads.heaviest_rank(state)
        if state.loads[heavy] <= target:
            return
        best_i, best_light, best_j, best_score = -1, -1, -1, np.inf
        for _ in range(min(_LIGHTEST_RANKS, len(state.loads))):
            light = rank_loads.lightest_rank(state)
            if state.loads[light] >= state.loads[heavy]:
                break
            i, j, score = _cheapest_swap(state, tokens, heavy, light, target, tokens_per_cost)
            if score < best_score:
                best_i, best_light, best_j, best_score = i, light, j, score
            rank_loads.hide(state, light)
        rank_loads.show_all(state)
        if best_i < 0:
            return
        rank_loads.swap(state, heavy, best_i, best_light, best_j)


@compiled
def _cheapest_swap(
    state: rank_loads.RankLoads, tokens: NDArray[np.int64], heavy: int, light: int, target: int, tokens_per_cost: float
) -> tuple[int, int, float]:
    """Return the swap of two ranks with the lowest score, as indices in their slots, and the score.

    They are -1, -1 and infinity if no swap narrows the gap.
    """
    heavy_slots, light_slots = state.slots[heavy], state.slots[light]
    heavy_costs, light_costs = state.costs[heavy], state.costs[light]
    excess = state.loads[heavy] - target
    room = max(target - state.loads[light], 0)
    gap = state.loads[heavy] - state.loads[light]
    batch_size = len(heavy_slots)
    best_i, best_j, best_score = -1, -1, np.inf
    removes_excess, fits_room = 0, 0
    for i in range(batch_size):
        given = heavy_slots[i]
        given_tokens = _tokens_leaving_home(given, heavy, light, tokens, batch_size)
        # In return for a given slot only these can be best: the slots that just remove the excess, those that just
        # fill the room, and the cheapest. As the given slot's cost falls, so do theirs.
        while removes_excess < batch_size and light_costs[removes_excess] > heavy_costs[i] - excess:
            removes_excess += 1
        while fits_room < batch_size and light_costs[fits_room] >= heavy_costs[i] - room:
            fits_room += 1
        for j in (removes_excess - 1, removes_excess, fits_room - 1, fits_room, batch_size - 1):
            if not 0 <= j < batch_size:
                continue
            difference = heavy_costs[i] - light_costs[j]
            if difference <= 0 or difference >= gap:
                continue
            score = float(given_tokens + _tokens_leaving_home(light_slots[j], light, heavy, tokens, batch_size))
            score += _EXCESS_WEIGHT * tokens_per_cost * abs(excess - difference)
            score += _OVERSHOOT_WEIGHT * tokens_per_cost * max(difference - room, 0)
            if score < best_score:
                best_i, best_j, best_score = i, j, score
    return best_i, best_j, best_score


@compiled
def _tokens_leaving_home(slot: int, rank: int, other: int, tokens: NDArray[np.int64], batch_size: int) -> int:
    """Return the tokens that leave home if a slot moves from one rank to another; negative if they return home."""
    home = slot // batch_size
    if home == rank:
        return int(tokens[slot])
    return -int(tokens[slot]) if home == other else 0
