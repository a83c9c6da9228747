"""Balance under a limit to the tokens of each rank: first by tokens until the limit holds, then by cost within it.

Tokens are levelled with `lpt_swap` until no rank is above the limit, or assigned by plain LPT if that ends within it.
Then costs are levelled as in `local_search`, by swaps that keep both ranks within the limit.

Cost: `lpt_swap`, and O(16 B^2) for each swap, because all pairs are tried. Trade-off: heuristic; for a limit close to
the mean of the ranks it can miss an assignment that exists.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition import rank_loads
from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, lpt_with_room
from evenrank.dataloader.balance.partition.lpt_swap import lpt_swap

_LIGHTEST_RANKS = 16  # partners that are tried


@compiled
def balance_within_token_limit(
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    world_size: int,
    max_tokens: int,
    target: int,
) -> NDArray[np.int32]:
    """Assign slots such that no rank has more than `max_tokens`, if possible, and level costs within that limit."""
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
        for _ in range(min(_LIGHTEST_RANKS, len(state.loads))):
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
