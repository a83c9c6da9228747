"""Relabelling: choose which rank gets which part, so that many tokens stay where they are.

The parts of a partition are interchangeable, so their ranks are free. A greedy matching by weight: the part and the
rank with the most tokens in common are matched first, then the next pair, and so on.

Cost: O(W B) and one sort of W B numbers. Trade-off: greedy, so the tokens that stay are at least half of the maximum.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.radix_sort import argsort_descending


@compiled
def relabel(part_of: NDArray[np.int32], tokens: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Assign parts to the ranks that have most of their tokens already; the remaining parts in order.

    Args:
        part_of: int32 [W * B], the part of each slot; each part occurs B times.
        tokens: int64 [W * B], of each slot.
        world_size: W.

    Returns:
        int32 [W * B], the rank of each slot.

    """
    batch_size = len(part_of) // world_size
    # Slots are in rank order, so in the list of a part those with the same home are adjacent.
    homes = np.empty((world_size, batch_size), dtype=np.int64)  # [part, i]: home of its i-th run of slots
    common_tokens = np.zeros((world_size, batch_size), dtype=np.int64)  # [part, i]: tokens of that run
    num_homes = np.zeros(world_size, dtype=np.int64)
    for slot in range(len(part_of)):
        part, home = part_of[slot], slot // batch_size
        last = num_homes[part] - 1
        if last < 0 or homes[part, last] != home:
            last += 1
            num_homes[part] += 1
            homes[part, last] = home
        common_tokens[part, last] += tokens[slot]
    rank_of_part = np.full(world_size, -1, dtype=np.int32)
    is_taken = np.zeros(world_size, dtype=np.bool_)
    for pair in argsort_descending(common_tokens.reshape(-1)):
        part, i = pair // batch_size, pair % batch_size
        if i < num_homes[part] and rank_of_part[part] < 0 and not is_taken[homes[part, i]]:
            rank_of_part[part] = homes[part, i]
            is_taken[homes[part, i]] = True
    rank = 0
    for part in range(world_size):
        if rank_of_part[part] < 0:
            while is_taken[rank]:
                rank += 1
            rank_of_part[part] = rank
            is_taken[rank] = True
    return rank_of_part[part_of]
