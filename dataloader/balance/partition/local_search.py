"""Levelling: the heaviest rank swaps a slot with another rank, again and again."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.rank_loads import Dealt, heaviest_rank, hide, lightest_rank, show, swap

_LIGHTEST = 16  # ranks that the heaviest one is tried with first
_CHEAPEST = 256  # of the cheapest slots of ranks that have room, those that are looked at if none of these helps


@compiled
def swap_down(dealt: Dealt, costs: NDArray[np.int64], order: NDArray[np.int64], target: int) -> None:
    """Swap slots of the heaviest rank with those of others until no load is above `target`, or no swap is found.

    Args:
        dealt: who has what; changed in place. Its heaviest load only ever becomes smaller.
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        target: the load that is good enough.

    """
    while True:
        heavy = heaviest_rank(dealt)
        if dealt.loads[heavy] <= target:
            return
        i, light, j = _level_with_lightest(dealt, heavy)
        if i < 0:
            i, light, j = _take_cheapest(dealt, costs, order, heavy, target)
        if i < 0:
            return
        swap(dealt, heavy, i, light, j)


@compiled
def _level_with_lightest(dealt: Dealt, heavy: int) -> tuple[int, int, int]:
    """Find the swap that best levels the heaviest rank with the lightest one that has any to offer.

    Returns:
        Position in slots[heavy], the other rank, position in its slots; -1 if there is none.

    """
    hidden = np.empty(_LIGHTEST, dtype=np.int64)
    count, i, light, j = 0, -1, -1, -1
    while count < _LIGHTEST:
        light = lightest_rank(dealt)
        gap = dealt.loads[heavy] - dealt.loads[light]
        if gap <= 0:  # also once the heaviest is the lightest that is left
            break
        i, j = _best_swap(dealt.costs[heavy], dealt.costs[light], gap)
        if i >= 0:
            break
        hidden[count] = light
        count += 1
        hide(dealt, light)
    for rank in hidden[:count]:
        show(dealt, rank)
    return i, light, j


@compiled
def _best_swap(heavy: NDArray[np.int64], light: NDArray[np.int64], gap: int) -> tuple[int, int]:
    """Find the swap that levels two ranks best.

    Args:
        heavy: the costs of the rank with the larger load, descending.
        light: those of the other, likewise.
        gap: the difference of their loads, positive.

    Returns:
        Positions in `heavy` and `light`; -1, -1 if no swap narrows the gap.

    """
    best_i, best_j, best_left = -1, -1, gap
    j = 0
    for i in range(len(heavy)):
        # Moving a difference of gap / 2 would level them. As heavy[i] falls, so does the partner sought.
        while j < len(light) and 2 * light[j] > 2 * heavy[i] - gap:
            j += 1
        for candidate in (j - 1, j):
            if 0 <= candidate < len(light):
                left = abs(gap - 2 * (heavy[i] - light[candidate]))
                if left < best_left:
                    best_i, best_j, best_left = i, candidate, left
    return best_i, best_j


@compiled
def _take_cheapest(
    dealt: Dealt, costs: NDArray[np.int64], order: NDArray[np.int64], heavy: int, target: int
) -> tuple[int, int, int]:
    """Find a cheap slot of any rank below `target` for which the heaviest can give one away.

    A rank with a giant can only become lighter by cheaper slots beside it, and the lightest ranks need not have them.

    Returns:
        As `_level_with_lightest`.

    """
    best_i, best_slot, best_load = -1, -1, dealt.loads[heavy]
    mine = dealt.costs[heavy]
    seen = 0
    for at in range(len(order) - 1, -1, -1):
        slot = order[at]
        other = dealt.rank_of[slot]
        if other == heavy or dealt.loads[other] >= target:
            continue
        i = _position(mine, 2 * costs[slot] + dealt.loads[heavy] - dealt.loads[other])
        for candidate in (i - 1, i):
            if 0 <= candidate < len(mine):
                difference = mine[candidate] - costs[slot]
                load = max(dealt.loads[heavy] - difference, dealt.loads[other] + difference)
                if load < best_load:
                    best_i, best_slot, best_load = candidate, slot, load
        seen += 1
        if seen == _CHEAPEST:
            break
    if best_i < 0:
        return -1, -1, -1
    light = dealt.rank_of[best_slot]
    j = 0
    while dealt.slots[light, j] != best_slot:
        j += 1
    return best_i, light, j


@compiled
def _position(costs: NDArray[np.int64], doubled: int) -> int:
    """Return how many of the costs, in descending order, are above `doubled` / 2."""
    low, high = 0, len(costs)
    while low < high:
        middle = (low + high) // 2
        if 2 * costs[middle] > doubled:
            low = middle + 1
        else:
            high = middle
    return low
