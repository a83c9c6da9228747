"""The slots of many steps, the algorithms on them, and which rank gets which part.

Each is one compiled loop over S steps: steps are planned on a thread that shares the GIL with training.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.lpt import karmarkar_karp, lpt_swap
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending, sums_by_rank
from evenrank.dataloader.balance.partition.swaps import balance_within_token_limit, min_move

PADDING = -1
MAX_TOTAL = float(1 << 62)
BUILT_IN: Final = {"none": 0, "karmarkar-karp": 1, "lpt-swap": 2, "min-move": 3}
"""Numbers of the strategies of the package."""
_KARMARKAR_KARP, _LPT_SWAP, _MIN_MOVE = 1, 2, 3


@compiled
def read_slots(
    costs: NDArray[np.int64], tokens: NDArray[np.int64], num_real: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], bool, bool]:
    """Return the homes [n] and the order [S, n] of slots (see `PartitionProblem`), lower bounds [S], and validity.

    Given the values of all rows, [S, n], which become those of the slots: 0 for padding. `num_real` are the samples of
    each rank, [S, W]. Tokens can be empty. For the validity of costs and of tokens see `_are_valid`.
    """
    (num_steps, num_slots), world_size = costs.shape, num_real.shape[1]
    batch_size = num_slots // world_size
    home = np.empty(num_slots, dtype=np.int32)
    for rank in range(world_size):
        home[rank * batch_size : (rank + 1) * batch_size] = rank
    order, bounds = np.empty_like(costs), np.empty(num_steps, dtype=np.int64)
    costs_are_valid, tokens_are_valid = True, True
    for step in range(num_steps):
        for rank in range(world_size):
            for slot in range(rank * batch_size + num_real[step, rank], (rank + 1) * batch_size):
                costs[step, slot] = 0
                if tokens.shape[1]:
                    tokens[step, slot] = 0
        order[step] = argsort_descending(costs[step])
        bounds[step] = heaviest_load_bound(costs[step], order[step], world_size)
        costs_are_valid &= _are_valid(costs[step])
        tokens_are_valid &= _are_valid(tokens[step])
    return home, order, bounds, costs_are_valid, tokens_are_valid


@compiled
def assign_slots(
    strategy: int,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    home: NDArray[np.int32],
    world_size: int,
    targets: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Return the rank of each slot, int32 [S, n], by one of the strategies of the package, given its number.

    Tokens are [S, n], or [S, 0] where they are not known; `order`, `home` and targets [S] are those of `read_slots`.
    """
    rank_of = np.empty(costs.shape, dtype=np.int32)
    for step in range(len(costs)):
        if strategy == _MIN_MOVE:
            moved = tokens[step] if tokens.shape[1] else costs[step]
            rank_of[step] = min_move(costs[step], moved, order[step], world_size, targets[step])
        elif strategy in (_LPT_SWAP, _KARMARKAR_KARP):
            if strategy == _LPT_SWAP:
                part_of = lpt_swap(costs[step], order[step], world_size, targets[step])
            else:
                part_of = karmarkar_karp(costs[step], order[step], world_size)
            rank_of[step] = relabel(part_of, tokens[step], home, world_size) if tokens.shape[1] else part_of
        else:
            rank_of[step] = home
    return rank_of


@compiled
def keep_token_limit(
    rank_of: NDArray[np.int32],
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    home: NDArray[np.int32],
    targets: NDArray[np.int64],
    world_size: int,
    max_tokens: int,
    moves: bool,
) -> NDArray[np.int64]:
    """Return the most tokens of a rank in each step, int64 [S]; steps beyond the limit are assigned anew if it `moves`.

    `rank_of`, [S, n], changes in place.
    """
    most = np.empty(len(costs), dtype=np.int64)
    for step in range(len(costs)):
        most[step] = sums_by_rank(tokens[step], rank_of[step], world_size).max()
        if moves and most[step] > max_tokens:
            part_of = balance_within_token_limit(
                costs[step], tokens[step], order[step], world_size, max_tokens, targets[step]
            )
            rank_of[step] = relabel(part_of, tokens[step], home, world_size)
            most[step] = sums_by_rank(tokens[step], rank_of[step], world_size).max()
    return most


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
def mark_padding(rank_of: NDArray[np.int32], num_real: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return who trains on each row, int32 [S, W, B], -1 for padding, given the ranks of all slots, [S, W * B]."""
    num_steps, world_size = num_real.shape
    of_rows = rank_of.copy().reshape(num_steps, world_size, -1)
    for step in range(num_steps):
        for rank in range(world_size):
            of_rows[step, rank, num_real[step, rank] :] = PADDING
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

    Cost: O(W B + B^2) given the sorted order. Trade-off: not always reachable; docs/results/balancing.md shows the
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
