"""The compiled loops behind the strategies. They run without the interpreter's lock and break ties by index."""

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.compiled import compiled

# Partners that the heaviest rank is tried with, lightest first, before a swap is given up.
_PARTNERS = 16


@compiled
def _sift_down(heap: NDArray[np.int64], size: int, loads: NDArray[np.int64]) -> None:
    """Restore a heap of ranks, lightest at the top and the lower rank first among equals, below its changed top."""
    at = 0
    while True:
        best = at
        for child in (2 * at + 1, 2 * at + 2):
            if child < size:
                a, b = heap[child], heap[best]
                if loads[a] < loads[b] or (loads[a] == loads[b] and a < b):
                    best = child
        if best == at:
            return
        heap[at], heap[best] = heap[best], heap[at]
        at = best


@compiled
def longest_first(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Give each slot, the most expensive first, to the rank with the least load that has room for it.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        world_size: W.

    Returns:
        int32 [W * B], the rank of each slot; each rank B times.

    """
    batch_size = len(costs) // world_size
    loads = np.zeros(world_size, dtype=np.int64)
    counts = np.zeros(world_size, dtype=np.int64)
    rank_of = np.empty(len(costs), dtype=np.int32)
    heap = np.arange(world_size)
    size = world_size
    for slot in order:
        rank = heap[0]
        rank_of[slot] = rank
        loads[rank] += costs[slot]
        counts[rank] += 1
        if counts[rank] == batch_size:  # it is full, and leaves the heap
            size -= 1
            heap[0] = heap[size]
        _sift_down(heap, size, loads)
    return rank_of


@compiled
def _best_swap(
    heavy: NDArray[np.int64], light: NDArray[np.int64], costs: NDArray[np.int64], gap: int
) -> tuple[int, int, int]:
    """Find the swap that levels two ranks best.

    Args:
        heavy: the slots of the rank with the larger load, by descending cost.
        light: those of the other, likewise.
        costs: int64 [W * B].
        gap: the difference of their loads, positive.

    Returns:
        Positions in `heavy` and `light`, and the larger of what remains of the gap for either; -1, -1, gap if no swap
        narrows it.

    """
    best_i, best_j, best_left = -1, -1, gap
    j = 0
    for i in range(len(heavy)):
        # Moving a difference of gap / 2 would level them. As costs[heavy[i]] falls, so does the partner sought.
        wanted = 2 * costs[heavy[i]] - gap
        while j < len(light) and 2 * costs[light[j]] > wanted:
            j += 1
        for candidate in (j - 1, j):
            if 0 <= candidate < len(light):
                left = abs(gap - 2 * (costs[heavy[i]] - costs[light[candidate]]))
                if left < best_left:
                    best_i, best_j, best_left = i, candidate, left
    return best_i, best_j, best_left


@compiled
def _replace(slots: NDArray[np.int64], at: int, slot: int, costs: NDArray[np.int64]) -> None:
    """Put `slot` in the place of slots[at] and keep the order by descending cost, then ascending slot."""
    slots[at] = slot
    while at > 0 and (
        costs[slots[at - 1]] < costs[slot] or (costs[slots[at - 1]] == costs[slot] and slots[at - 1] > slot)
    ):
        slots[at], slots[at - 1] = slots[at - 1], slots[at]
        at -= 1
    while at + 1 < len(slots) and (
        costs[slots[at + 1]] > costs[slot] or (costs[slots[at + 1]] == costs[slot] and slots[at + 1] < slot)
    ):
        slots[at], slots[at + 1] = slots[at + 1], slots[at]
        at += 1


@compiled
def swap_down(costs: NDArray[np.int64], rank_of: NDArray[np.int32], target: int) -> NDArray[np.int32]:
    """Swap slots of the heaviest rank with those of lighter ones until no load is above `target`, or no swap helps.

    Args:
        costs: int64 [W * B].
        rank_of: int32 [W * B], each rank B times; changed in place.
        target: the load that is good enough.

    Returns:
        `rank_of`.

    """
    world_size = rank_of.max() + 1
    batch_size = len(costs) // world_size
    slots = np.empty((world_size, batch_size), dtype=np.int64)
    counts = np.zeros(world_size, dtype=np.int64)
    loads = np.zeros(world_size, dtype=np.int64)
    for slot in np.argsort(-costs, kind="mergesort"):
        rank = rank_of[slot]
        slots[rank, counts[rank]] = slot
        counts[rank] += 1
        loads[rank] += costs[slot]
    while True:
        heavy = np.argmax(loads)
        if loads[heavy] <= target:
            return rank_of
        improved = False
        for light in np.argsort(loads, kind="mergesort")[:_PARTNERS]:
            gap = loads[heavy] - loads[light]
            if gap <= 0:
                break
            i, j, left = _best_swap(slots[heavy], slots[light], costs, gap)
            if left < gap:
                a, b = slots[heavy, i], slots[light, j]
                rank_of[a], rank_of[b] = light, heavy
                loads[heavy] += costs[b] - costs[a]
                loads[light] += costs[a] - costs[b]
                _replace(slots[heavy], i, b, costs)
                _replace(slots[light], j, a, costs)
                improved = True
                break
        if not improved:
            return rank_of


@compiled
def karmarkar_karp(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Largest differencing with equal counts (Karmarkar and Karp, 1982; for more parts Michiels et al., 2003).

    Each run of W slots in descending order starts as W parts of one slot. The two groups of parts with the largest
    spread are merged, the heaviest part of one with the lightest of the other, and so on, until one group is left.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        world_size: W.

    Returns:
        int32 [W * B], the rank of each slot; each rank B times.

    """
    num_groups = len(costs) // world_size
    sums = costs[order].copy().reshape(num_groups, world_size)  # of each part, descending
    heads = order.copy().reshape(num_groups, world_size)  # each part is a chain of slots: first, last, and who follows
    tails = heads.copy()
    follows = np.full(len(costs), -1, dtype=np.int64)
    spread = sums[:, 0] - sums[:, world_size - 1]
    alive = np.ones(num_groups, dtype=np.bool_)
    for _ in range(num_groups - 1):
        first, second = -1, -1  # the two with the largest spread; the lower index among equals
        for group in range(num_groups):
            if alive[group]:
                if first < 0 or spread[group] > spread[first]:
                    first, second = group, first
                elif second < 0 or spread[group] > spread[second]:
                    second = group
        for part in range(world_size):
            other = world_size - 1 - part
            sums[first, part] += sums[second, other]
            follows[tails[first, part]] = heads[second, other]
            tails[first, part] = tails[second, other]
        descending = np.argsort(-sums[first], kind="mergesort")
        sums[first] = sums[first][descending]
        heads[first] = heads[first][descending]
        tails[first] = tails[first][descending]
        spread[first] = sums[first, 0] - sums[first, world_size - 1]
        alive[second] = False
    rank_of = np.empty(len(costs), dtype=np.int32)
    last = np.argmax(alive)
    for part in range(world_size):
        slot = heads[last, part]
        while slot >= 0:
            rank_of[slot] = part
            slot = follows[slot]
    return rank_of
