"""The data structures of the algorithms: sorted slots, a tournament tree, and the loads of ranks under swaps.

The tournament tree (Knuth, The Art of Computer Programming, volume 3, section 5.4.1) gives the lightest of W ranks and
updates the load of any rank in O(log W). It is a complete binary tree in an array: node 1 is the overall winner, nodes
2k and 2k + 1 play for node k, and rank r is leaf W' + r, where W' is W rounded up to a power of two. An entry is one
int64 with the load in its high bits and the rank in its low bits, so that one comparison compares loads first and ranks
second. Where both do not fit, loads lose low bits: very large ones are compared approximately.

`RankLoads` is the working state of swap-based algorithms. Slots of a rank are kept sorted by cost, and two trees give
the heaviest and the lightest rank, so a swap costs O(B + log W).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled

_ENTRY_BITS = 62
NO_ENTRY = 1 << _ENTRY_BITS  # loses against every entry
_INSERTION_SORT_BELOW = 64  # slots, by measurement: shorter inputs do not pay for counting digits


@compiled
def sums_by_rank(values: NDArray[np.int64], rank_of: NDArray[np.int32], world_size: int) -> NDArray[np.int64]:
    """Return the sum of the values of each rank: int64 [W], given values and ranks of n slots."""
    sums = np.zeros(world_size, dtype=np.int64)
    for slot in range(len(values)):
        sums[rank_of[slot]] += values[slot]
    return sums


@compiled
def argsort_descending(costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slots by descending cost, equal costs by ascending slot: `numpy.argsort(-costs, kind="stable")`.

    A least-significant-digit radix sort, O(n) for each digit of max(costs) - min(costs), and insertion sort for short
    inputs (Knuth, volume 3, sections 5.2.5 and 5.2.1). There must be a cost; costs may be negative.
    """
    size = len(costs)
    order = np.arange(size)
    if size <= _INSERTION_SORT_BELOW:
        for i in range(1, size):
            slot, j = order[i], i
            while j > 0 and costs[order[j - 1]] < costs[slot]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = slot
        return order
    highest, lowest = costs.max(), costs.min()
    digit_bits = 8 if size < 4096 else 11  # more bits mean fewer passes, but more counters to clear in each
    radix = 1 << digit_bits
    keys = highest - costs
    next_keys, next_order = np.empty_like(keys), np.empty_like(order)
    next_index = np.empty(radix, dtype=np.int64)  # per digit: where its next key goes
    shift = 0
    while shift < 63 and (highest - lowest) >> shift:  # shifting an int64 by 64 or more is undefined
        next_index[:] = 0
        for key in keys:
            next_index[(key >> shift) & (radix - 1)] += 1
        total = 0
        for digit in range(radix):
            count = next_index[digit]
            next_index[digit] = total
            total += count
        for i in range(size):
            digit = (keys[i] >> shift) & (radix - 1)
            index = next_index[digit]
            next_index[digit] = index + 1
            next_keys[index] = keys[i]
            next_order[index] = order[i]
        keys, next_keys = next_keys, keys
        order, next_order = next_order, order
        shift += digit_bits
    return order


@compiled
def rank_bits(world_size: int) -> int:
    """Return the number of low bits of an entry that hold the rank."""
    bits = 0
    while (1 << bits) < world_size:
        bits += 1
    return bits


@compiled
def load_shift(max_load: int, bits: int) -> int:
    """Return the number of low bits that loads up to `max_load` lose to fit next to a rank of `bits` bits."""
    shift = 0
    while max_load >> shift >= 1 << (_ENTRY_BITS - bits):
        shift += 1
    return shift


@compiled
def make_entry(load: int, rank: int, bits: int, shift: int) -> int:
    """Return the entry of a rank, given its `rank_bits` and `load_shift`."""
    return (load >> shift) << bits | rank


@compiled
def empty_tree(bits: int) -> NDArray[np.int64]:
    """Return a tree without entries, int64 [2 W']. Write entries to tree[W' + rank], then call `build`."""
    return np.full(2 << bits, NO_ENTRY)


@compiled
def build(tree: NDArray[np.int64]) -> None:
    """Play all games, given the leaves of `tree`, int64 [2 W']; changed in place."""
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


@compiled
def update(tree: NDArray[np.int64], rank: int, entry: int) -> None:
    """Replace a rank's entry and replay the games on its path to the root; `tree`, int64 [2 W'], changes in place."""
    node = len(tree) // 2 + rank
    tree[node] = entry
    while node > 1:
        entry = min(entry, tree[node ^ 1])
        node >>= 1
        tree[node] = entry


