"""A lower bound on the heaviest load of any assignment of B slots to each of W ranks.

The largest of two pigeonhole bounds (compare Dell'Amico and Martello, "Bounds for the cardinality constrained P||Cmax
problem", 2001):

- for k = 1..W: k ranks that hold the k largest costs have k B slots, so at least the k (B - 1) smallest costs as well;
  one of them has at least the mean. k = W gives the mean load of all ranks.
- for k = 1..B-1: of the k W + 1 largest costs, k + 1 are on one rank: at least the k + 1 smallest of those, and the
  B - k - 1 smallest of all.

Cost: O(W B + B^2) given the sorted order. Trade-off: not always reachable; docs/results/planner.md shows the distance.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled


@compiled
def heaviest_load_bound(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> int:
    """Return a load that the heaviest rank has at least."""
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
