"""Parts of an equal division are equal: which rank gets which part is free, and some choices move less."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.partition.radix_sort import descending


@compiled
def relabel(rank_of: NDArray[np.int32], sizes: NDArray[np.int64], world_size: int) -> NDArray[np.int32]:
    """Give parts to the ranks that have most of them already.

    The part and the rank that have the most tokens in common are matched first, then the next, and so on; what is left
    is matched in order.

    Args:
        rank_of: int32 [W * B], the part of each slot; each part B times.
        sizes: int64 [W * B], the tokens of each slot.
        world_size: W.

    Returns:
        int32 [W * B], the rank of each slot.

    """
    batch_size = len(rank_of) // world_size
    # Slots come rank after rank, so those of one part and one home follow each other in the part's list.
    homes = np.empty((world_size, batch_size), dtype=np.int64)
    common = np.zeros((world_size, batch_size), dtype=np.int64)
    counts = np.zeros(world_size, dtype=np.int64)
    for slot in range(len(rank_of)):
        part, home = rank_of[slot], slot // batch_size
        last = counts[part] - 1
        if last < 0 or homes[part, last] != home:
            last += 1
            counts[part] += 1
            homes[part, last] = home
        common[part, last] += sizes[slot]
    label_of = np.full(world_size, -1, dtype=np.int32)
    is_taken = np.zeros(world_size, dtype=np.bool_)
    for pair in descending(common.reshape(-1)):
        part, at = pair // batch_size, pair % batch_size
        if at < counts[part] and label_of[part] < 0 and not is_taken[homes[part, at]]:
            label_of[part] = homes[part, at]
            is_taken[homes[part, at]] = True
    rank = 0
    for part in range(world_size):
        if label_of[part] < 0:
            while is_taken[rank]:
                rank += 1
            label_of[part] = rank
            is_taken[rank] = True
    return label_of[rank_of]
