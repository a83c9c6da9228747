"""Swaps with a second aim: to move as few tokens as possible, or to keep a limit to the tokens of each rank."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition import rank_loads
from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, local_search, lpt, lpt_swap, lpt_with_room

_COMPARED_RANKS = 6  # partners that are compared for each swap of few tokens
_TRIED_RANKS = 16  # partners that are tried within a limit
# Weights of the remaining excess and of what exceeds the partner's room, in tokens moved per token of cost. Found by
# trial over lognormal and Zipf lengths and batches of 4 to 128.
_EXCESS_WEIGHT = 3.0
_OVERSHOOT_WEIGHT = 6.0
_OPEN_PLACE_PERCENTILE = 5  # see lpt


@compiled
def min_move(
    costs: NDArray[np.int64], tokens: NDArray[np.int64], order: NDArray[np.int64], world_size: int, target: int
) -> NDArray[np.int32]:
    """Swap as few tokens as possible until no load is above `target`; return the first such result, else the best.

    Swaps start from where the samples are. The heaviest rank swaps with one of the lightest. Among the swaps that
    narrow their gap, the one with the best score is taken: the tokens that leave their home rank (tokens that return
    count negative), plus an estimate of what it costs to move on what remains above the target on either side. Where
    swaps alone do not reach the target, a second start assigns slots by LPT, each to its own rank as long as that has
    room: more moves than the first start, fewer than without homes.

    Cost: O(6 B) for each swap, and as many swaps as there is imbalance. Trade-off: less exact than `lpt_swap` at the
    same tolerance, but most samples stay.
    """
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
        for _ in range(min(_COMPARED_RANKS, len(state.loads))):
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


@compiled
def balance_within_token_limit(
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    world_size: int,
    max_tokens: int,
    target: int,
) -> NDArray[np.int32]:
    """Assign slots such that no rank has more than `max_tokens`, if possible, and level costs within that limit.

    Tokens are levelled with `lpt_swap` until no rank is above the limit, or assigned by plain LPT if that ends within
    it. Then costs are levelled as in `local_search`, by swaps that keep both ranks within the limit.

    Cost: `lpt_swap`, and O(16 B^2) for each swap, because all pairs are tried. Trade-off: heuristic; for a limit close
    to the mean of the ranks it can miss an assignment that exists.
    """
    by_tokens = rank_loads.argsort_descending(tokens)
    rank_of = lpt_swap(tokens, by_tokens, world_size, max_tokens)
    tokens_of_rank = rank_loads.sums_by_rank(tokens, rank_of, world_size)
    if tokens_of_rank.max() > max_tokens:
        # Steps that are packed are within the limit by this assignment, but not always by swaps from other starts.
        by_lpt = lpt_with_room(tokens, by_tokens, world_size, len(tokens) // world_size, 0, IGNORE_HOME)
        tokens_by_lpt = rank_loads.sums_by_rank(tokens, by_lpt, world_size)
        if tokens_by_lpt.max() <= max_tokens:
            rank_of, tokens_of_rank = by_lpt, tokens_by_lpt
    if tokens_of_rank.max() <= max_tokens:
        state = rank_loads.make_rank_loads(costs, order, rank_of, world_size)
        _swap_within_limit(state, tokens, tokens_of_rank, max_tokens, target)
    return rank_of


@compiled
def _swap_within_limit(
    state: rank_loads.RankLoads,
    tokens: NDArray[np.int64],
    tokens_of_rank: NDArray[np.int64],
    max_tokens: int,
    target: int,
) -> None:
    """Swap slots of the heaviest rank until no load is above `target`, or no swap is found that keeps the limit."""
    while True:
        heavy = rank_loads.heaviest_rank(state)
        if state.loads[heavy] <= target:
            return
        i, light, j = -1, -1, -1
        for _ in range(min(_TRIED_RANKS, len(state.loads))):
            light = rank_loads.lightest_rank(state)
            if state.loads[light] >= state.loads[heavy]:
                break
            i, j = _best_swap_within_limit(state, tokens, tokens_of_rank, max_tokens, heavy, light)
            if i >= 0:
                break
            rank_loads.hide(state, light)
        rank_loads.show_all(state)
        if i < 0:
            return
        difference = tokens[state.slots[heavy, i]] - tokens[state.slots[light, j]]
        tokens_of_rank[heavy] -= difference
        tokens_of_rank[light] += difference
        rank_loads.swap(state, heavy, i, light, j)


@compiled
def _best_swap_within_limit(
    state: rank_loads.RankLoads,
    tokens: NDArray[np.int64],
    tokens_of_rank: NDArray[np.int64],
    max_tokens: int,
    heavy: int,
    light: int,
) -> tuple[int, int]:
    """Find the swap that makes two loads most nearly equal, among those that keep both ranks within `max_tokens`."""
    gap = state.loads[heavy] - state.loads[light]
    best_i, best_j, best_gap = -1, -1, gap
    for i in range(state.slots.shape[1]):
        if state.costs[heavy, i] == 0:
            break  # padding, or as cheap, of which giving makes no rank lighter
        given = state.slots[heavy, i]
        for j in range(state.slots.shape[1]):
            taken = state.slots[light, j]
            new_gap = abs(gap - 2 * (state.costs[heavy, i] - state.costs[light, j]))
            growth = tokens[given] - tokens[taken]
            fits = tokens_of_rank[light] + growth <= max_tokens and tokens_of_rank[heavy] - growth <= max_tokens
            if new_gap < best_gap and fits:
                best_i, best_j, best_gap = i, j, new_gap
            if state.costs[light, j] == 0 and tokens[taken] == 0:
                break  # padding; the slots after it cost nothing either, and packed steps have many of them
    return best_i, best_j
