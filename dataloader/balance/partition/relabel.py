"""Relabelling: choose which rank gets which part, so that many tokens stay where they are.

The parts of a partition are interchangeable, so their ranks are free. A greedy matching by weight: the part and the
rank with the most tokens in common are matched first, then the next pair, and so on.

Cost: O(n) and one sort of n numbers, for n slots. Trade-off: greedy, so it keeps at least half as many
tokens in place as the best matching would.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending


@compiled
def relabel(
    part_of: NDArray[np.int32], tokens: NDArray[np.int64], home: NDArray[np.int32], world_size: int
) -> NDArray[np.int32]:
    """Return the rank of each of n slots, given its part, 0..W-1, and its home, the rank that loaded it, ascending.

    Parts get the ranks that have most of their tokens already, and the remaining parts the remaining ranks in order.
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
