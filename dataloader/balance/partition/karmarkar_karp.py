"""Karmarkar-Karp: the largest differencing method with equal counts. The baseline that the other strategies beat.

Each run of W slots in descending order starts as a group of W parts of one slot. The two groups with the largest spread
(heaviest minus lightest part) are merged, the heaviest part of one with the lightest part of the other, until one group
remains. Karmarkar and Karp, "The differencing method of set partitioning", 1982; with equal counts and more than two
parts Michiels, Korst, Aarts and van Leeuwen, "Performance ratios for the differencing method applied to the balanced
number partitioning problem", 2003.

Cost: O(B (B + W log W)). Trade-off: every rank gets one slot of each sorted run of W, so a heavy tail of costs stays
uneven, and nearly all slots change ranks.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled


@compiled
def karmarkar_karp(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Assign slots by largest differencing.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        world_size: W.

    Returns:
        int32 [W * B], the rank of each slot; each rank occurs B times.

    """
    num_groups = len(costs) // world_size
    sums = costs[order].copy().reshape(num_groups, world_size)  # of each part, descending within a group
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
        descending = np.argsort(-sums[first], kind="mergesort")
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


# Karmarkar-Karp without equal counts: the largest differencing method, for batches that need no fixed size.
#
# Each slot starts as a group of W parts, of which one has the slot and the others are empty. The two groups with the
# largest spread (heaviest minus lightest part) are merged, the heaviest part of one with the lightest part of the
# other,
# until one group remains. Karmarkar and Karp, "The differencing method of set partitioning", 1982.
#
# Of n slots min(n, W) parts end up with one at least: merging groups that have p and q of them gives min(p + q, W),
# because empty parts are the lightest of a group.
#
# Cost: O(n W), and a sort of W parts wherever two groups without empty parts are merged: a step of 64 ranks with 32
# samples each takes milliseconds, one of 1,024 ranks most of a second. Trade-off: closer to the mean than with equal
# counts, but ranks have different numbers of samples, so the cost must say all that they differ in.


@compiled
def largest_differencing(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Assign slots by largest differencing.

    Args:
        costs: int64 [n].
        order: int64 [n], the slots by descending cost.
        world_size: W.

    Returns:
        int32 [n], the rank of each slot; each rank occurs at least once if n is at least W.

    """
    num_slots = len(costs)
    rank_of = np.zeros(num_slots, dtype=np.int32)
    if num_slots == 0 or world_size == 1:
        return rank_of
    # Parts and groups are known by the slot that they started with. A part is a linked list of slots; a group is a
    # linked list of the parts that are not empty, by descending sum.
    sums = costs.copy()
    next_slot = np.full(num_slots, -1, dtype=np.int64)
    last_slot = np.arange(num_slots)
    heaviest_part = np.arange(num_slots)
    next_part = np.full(num_slots, -1, dtype=np.int64)
    num_parts = np.ones(num_slots, dtype=np.int64)
    groups = [(-costs[slot], slot) for slot in order]  # by descending spread; sorted, so it is a heap
    parts = np.empty(world_size, dtype=np.int64)
    other_parts = np.empty(world_size, dtype=np.int64)
    changed = np.empty(world_size, dtype=np.int64)
    while len(groups) > 1:
        group, other = heapq.heappop(groups)[1], heapq.heappop(groups)[1]
        if num_parts[group] < num_parts[other]:
            group, other = other, group
        num, num_other = num_parts[group], num_parts[other]
        _list_parts(heaviest_part[group], next_part, parts)
        _list_parts(heaviest_part[other], next_part, other_parts)
        # Part i joins part W - 1 - i of the other group. The heaviest parts of each join empty ones, if there are any.
        num_kept, num_changed = min(num, world_size - num_other), min(num_other, world_size - num)
        for i in range(num_changed):
            changed[i] = other_parts[i]
        for i in range(num_kept, num):
            part, joining = parts[i], other_parts[world_size - 1 - i]
            sums[part] += sums[joining]
            next_slot[last_slot[part]] = joining
            last_slot[part] = last_slot[joining]
            changed[num_changed] = part
            num_changed += 1
        descending = changed[:num_changed][np.argsort(-sums[changed[:num_changed]], kind="mergesort")]
        lightest = _link(heaviest_part, next_part, group, parts[:num_kept], descending, sums)
        num_parts[group] = num_kept + num_changed
        spread = sums[heaviest_part[group]]
        if num_parts[group] == world_size:
            spread -= sums[lightest]
        heapq.heappush(groups, (-spread, group))
    part = heaviest_part[groups[0][1]]
    for rank in range(num_parts[groups[0][1]]):
        slot = part
        while slot >= 0:
            rank_of[slot] = rank
            slot = next_slot[slot]
        part = next_part[part]
    return rank_of


@compiled
def _list_parts(part: int, next_part: NDArray[np.int64], parts: NDArray[np.int64]) -> None:
    """Write the parts of a group to `parts`, given its heaviest one."""
    i = 0
    while part >= 0:
        parts[i] = part
        part = next_part[part]
        i += 1


@compiled
def _link(
    heaviest_part: NDArray[np.int64],
    next_part: NDArray[np.int64],
    group: int,
    kept: NDArray[np.int64],
    changed: NDArray[np.int64],
    sums: NDArray[np.int64],
) -> int:
    """Make a group consist of two lists of parts, each by descending sum; return its lightest part."""
    previous = np.int64(-1)
    i, j = 0, 0
    while i < len(kept) or j < len(changed):
        if j == len(changed) or (i < len(kept) and sums[kept[i]] >= sums[changed[j]]):
            part = kept[i]
            i += 1
        else:
            part = changed[j]
            j += 1
        if previous < 0:
            heaviest_part[group] = part
        else:
            next_part[previous] = part
        previous = part
    next_part[previous] = -1
    return int(previous)
