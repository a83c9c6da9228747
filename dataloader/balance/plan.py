"""`plan_steps`: which rank trains on which sample; `assign_to_steps`: which step of a window has which sample.

All plans are made here: by ranks together, by a rank alone, of windows and packed steps, and in simulations.

A sample that costs more than the mean of the ranks makes its step last as long as it does, whoever trains on it. So the
samples of the S steps of a window are assigned to these steps before each is balanced over its W ranks:

1. The partition assigns them to S * W bins, as if these were the ranks of one step.
2. The W heaviest bins go to one step, the next W to another, and so on: a step waits for its heaviest bin, so heavy
   bins are together. Bins of about equal load are mixed, so that steps differ by chance alone.
3. The steps come in a random order, so that no window begins with its heaviest step.

W = 2, B = 2, S = 2: with the costs 9 1 1 1, 9 1 1 1 of two steps, each step has a rank with a load of 10. As a window,
one step has the loads 10 10, the other one 2 2.

Where samples are padded to the longest of their rank, the most expensive sample of a step sets its time. Then samples
are sorted by cost and steps get neighbours, for which the sum of the steps' largest costs is the least possible.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.partition.strategies import partition, partition_steps, real_rows, unbalanced
from evenrank.datasets.order import permute

# Loads count as equal within this fraction of their mean. A step with bins of 0.99 to 1.01 times the mean waits 1 % for
# the heaviest; sorting also within that would group samples by length: LPT fills bins with one long sample first.
_EQUAL_WITHIN = 0.01


def plan_steps(
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    config: BalanceConfig,
    *,
    num_real: NDArray[np.int64] | None = None,
    epoch: int = 0,
    steps: Sequence[int] = (0,),
) -> NDArray[np.int32]:
    """Return who trains on the samples of S steps, int32 [S, W, B], -1 for padding, given int64 values of this shape.

    `num_real` are the samples of each rank, int64 [S, W], which come before its padding; None: all rows. `steps` are
    the numbers of the steps in their epoch.
    """
    limit, (num_steps, world_size, _) = config.max_tokens_per_rank, costs.shape
    # Where steps are packed, a sample that is longer than the limit has a rank to itself.
    limited = np.minimum(tokens, limit) if config.pack and limit is not None else tokens
    costs, limited = costs.reshape(num_steps, -1), limited.reshape(num_steps, -1)
    plan = partition_steps(costs, world_size, tokens=limited, num_real=num_real, **config.partition_options)
    for index, step in enumerate(steps):
        if not config.balances(epoch, step):
            of_step = real_rows(plan.shape[2], world_size, None if num_real is None else num_real[index])
            plan[index] = unbalanced(of_step).rank_of
    return plan


def in_rows(values: NDArray[np.int64], is_real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the values [n] of samples as int64 [W, B], with zeros at padding; a view if there is none."""
    if len(values) == is_real.size:
        return values.reshape(is_real.shape)
    rows = np.zeros(is_real.shape, dtype=np.int64)
    rows[is_real] = values
    return rows


def assign_to_steps(
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    num_steps: int,
    world_size: int,
    config: BalanceConfig,
    *,
    seed: int,
    epoch: int,
    batch_size: int | None = None,
) -> NDArray[np.int64]:
    """Return the step of each of the n samples of a window, 0..num_steps-1: int64 [n].

    `costs` and `tokens` are int64 [n]. Each window needs another seed. `batch_size` None: the steps are full; else a
    step may have fewer samples.
    """
    order_of_steps, count = _shuffled(num_steps, seed=seed, epoch=2 * epoch + 1), len(costs)
    if config.partition_options["padded"]:
        step_of = np.empty(count, dtype=np.int64)
        sizes = np.diff(np.arange(num_steps + 1) * count // num_steps)
        step_of[np.argsort(-costs, kind="stable")] = np.repeat(order_of_steps, sizes)
        return step_of
    num_bins = num_steps * world_size
    if batch_size is not None:
        # Rows without samples cost nothing, so they come last in a bin.
        costs, tokens = (np.pad(values, (0, num_bins * batch_size - count)) for values in (costs, tokens))
    # Nothing moves between ranks here, so tokens matter for the limit alone.
    limited = None if config.max_tokens_per_rank is None else tokens
    bins = partition(costs, num_bins, tokens=limited, **config.partition_options)
    loads = bins.loads(costs)
    mean = max(int(loads.sum()) // num_bins, 1)  # of integers: their sum does not depend on the order of adding
    rounded = np.rint(loads / mean / _EQUAL_WITHIN)
    by_chance = _shuffled(num_bins, seed=seed, epoch=2 * epoch)
    by_load = by_chance[np.argsort(-rounded[by_chance], kind="stable")]
    step_of_bin = np.empty(num_bins, dtype=np.int64)
    step_of_bin[by_load] = np.repeat(order_of_steps, world_size)
    of_samples: NDArray[np.int64] = step_of_bin[bins.rank_of.reshape(-1)[:count]]
    return of_samples


def _shuffled(count: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    # Of a few elements alone, `permute` yields some orders more often than others.
    return np.argsort(permute(np.arange(count), 1 << 62, seed=seed, epoch=epoch))
