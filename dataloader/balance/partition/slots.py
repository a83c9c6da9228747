"""The slots of a step: what a strategy is given, whether what it returns is valid, and padding marked in the result.

Each is one compiled loop: a step is planned on a thread that shares the GIL with training.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.balance.partition.lower_bound import heaviest_load_bound
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending

PADDING = -1
MAX_TOTAL = float(1 << 62)


class Slots(NamedTuple):
    """The n = W * B slots of a step; see `PartitionProblem`."""

    costs: NDArray[np.int64]  # [n], 0 for padding
    tokens: NDArray[np.int64]  # [n], 0 for padding; empty if they are not known
    home: NDArray[np.int32]  # [n]
    order: NDArray[np.int64]  # [n]
    lower_bound: int  # of the heaviest load
    are_costs_valid: bool  # see `_are_valid`
    are_tokens_valid: bool


@compiled
def read_slots(costs: NDArray[np.int64], tokens: NDArray[np.int64], num_real: NDArray[np.int64]) -> Slots:
    """Return the slots of a step, given the samples of each rank, [W], and values of all rows, which become the slots'.

    They are [n]; tokens can be empty.
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
    bound = heaviest_load_bound(costs, order, world_size)
    return Slots(costs, tokens, home, order, bound, _are_valid(costs), _are_valid(tokens))


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
