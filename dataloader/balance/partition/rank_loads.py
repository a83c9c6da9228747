"""Slots as they are dealt to ranks, in a form in which two can change places quickly."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.tournament_tree import ABSENT, enter, load_shift, play_all, rank_bits


class Dealt(NamedTuple):
    """Who has what; all arrays are changed in place."""

    rank_of: NDArray[np.int32]  # [W * B]: the rank of each slot
    slots: NDArray[np.int64]  # [W, B]: of each rank, by descending cost, then ascending slot
    costs: NDArray[np.int64]  # [W, B]: of these slots
    loads: NDArray[np.int64]  # [W]: sum of the costs of each rank
    lightest: NDArray[np.int64]  # a tournament for the least load
    heaviest: NDArray[np.int64]  # one for the largest: loads enter it negative
    bits: int  # of a rank in their entries
    shift: int  # bits that loads lose in them


@compiled
def deal(costs: NDArray[np.int64], order: NDArray[np.int64], rank_of: NDArray[np.int32], world_size: int) -> Dealt:
    """Look at an assignment; `rank_of` is kept, and changes with what is swapped.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        rank_of: int32 [W * B], each rank B times.
        world_size: W.

    """
    batch_size = len(costs) // world_size
    slots = np.empty((world_size, batch_size), dtype=np.int64)
    slot_costs = np.empty((world_size, batch_size), dtype=np.int64)
    counts = np.zeros(world_size, dtype=np.int64)
    loads = np.zeros(world_size, dtype=np.int64)
    for slot in order:
        rank = rank_of[slot]
        slots[rank, counts[rank]] = slot
        slot_costs[rank, counts[rank]] = costs[slot]
        counts[rank] += 1
        loads[rank] += costs[slot]
    bits = rank_bits(world_size)
    shift = load_shift(loads.sum(), bits)
    lightest, heaviest = np.full(2 << bits, ABSENT), np.full(2 << bits, ABSENT)
    for rank in range(world_size):
        lightest[(1 << bits) + rank] = (loads[rank] >> shift) << bits | rank
        heaviest[(1 << bits) + rank] = (-(loads[rank] >> shift)) << bits | rank
    play_all(lightest)
    play_all(heaviest)
    return Dealt(rank_of, slots, slot_costs, loads, lightest, heaviest, bits, shift)


@compiled
def heaviest_rank(dealt: Dealt) -> int:
    """Return the rank with the largest load."""
    return int(dealt.heaviest[1] & ((1 << dealt.bits) - 1))


@compiled
def lightest_rank(dealt: Dealt) -> int:
    """Return the rank with the least load of those that are not hidden."""
    return int(dealt.lightest[1] & ((1 << dealt.bits) - 1))


@compiled
def hide(dealt: Dealt, rank: int) -> None:
    """Let `lightest_rank` pass over a rank."""
    enter(dealt.lightest, rank, ABSENT)


@compiled
def show(dealt: Dealt, rank: int) -> None:
    """Let `lightest_rank` find a rank, at the load that it has now."""
    enter(dealt.lightest, rank, (dealt.loads[rank] >> dealt.shift) << dealt.bits | rank)


@compiled
def swap(dealt: Dealt, rank: int, i: int, other: int, j: int) -> None:
    """Let slots[rank, i] and slots[other, j] change places."""
    mine, theirs = dealt.slots[rank, i], dealt.slots[other, j]
    dealt.rank_of[mine], dealt.rank_of[theirs] = other, rank
    cost, other_cost = dealt.costs[rank, i], dealt.costs[other, j]
    dealt.loads[rank] -= cost - other_cost
    dealt.loads[other] += cost - other_cost
    _replace(dealt.slots[rank], dealt.costs[rank], i, theirs, other_cost)
    _replace(dealt.slots[other], dealt.costs[other], j, mine, cost)
    for changed in (rank, other):
        show(dealt, changed)
        enter(dealt.heaviest, changed, (-(dealt.loads[changed] >> dealt.shift)) << dealt.bits | changed)


@compiled
def _replace(slots: NDArray[np.int64], costs: NDArray[np.int64], at: int, slot: int, cost: int) -> None:
    """Put `slot` in the place of slots[at] and keep the order by descending cost, then ascending slot."""
    while at > 0 and (costs[at - 1] < cost or (costs[at - 1] == cost and slots[at - 1] > slot)):
        slots[at], costs[at] = slots[at - 1], costs[at - 1]
        at -= 1
    while at + 1 < len(slots) and (costs[at + 1] > cost or (costs[at + 1] == cost and slots[at + 1] < slot)):
        slots[at], costs[at] = slots[at + 1], costs[at + 1]
        at += 1
    slots[at], costs[at] = slot, cost
