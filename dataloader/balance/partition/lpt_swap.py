"""LPT followed by local search, from up to three starts. The best balance of the strategies.

The starts differ in what an open place counts as in `lpt`. The search stops at the first result within the target.

Cost: O(W B log W) and the swaps, of which LPT leaves few. Trade-off: like every partition from scratch it moves most
samples; `relabel` afterwards keeps some of them on their ranks.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition.local_search import local_search
from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, lpt
from evenrank.dataloader.balance.partition.rank_loads import make_rank_loads

# In the order in which they are tried. Found by trial over lognormal and Zipf lengths and batches of 4 to 128: the
# first is enough except for some batches of 4 to 16.
_OPEN_PLACE_PERCENTILES = (5, 0, 25)


@compiled
def lpt_swap(costs: NDArray[np.int64], order: NDArray[np.int64], world_size: int, target: int) -> NDArray[np.int32]:
    """Assign slots by LPT and level them by swaps, from another start as long as a rank is above `target`.

    All slots stay if no rank is above `target` before balancing, or if the result would not be lighter.

    Args:
        costs: int64 [W * B], in rank order.
        order: int64 [W * B], the slots by descending cost.
        world_size: W.
        target: the load that is good enough.

    Returns:
        int32 [W * B], the rank of each slot: the first result within `target`, else the best.

    """
    batch_size = len(costs) // world_size
    best = np.empty(len(costs), dtype=np.int32)
    best_load = np.int64(0)
    for rank in range(world_size):
        best[rank * batch_size : (rank + 1) * batch_size] = rank
        best_load = max(best_load, costs[rank * batch_size : (rank + 1) * batch_size].sum())
    for percentile in _OPEN_PLACE_PERCENTILES:
        if best_load <= target:
            break
        rank_of = lpt(costs, order, world_size, percentile, IGNORE_HOME)
        state = make_rank_loads(costs, order, rank_of, world_size)
        local_search(state, costs, order, target)
        if state.loads.max() < best_load:
            best, best_load = rank_of, state.loads.max()
    return best
