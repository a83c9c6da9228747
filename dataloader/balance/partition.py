"""Costs -> who trains what. Pure functions on whole numbers: every rank computes the same from the same.

A step has W * B slots, rank after rank: slot r * B + j is row j of rank r. A strategy gives each slot a rank, B slots
to each. Slots of padding cost nothing and take part as such, so no rank gets more than B samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.heuristics import karmarkar_karp, longest_first, swap_down
from evenrank.datasets.errors import ConfigError

_PADDING = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Who trains which sample of a step."""

    rank_of: NDArray[np.int32]  # [W, B]: the rank that trains row j of rank r; -1 where that row is padding

    def loads(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what each rank has to train: int64 [W]."""
        real = self.rank_of >= 0
        loads = np.zeros(len(self.rank_of), dtype=np.int64)
        np.add.at(loads, self.rank_of[real], costs.reshape(self.rank_of.shape)[real])
        return loads

    def count_moved(self) -> int:
        """Return how many samples are trained on another rank than the one that loaded them."""
        stays = self.rank_of == np.arange(len(self.rank_of))[:, np.newaxis]
        return int(np.count_nonzero((self.rank_of >= 0) & ~stays))


Strategy = Callable[[NDArray[np.int64], int, float], NDArray[np.int32]]


def _identity(costs: NDArray[np.int64], world_size: int, tolerance: float) -> NDArray[np.int32]:
    return np.repeat(np.arange(world_size, dtype=np.int32), len(costs) // world_size)


def _karmarkar_karp(costs: NDArray[np.int64], world_size: int, tolerance: float) -> NDArray[np.int32]:
    return karmarkar_karp(costs, _longest_first_order(costs), world_size)


def _lpt_swap(costs: NDArray[np.int64], world_size: int, tolerance: float) -> NDArray[np.int32]:
    bound = lower_bound(costs, world_size)
    target = bound + int(bound * tolerance)
    stay = _identity(costs, world_size, tolerance)
    dealt = _heaviest(costs, stay, world_size)
    if dealt <= target:
        return stay
    rank_of = swap_down(costs, longest_first(costs, _longest_first_order(costs), world_size), target)
    # Longest first is a heuristic: on a few samples it can end above what was dealt.
    return rank_of if _heaviest(costs, rank_of, world_size) < dealt else stay


STRATEGIES: dict[str, Strategy] = {
    "identity": _identity,
    "karmarkar-karp": _karmarkar_karp,
    "lpt-swap": _lpt_swap,
}


def partition(
    costs: NDArray[np.int64],
    world_size: int,
    *,
    strategy: str = "lpt-swap",
    num_real: NDArray[np.int64] | None = None,
    tolerance: float = 0.001,
) -> Assignment:
    """Decide which rank trains which sample of a step.

    Args:
        costs: int64 [W * B] or [W, B], rank after rank, none negative, with a sum below 2^62.
        world_size: W.
        strategy: `identity` (all stay), `karmarkar-karp` (largest differencing), or `lpt-swap` (longest first, then
            swaps between the heaviest rank and others; never worse than `identity`); each with equal counts.
        num_real: int64 [W]: the first so many rows of each rank are samples, the others padding; None: all are samples.
        tolerance: swapping ends once the heaviest rank is within this factor above the lower bound.

    Raises:
        ConfigError: the strategy is not known, or the costs cannot be dealt evenly over the ranks.

    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"no strategy is called {strategy!r}; there are {', '.join(STRATEGIES)}")
    if world_size < 1 or costs.size == 0 or costs.size % world_size:
        raise ConfigError(f"costs must be batch_size for each of world_size ranks, got {costs.size} for {world_size}")
    batch_size = costs.size // world_size
    counts = np.full(world_size, batch_size) if num_real is None else np.asarray(num_real)
    if counts.shape != (world_size,) or counts.min() < 0 or counts.max() > batch_size:
        raise ConfigError(f"num_real must be 0..{batch_size} for each of {world_size} ranks, got {counts.tolist()}")
    is_real = np.arange(batch_size) < counts[:, np.newaxis]
    slots = np.where(is_real, costs.reshape(world_size, batch_size), 0)
    rank_of = STRATEGIES[strategy](slots.reshape(-1), world_size, tolerance).reshape(world_size, batch_size)
    return Assignment(rank_of=np.where(is_real, rank_of, np.int32(_PADDING)))


def lower_bound(costs: NDArray[np.int64], world_size: int) -> int:
    """Return a load that the heaviest rank cannot be below, with equal counts of B = len(costs) / world_size.

    It is the largest of the mean load, the largest cost together with the B - 1 smallest, and the costs W and W + 1 in
    descending order (of the W + 1 largest, two share a rank) together with the B - 2 smallest.

    Args:
        costs: int64 [W * B], padding included as zeros.
        world_size: W.

    """
    ascending = np.sort(costs.reshape(-1))
    batch_size = len(ascending) // world_size
    bound = max(-(-int(ascending.sum()) // world_size), int(ascending[-1]) + int(ascending[: batch_size - 1].sum()))
    if batch_size >= 2:
        pair = int(ascending[-world_size]) + int(ascending[-world_size - 1])
        bound = max(bound, pair + int(ascending[: batch_size - 2].sum()))
    return bound


def _heaviest(costs: NDArray[np.int64], rank_of: NDArray[np.int32], world_size: int) -> int:
    loads = np.zeros(world_size, dtype=np.int64)
    np.add.at(loads, rank_of, costs)
    return int(loads.max())


def _longest_first_order(costs: NDArray[np.int64]) -> NDArray[np.int64]:
    # Stable, so that equal costs keep the order of their slots on every platform.
    return np.argsort(-costs, kind="stable")
