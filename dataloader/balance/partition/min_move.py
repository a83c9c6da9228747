"""From where the samples are, as few tokens as possible are moved until no rank is too heavy."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.local_search import swap_down
from evenrank.dataloader.balance.partition.lpt import longest_first
from evenrank.dataloader.balance.partition.rank_loads import Dealt, deal, heaviest_rank, hide, lightest_rank, show, swap

_LIGHTEST = 6  # ranks that the heaviest one is tried with
# What it is worth to settle the heaviest rank, or to stay within the other's room, by this swap instead of by more of
# them, as multiples of the step's tokens per cost. By trial, over lognormal and Zipf lengths, batches of 4 to 128.
_SETTLED = 3.0
_WITHIN_ROOM = 6.0
_OPEN_PLACES = 5  # per cent; see longest_first


@compiled
def move_least(
    costs: NDArray[np.int64], sizes: NDArray[np.int64], order: NDArray[np.int64], world_size: int, target: int
) -> NDArray[np.int32]:
    """Swap as few tokens as possible away from home until no load is above `target`.

    Where swaps alone do not reach it, slots are dealt longest first, each to its own rank where that has room, and
    swapped from there: that moves more, but less than dealing them as if they had no home.

    Args:
        costs: int64 [W * B], rank after rank as they are dealt.
        sizes: int64 [W * B], the tokens of each slot.
        order: int64 [W * B], the slots by descending cost.
        world_size: W.
        target: the load that is good enough.

    Returns:
        int32 [W * B], the rank of each slot.

    """
    home = (np.arange(len(costs)) // (len(costs) // world_size)).astype(np.int32)
    best, best_load = home, np.int64(-1)
    for start in range(2):
        rank_of = home if start == 0 else longest_first(costs, order, world_size, _OPEN_PLACES, target)
        dealt = deal(costs, order, rank_of, world_size)
        _swap_cheaply(dealt, costs, sizes, target)
        swap_down(dealt, costs, order, target)
        load = dealt.loads.max()
        if best_load < 0 or load < best_load:
            best, best_load = rank_of, load
        if best_load <= target:
            break
    return best


@compiled
def _swap_cheaply(dealt: Dealt, costs: NDArray[np.int64], sizes: NDArray[np.int64], target: int) -> None:
    """Swap slots of the heaviest rank with those of light ones until no load is above `target`, or no swap is found.

    Of the swaps of the heaviest rank that leave the other lighter than it was, the one is taken that moves the fewest
    tokens away from home, counting those that come home as won, and what it leaves above the target, or puts there, at
    what it will cost to move on.

    Args:
        dealt: where the samples are; changed in place. Its heaviest load only ever becomes smaller.
        costs: int64 [W * B].
        sizes: int64 [W * B], the tokens of each slot.
        target: the load that is good enough.

    """
    tokens_per_cost = sizes.sum() / max(costs.sum(), 1)
    hidden = np.empty(min(_LIGHTEST, len(dealt.loads)), dtype=np.int64)
    while True:
        heavy = heaviest_rank(dealt)
        if dealt.loads[heavy] <= target:
            return
        best_i, best_light, best_j, best_score = -1, -1, -1, np.inf
        count = 0
        while count < len(hidden):
            light = lightest_rank(dealt)
            if dealt.loads[light] >= dealt.loads[heavy]:
                break
            i, j, score = _cheapest_swap(dealt, sizes, heavy, light, target, tokens_per_cost)
            if score < best_score:
                best_i, best_light, best_j, best_score = i, light, j, score
            hidden[count] = light
            count += 1
            hide(dealt, light)
        for rank in hidden[:count]:
            show(dealt, rank)
        if best_i < 0:
            return
        swap(dealt, heavy, best_i, best_light, best_j)


@compiled
def _cheapest_swap(
    dealt: Dealt,
    sizes: NDArray[np.int64],
    heavy: int,
    light: int,
    target: int,
    tokens_per_cost: float,
) -> tuple[int, int, float]:
    """Find the swap of two ranks with the least score.

    Returns:
        Position in slots[heavy], position in slots[light], score; -1, -1, infinity if there is none.

    """
    mine, theirs = dealt.slots[heavy], dealt.slots[light]
    my_costs, their_costs = dealt.costs[heavy], dealt.costs[light]
    excess = dealt.loads[heavy] - target
    room = max(target - dealt.loads[light], 0)
    gap = dealt.loads[heavy] - dealt.loads[light]
    batch_size = len(mine)
    best_i, best_j, best_score = -1, -1, np.inf
    settles, fits = 0, 0
    for i in range(batch_size):
        given = mine[i]
        tokens = _tokens_moved(given, heavy, light, sizes, batch_size)
        # For a slot that is given away only these are worth looking at: those in return that just settle the excess,
        # that just fill the room, and the cheapest. As its cost falls, so do theirs.
        while settles < batch_size and their_costs[settles] > my_costs[i] - excess:
            settles += 1
        while fits < batch_size and their_costs[fits] >= my_costs[i] - room:
            fits += 1
        for j in (settles - 1, settles, fits - 1, fits, batch_size - 1):
            if not 0 <= j < batch_size:
                continue
            difference = my_costs[i] - their_costs[j]
            if difference <= 0 or difference >= gap:
                continue
            score = float(tokens + _tokens_moved(theirs[j], light, heavy, sizes, batch_size))
            score += _SETTLED * tokens_per_cost * abs(excess - difference)
            score += _WITHIN_ROOM * tokens_per_cost * max(difference - room, 0)
            if score < best_score:
                best_i, best_j, best_score = i, j, score
    return best_i, best_j, best_score


@compiled
def _tokens_moved(slot: int, rank: int, other: int, sizes: NDArray[np.int64], batch_size: int) -> int:
    """Return how many more tokens are away from home once a slot goes from one rank to another."""
    home = slot // batch_size
    if home == rank:
        return int(sizes[slot])
    return -int(sizes[slot]) if home == other else 0