class RankLoads(NamedTuple):
    """An assignment under construction; all arrays are changed in place."""

    rank_of: NDArray[np.int32]  # [W * B]: the rank of each slot
    slots: NDArray[np.int64]  # [W, B]: the slots of each rank, by descending cost, then ascending slot
    costs: NDArray[np.int64]  # [W, B]: the costs of these slots
    loads: NDArray[np.int64]  # [W]: the sum of the costs of each rank
    lightest: NDArray[np.int64]  # tournament tree of the loads
    heaviest: NDArray[np.int64]  # tournament tree of the negated loads
    bits: int  # of a rank in an entry
    shift: int  # low bits that loads lose in an entry
    hidden: NDArray[np.int64]  # [W]: the first num_hidden[0] are ranks missing from `lightest`
    num_hidden: NDArray[np.int64]  # [1]


@compiled
def make_rank_loads(
    costs: NDArray[np.int64], order: NDArray[np.int64], rank_of: NDArray[np.int32], world_size: int
) -> RankLoads:
    """Return the state of an assignment. `rank_of` is not copied, so swaps change it."""
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
    lightest, heaviest = empty_tree(bits), empty_tree(bits)
    for rank in range(world_size):
        lightest[(1 << bits) + rank] = make_entry(loads[rank], rank, bits, shift)
        heaviest[(1 << bits) + rank] = _negated_entry(loads[rank], rank, bits, shift)
    build(lightest)
    build(heaviest)
    hidden, num_hidden = np.empty(world_size, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return RankLoads(rank_of, slots, slot_costs, loads, lightest, heaviest, bits, shift, hidden, num_hidden)


@compiled
def heaviest_rank(state: RankLoads) -> int:
    """Return the rank with the largest load."""
    return int(state.heaviest[1] & ((1 << state.bits) - 1))


@compiled
def lightest_rank(state: RankLoads) -> int:
    """Return the rank with the smallest load among those that are not hidden; not all ranks may be hidden."""
    return int(state.lightest[1] & ((1 << state.bits) - 1))


@compiled
def hide(state: RankLoads, rank: int) -> None:
    """Make `lightest_rank` skip a rank until `show_all`, to visit ranks in ascending order of load."""
    update(state.lightest, rank, NO_ENTRY)
    state.hidden[state.num_hidden[0]] = rank
    state.num_hidden[0] += 1


@compiled
def show_all(state: RankLoads) -> None:
    """Make `lightest_rank` find all ranks again."""
    for rank in state.hidden[: state.num_hidden[0]]:
        update(state.lightest, rank, make_entry(state.loads[rank], rank, state.bits, state.shift))
    state.num_hidden[0] = 0


@compiled
def swap(state: RankLoads, rank: int, i: int, other: int, j: int) -> None:
    """Exchange slots[rank, i] and slots[other, j]; no rank may be hidden."""
    slot, other_slot = state.slots[rank, i], state.slots[other, j]
    state.rank_of[slot], state.rank_of[other_slot] = other, rank
    cost, other_cost = state.costs[rank, i], state.costs[other, j]
    state.loads[rank] -= cost - other_cost
    state.loads[other] += cost - other_cost
    _replace(state.slots[rank], state.costs[rank], i, other_slot, other_cost)
    _replace(state.slots[other], state.costs[other], j, slot, cost)
    for changed in (rank, other):
        load = state.loads[changed]
        update(state.lightest, changed, make_entry(load, changed, state.bits, state.shift))
        update(state.heaviest, changed, _negated_entry(load, changed, state.bits, state.shift))


@compiled
def _negated_entry(load: int, rank: int, bits: int, shift: int) -> int:
    return (-(load >> shift)) << bits | rank  # a shift after the negation would round the other way


@compiled
def _replace(slots: NDArray[np.int64], costs: NDArray[np.int64], i: int, slot: int, cost: int) -> None:
    """Put `slot` in the position of slots[i], then restore the order: descending cost, then ascending slot."""
    while i > 0 and (costs[i - 1] < cost or (costs[i - 1] == cost and slots[i - 1] > slot)):
        slots[i], costs[i] = slots[i - 1], costs[i - 1]
        i -= 1
    while i + 1 < len(slots) and (costs[i + 1] > cost or (costs[i + 1] == cost and slots[i + 1] < slot)):
        slots[i], costs[i] = slots[i + 1], costs[i + 1]
        i += 1
    slots[i], costs[i] = slot, cost
