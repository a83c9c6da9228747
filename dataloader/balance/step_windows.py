"""Windows of several steps whose samples may change steps, so that an epoch waits less for its heaviest ranks.

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

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.datasets.order import SampleOrder, permute

# Loads count as equal within this fraction of their mean. A step with bins of 0.99 to 1.01 times the mean waits 1 % for
# the heaviest; sorting also within that would group samples by length: LPT fills bins with one long sample first.
_EQUAL_WITHIN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """The windows of the positions of an epoch."""

    start: int
    # End of the first windows: they have the pending samples of a window that a job was resumed in, up to the end of a
    # step.
    first_end: int
    end: int  # end of the last full step; a step that is not full has no window
    samples_per_step: int
    steps: int  # of a window; the last one may have fewer

    def bounds(self, position: int) -> tuple[int, int]:
        """Return the start and the end of the window that has this position; from `end` on, the position twice."""
        if position >= self.end:
            return position, position
        size = self.steps * self.samples_per_step
        start, end = (self.start, self.first_end) if position < self.first_end else (self.first_end, self.end)
        first = position - (position - start) % size
        return first, min(first + size, end)


class WindowedOrder:
    """An order in which the samples of each window come step by step, as `assign_window` assigns them."""

    def __init__(self, order: SampleOrder, windows: Windows, assign_window: "AssignWindow") -> None:
        self.windows = windows
        self.underlying = order
        self._assign_window = assign_window

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""
        return self.underlying.num_samples

    def positions(self, places: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the positions in the underlying order of the samples at these places: int64 of the same shape."""
        positions = places.copy()
        left = np.flatnonzero(places < self.windows.end)
        while len(left):
            first, end = self.windows.bounds(int(places[left[0]]))
            in_window = (first <= places[left]) & (places[left] < end)
            of_window, left = left[in_window], left[~in_window]
            indices = self._assign_window(self.underlying, first, end, seed=seed, epoch=epoch)
            positions[of_window] = indices[places[of_window] - first]
            positions[of_window] += first
        return positions

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at these positions."""
        return self.underlying.rows(self.positions(positions, seed=seed, epoch=epoch), seed=seed, epoch=epoch)

    def fingerprint(self) -> tuple[object, ...]:
        """Return everything that the order depends on, besides seed, epoch and costs."""
        return (*self.underlying.fingerprint(), "windows", self.windows)


class AssignWindow(Protocol):
    """Assigns the samples of a window of an order to its steps."""

    def __call__(self, order: SampleOrder, first: int, end: int, *, seed: int, epoch: int) -> NDArray[np.integer[Any]]:
        """Return the indices of the samples at positions first..end-1, step by step: integers [end - first]."""


def assign_to_steps(
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    num_steps: int,
    world_size: int,
    config: BalanceConfig,
    *,
    seed: int,
    epoch: int,
) -> NDArray[np.int64]:
    """Return the indices of the n samples of a window, step by step, ascending in each: int64 [n].

    `costs` and `tokens` are int64 [n] for full steps. Each window needs another seed.
    """
    order_of_steps = _shuffled(num_steps, seed=seed, epoch=2 * epoch + 1)
    if config.partition_options["padded"]:
        step_of = np.empty(len(costs), dtype=np.min_scalar_type(num_steps))
        step_of[np.argsort(-costs, kind="stable")] = np.repeat(order_of_steps, len(costs) // num_steps)
        return np.argsort(step_of, kind="stable")
    num_bins = num_steps * world_size
    # Nothing moves between ranks here, so tokens matter for the limit alone.
    limited = None if config.max_tokens_per_rank is None else tokens
    bins = partition(costs, num_bins, tokens=limited, **config.partition_options)
    loads = bins.loads(costs)
    mean = max(int(loads.sum()) // num_bins, 1)  # of integers: their sum does not depend on the order of adding
    rounded = np.rint(loads / mean / _EQUAL_WITHIN)
    by_chance = _shuffled(num_bins, seed=seed, epoch=2 * epoch)
    by_load = by_chance[np.argsort(-rounded[by_chance], kind="stable")]
    step_of_bin = np.empty(num_bins, dtype=np.min_scalar_type(num_steps))  # narrow integers are sorted faster
    step_of_bin[by_load] = np.repeat(order_of_steps, world_size)
    return np.argsort(step_of_bin[bins.rank_of.reshape(-1)], kind="stable")


def _shuffled(count: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    # Of a few elements alone, `permute` yields some orders more often than others.
    return np.argsort(permute(np.arange(count), 1 << 62, seed=seed, epoch=epoch))
