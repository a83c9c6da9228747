"""Where no rank may have more than so many tokens."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.lpt_swap import longest_first_and_swaps
from evenrank.dataloader.balance.partition.radix_sort import descending
from evenrank.dataloader.balance.partition.rank_loads import Dealt, deal, heaviest_rank, hide, lightest_rank, show, swap

_LIGHTEST = 16  # ranks that the heaviest one is tried with


@compiled
def level_within(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    order: NDArray[np.int64],
    world_size: int,
    max_tokens: int,
    target: int,
) -> NDArray[np.int32]:
    """Deal by tokens, most first, until no rank has more than `max_tokens`; then level the costs within that.

    Args:
        costs: int64 [W * B].
        sizes: int64 [W * B], the tokens of each slot.
        order: int64 [W * B], the slots by descending cost.
        world_size: W.
        max_tokens: of a rank.
        target: the load that is good enough.

    Returns:
        int32 [W * B], the rank of each slot. If some rank has more than `max_tokens`, no better way was found.

    """
    rank_of = longest_first_and_swaps(sizes, descending(sizes), world_size, max_tokens)
    tokens = np.zeros(world_size, dtype=np.int64)
    for slot in range(len(sizes)):
        tokens[rank_of[slot]] += sizes[slot]
    if tokens.max() <= max_tokens:
        _swap_down_within(deal(costs, order, rank_of, world_size), sizes, tokens, max_tokens, target)
    return rank_of


@compiled
def _swap_down_within(
    dealt: Dealt,
    sizes: NDArray[np.int64],
    tokens: NDArray[np.int64],
    max_tokens: int,
    target: int,
) -> None:
    """Swap slots as `swap_down` does, but only where neither rank gets more than `max_tokens` by it.

    Args:
        dealt: who has what; no rank has more than `max_tokens`. Changed in place.
        sizes: int64 [W * B], the tokens of each slot.
        tokens: int64 [W], the tokens of each rank; changed in place.
        max_tokens: of a rank.
        target: the load that is good enough.

    """
    hidden = np.empty(min(_LIGHTEST, len(dealt.loads)), dtype=np.int64)
    while True:
        heavy = heaviest_rank(dealt)
        if dealt.loads[heavy] <= target:
            return
        i, light, j = -1, -1, -1
        count = 0
        while i < 0 and count < len(hidden):
            light = lightest_rank(dealt)
            if dealt.loads[light] >= dealt.loads[heavy]:
                break
            i, j = _best_swap_within(dealt, sizes, tokens, max_tokens, heavy, light)
            hidden[count] = light
            count += 1
            hide(dealt, light)
        for rank in hidden[:count]:
            show(dealt, rank)
        if i < 0:
            return
        difference = sizes[dealt.slots[heavy, i]] - sizes[dealt.slots[light, j]]
        tokens[heavy] -= difference
        tokens[light] += difference
        swap(dealt, heavy, i, light, j)


@compiled
def _best_swap_within(
    dealt: Dealt,
    sizes: NDArray[np.int64],
    tokens: NDArray[np.int64],
    max_tokens: int,
    heavy: int,
    light: int,
) -> tuple[int, int]:
    """Find the swap that levels two ranks best, among all pairs that leave both within `max_tokens`."""
    gap = dealt.loads[heavy] - dealt.loads[light]
    best_i, best_j, best_left = -1, -1, gap
    for i in range(dealt.slots.shape[1]):
        given = dealt.slots[heavy, i]
        for j in range(dealt.slots.shape[1]):
            taken = dealt.slots[light, j]
            left = abs(gap - 2 * (dealt.costs[heavy, i] - dealt.costs[light, j]))
            grows = sizes[given] - sizes[taken]
            if left < best_left and tokens[light] + grows <= max_tokens and tokens[heavy] - grows <= max_tokens:
                best_i, best_j, best_left = i, j, left
    return best_i, best_j
