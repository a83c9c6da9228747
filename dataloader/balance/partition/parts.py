"""Before and after an algorithm: the slots of a step, what is possible with them, and which rank gets which part.

Each is one compiled loop: a step is planned on a thread that shares the GIL with training.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending

PADDING = -1
MAX_TOTAL = float(1 << 62)


@compiled
def read_slots(
    costs: NDArray[np.int64], tokens: NDArray[np.int64], num_real: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64], int, bool, bool]:
    """Return the homes and the order of n slots (see `PartitionProblem`), a lower bound, and whether values are valid.

    Given the values of all rows, [n], which become those of the slots: 0 for padding. `num_real` are the samples of
    each rank, [W]. Tokens can be empty. For the validity of costs and of tokens see `_are_valid`.
    """
    world_size = len(num_real)
    batch_size = len(costs) // world_size
    home = np.empty(len(costs), dtype=np.int32)
    for rank in range(world_size):
        for slot in range(rank * batch_size, (rank + 1) * batch_size):
            home[slot] = rank
            if slot >= rank * batch_size + num_real[rank]:
                costs[slot] = 0
                if len(tokens):
                    tokens[slot] = 0
    order = argsort_descending(costs)
    return home, order, heaviest_load_bound(costs, order, world_size), _are_valid(costs), _are_valid(tokens)


@compiled
def _are_valid(values: NDArray[np.int64]) -> bool:
    """Return whether no value is negative and the sum is at most 2^62, so that sums of loads do not overflow."""
    total = 0.0
    for value in values:
        if value < 0:
            return False
        total += value
    return total <= MAX_TOTAL


@compiled
def slots_of_ranks(rank_of: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """Return the number of slots of each rank, int64 [W + 1], given the rank of each; the last one: of no rank."""
    counts = np.zeros(world_size + 1, dtype=np.int64)
    for rank in rank_of:
        counts[rank if 0 <= rank < world_size else world_size] += 1
    return counts


@compiled
def mark_padding(rank_of: NDArray[np.int32], num_real: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the rank that trains on each row, int32 [W, B], -1 for padding, given the ranks of all slots, [W * B]."""
    of_rows = rank_of.copy().reshape(len(num_real), -1)
    for rank in range(len(num_real)):
        of_rows[rank, num_real[rank] :] = PADDING
    return of_rows


@compiled
def heaviest_load_bound(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> int:
    """Return a load that the heaviest rank has at least, whatever the assignment of B slots to each of W ranks.

    The largest of two pigeonhole bounds (compare Dell'Amico and Martello, "Bounds for the cardinality constrained
    P||Cmax problem", 2001):

    - for k = 1..W: k ranks that hold the k largest costs have k B slots, so at least the k (B - 1) smallest costs as
      well; one of them has at least the mean. k = W gives the mean load of all ranks.
    - for k = 1..B-1: of the k W + 1 largest costs, k + 1 are on one rank: at least the k + 1 smallest of those, and the
      B - k - 1 smallest of all.

    Cost: O(W B + B^2) given the sorted order. Trade-off: not always reachable; docs/results/planner.md shows the
    distance.
    """
    size = len(order)
    batch_size = size // world_size
    bound = np.int64(0)
    total = np.int64(0)  # of the k largest and the k (B - 1) smallest costs
    next_smallest = size
    for k in range(1, world_size + 1):
        total += costs[order[k - 1]]
        for _ in range(batch_size - 1):
            next_smallest -= 1
            total += costs[order[next_smallest]]
        bound = max(bound, -(-total // k))
    for k in range(1, batch_size):
        shared = np.int64(0)  # least load of a rank with k + 1 of the k W + 1 largest costs
        for i in range(k * world_size - k, k * world_size + 1):
            shared += costs[order[i]]
        for i in range(size - (batch_size - k - 1), size):
            shared += costs[order[i]]
        bound = max(bound, shared)
    return int(bound)


@compiled
def relabel(
    part_of: NDArray[np.int32], tokens: NDArray[np.int64], home: NDArray[np.int32], world_size: int
) -> NDArray[np.int32]:
    """Return the rank of each of n slots, given its part, 0..W-1, and its home, the rank that loaded it, ascending.

    The parts of a partition are interchangeable, so their ranks are free: many tokens can stay where they are. A greedy
    matching by weight: the part and the rank with the most tokens in common are matched first, then the next pair, and
    so on; the remaining parts get the remaining ranks in order.

    Cost: O(n) and one sort of n numbers, for n slots. Trade-off: greedy, so it keeps at least half as many tokens in
    place as the best matching would.
    """
    num_slots = len(part_of)
    first_run = np.zeros(world_size, dtype=np.int64)  # of each part, in the arrays of runs
    for part in part_of:
        if part + 1 < world_size:
            first_run[part + 1] += 1
    first_run = np.cumsum(first_run)
    # Homes ascend, so in the list of a part the slots with the same home are adjacent: a run.
    run_part = np.full(num_slots, -1, dtype=np.int32)
    run_home = np.full(num_slots, -1, dtype=np.int32)
    run_tokens = np.zeros(num_slots, dtype=np.int64)
    next_run = first_run.copy()
    for slot in range(num_slots):
        part = part_of[slot]
        run = next_run[part] - 1
        if run < first_run[part] or run_home[run] != home[slot]:
            run = next_run[part]
            next_run[part] += 1
            run_part[run], run_home[run] = part, home[slot]
        run_tokens[run] += tokens[slot]
    rank_of_part = np.full(world_size, -1, dtype=np.int32)
    is_taken = np.zeros(world_size, dtype=np.bool_)
    for run in argsort_descending(run_tokens):
        part = run_part[run]
        if part >= 0 and rank_of_part[part] < 0 and not is_taken[run_home[run]]:
            rank_of_part[part] = run_home[run]
            is_taken[run_home[run]] = True
    rank = 0
    for part in range(world_size):
        if rank_of_part[part] < 0:
            while is_taken[rank]:
                rank += 1
            rank_of_part[part] = rank
            is_taken[rank] = True
    return rank_of_part[part_of]
