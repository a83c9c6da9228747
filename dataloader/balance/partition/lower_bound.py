"""What no assignment can be below."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled


@compiled
def lower_bound_of(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> int:
    """Return a load that the heaviest rank cannot be below, where each rank gets B slots; see `partition.lower_bound`.

    Args:
        costs: int64 [W * B].
        order: int64 [W * B], the slots by descending cost.
        world_size: W.

    """
    size = len(order)
    batch_size = size // world_size
    bound = np.int64(0)
    # Any k ranks that hold the k largest have k * B slots, so at least the k * (B - 1) smallest beside them.
    total = np.int64(0)
    smallest = size
    for k in range(1, world_size + 1):
        total += costs[order[k - 1]]
        for _ in range(batch_size - 1):
            smallest -= 1
            total += costs[order[smallest]]
        bound = max(bound, -(-total // k))
    # Of the k * W + 1 largest, k + 1 share a rank, with at least the B - k - 1 smallest beside them.
    for k in range(1, batch_size):
        together = np.int64(0)
        for i in range(k * world_size - k, k * world_size + 1):
            together += costs[order[i]]
        for i in range(size - (batch_size - k - 1), size):
            together += costs[order[i]]
        bound = max(bound, together)
    return int(bound)
