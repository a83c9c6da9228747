"""Costs -> who trains what. Pure functions on whole numbers: every rank computes the same from the same.

A step has W * B slots, rank after rank: slot r * B + j is row j of rank r. A strategy gives each slot a rank, B slots
to each. Slots of padding cost nothing and take part as such, so no rank gets more than B samples.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.partition.karmarkar_karp import karmarkar_karp
from evenrank.dataloader.balance.partition.lower_bound import lower_bound_of
from evenrank.dataloader.balance.partition.lpt_swap import longest_first_and_swaps
from evenrank.dataloader.balance.partition.min_move import move_least
from evenrank.dataloader.balance.partition.radix_sort import descending
from evenrank.dataloader.balance.partition.relabel import relabel
from evenrank.dataloader.balance.partition.token_limit import level_within

PADDING = -1
_COST_LIMIT = 1 << 62
ON_OVERFLOW = ("raise", "warn")


class TokenLimitWarning(UserWarning):
    """A step has a rank with more tokens than `max_tokens_per_rank`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Who trains which sample of a step."""

    rank_of: NDArray[np.int32]  # [W, B]: the rank that trains row j of rank r; -1 where that row is padding

    def loads(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what each rank has to train: int64 [W], given the cost (or the tokens) of each row [W, B] or [W * B].

        Padding counts nothing.
        """
        real = self.rank_of >= 0
        loads = np.zeros(len(self.rank_of), dtype=np.int64)
        np.add.at(loads, self.rank_of[real], costs.reshape(self.rank_of.shape)[real])
        return loads

    @property
    def moved(self) -> NDArray[np.bool_]:
        """Which samples are trained on another rank than the one that loaded them: bool [W, B]."""
        stays = self.rank_of == np.arange(len(self.rank_of))[:, np.newaxis]
        moved: NDArray[np.bool_] = (self.rank_of >= 0) & ~stays
        return moved


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What a strategy may look at."""

    costs: NDArray[np.int64]  # [W * B], 0 for padding
    sizes: NDArray[np.int64] | None  # [W * B], likewise
    order: NDArray[np.int64]  # [W * B]: the slots by descending cost
    world_size: int
    target: int  # the load that is good enough


Strategy = Callable[[_Step], NDArray[np.int32]]


def _identity(step: _Step) -> NDArray[np.int32]:
    return np.repeat(np.arange(step.world_size, dtype=np.int32), len(step.costs) // step.world_size)


def _karmarkar_karp(step: _Step) -> NDArray[np.int32]:
    return _relabelled(step, karmarkar_karp(step.costs, step.order, step.world_size))


def _lpt_swap(step: _Step) -> NDArray[np.int32]:
    return _relabelled(step, longest_first_and_swaps(step.costs, step.order, step.world_size, step.target))


def _min_move(step: _Step) -> NDArray[np.int32]:
    sizes = step.costs if step.sizes is None else step.sizes
    return move_least(step.costs, sizes, step.order, step.world_size, step.target)


def _relabelled(step: _Step, rank_of: NDArray[np.int32]) -> NDArray[np.int32]:
    return rank_of if step.sizes is None else relabel(rank_of, step.sizes, step.world_size)


STRATEGIES: dict[str, Strategy] = {
    "identity": _identity,
    "karmarkar-karp": _karmarkar_karp,
    "lpt-swap": _lpt_swap,
    "min-move": _min_move,
}


def partition(
    costs: NDArray[np.int64],
    world_size: int,
    *,
    strategy: str = "lpt-swap",
    sizes: NDArray[np.int64] | None = None,
    num_real: NDArray[np.int64] | None = None,
    max_tokens_per_rank: int | None = None,
    on_overflow: str = "raise",
    tolerance: float = 0.001,
) -> Assignment:
    """Decide which rank trains which sample of a step.

    Strategies, each with equal counts:

    - `identity`: all stay.
    - `karmarkar-karp`: largest differencing.
    - `lpt-swap`: longest first, then swaps of the heaviest rank with others; never worse than `identity`.
    - `min-move`: from where the samples are, the swaps that move the fewest tokens; never worse than `identity`.

    Args:
        costs: int64 [W * B] or [W, B], rank after rank, none negative, with a sum of at most 2^62.
        world_size: W.
        strategy: one of the above.
        sizes: int64, shaped like `costs`: the tokens of each sample. Given them, `karmarkar-karp` and `lpt-swap` name
            the parts so that much of them stays; `min-move` moves few of them (without them, little cost).
        num_real: int64 [W]: the first so many rows of each rank are samples, the others padding; None: all are samples.
        max_tokens_per_rank: a limit to the sum of `sizes` of each rank, for the sake of memory. Where the strategy
            passes it, samples are dealt by tokens, most first, and costs levelled within the limit.
        on_overflow: where that finds no way: `raise`, or `warn` and give the way that was found.
        tolerance: how far above the lower bound the heaviest rank is good enough, as a part of it.

    Raises:
        ConfigError: an argument is out of its range, or `max_tokens_per_rank` could not be kept.

    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"no strategy is called {strategy!r}; there are {', '.join(STRATEGIES)}")
    if world_size < 1 or costs.size == 0 or costs.size % world_size:
        raise ConfigError(f"costs must be batch_size for each of world_size ranks, got {costs.size} for {world_size}")
    check_limits(max_tokens_per_rank, on_overflow, tolerance)
    if max_tokens_per_rank is not None and sizes is None:
        raise ConfigError("max_tokens_per_rank needs the sizes of the samples")
    batch_size = costs.size // world_size
    counts = np.full(world_size, batch_size) if num_real is None else np.asarray(num_real)
    if counts.shape != (world_size,) or counts.min() < 0 or counts.max() > batch_size:
        raise ConfigError(f"num_real must be 0..{batch_size} for each of {world_size} ranks, got {counts.tolist()}")
    is_real = np.arange(batch_size) < counts[:, np.newaxis]
    slots = _slots("costs", costs, is_real)
    order = descending(slots)
    bound = int(lower_bound_of(slots, order, world_size))
    step = _Step(
        costs=slots,
        sizes=None if sizes is None else _slots("sizes", sizes, is_real),
        order=order,
        world_size=world_size,
        target=bound + int(bound * tolerance),
    )
    rank_of = STRATEGIES[strategy](step)
    if max_tokens_per_rank is not None:
        rank_of = _within_limit(step, rank_of, max_tokens_per_rank, on_overflow, may_move=strategy != "identity")
    rank_of = rank_of.reshape(world_size, batch_size)
    return Assignment(rank_of=np.where(is_real, rank_of, np.int32(PADDING)))


def check_limits(max_tokens_per_rank: int | None, on_overflow: str, tolerance: float) -> None:
    """Check the arguments of `partition` of these names.

    Raises:
        ConfigError: one is out of its range.

    """
    if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
        raise ConfigError(f"max_tokens_per_rank must be at least 1, got {max_tokens_per_rank}")
    if on_overflow not in ON_OVERFLOW:
        raise ConfigError(f"on_overflow must be one of {', '.join(ON_OVERFLOW)}, got {on_overflow!r}")
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance must be at least 0 and below 1, got {tolerance}")


def lower_bound(costs: NDArray[np.int64], world_size: int) -> int:
    """Return a load that the heaviest rank cannot be below, with equal counts of B = len(costs) / world_size.

    It is the largest of

    - for k = 1..W: the k largest costs and the k (B - 1) smallest, over k. Any k ranks that hold the k largest have
      k B samples; for k = W it is the mean load.
    - for k = 1..B-1: of the k W + 1 largest, k + 1 share a rank: the smallest k + 1 of them, and the B - k - 1 smallest
      of all.

    Args:
        costs: int64 [W * B], padding included as zeros.
        world_size: W.

    """
    slots = np.ascontiguousarray(costs.reshape(-1), dtype=np.int64)
    return int(lower_bound_of(slots, descending(slots), world_size))


def _slots(what: str, values: NDArray[np.int64], is_real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return values of all rows as int64 [W * B], 0 for padding."""
    if values.size != is_real.size:
        raise ConfigError(f"{what} must be one for each of {is_real.size} rows, got {values.size}")
    slots: NDArray[np.int64] = np.where(is_real, values.reshape(is_real.shape), 0).reshape(-1).astype(np.int64)
    if int(slots.min()) < 0 or float(slots.sum(dtype=np.float64)) > _COST_LIMIT:
        raise ConfigError(f"{what} must not be negative and add up to at most 2^62, got {slots.min()}..{slots.max()}")
    return slots


def _within_limit(
    step: _Step, rank_of: NDArray[np.int32], max_tokens: int, on_overflow: str, *, may_move: bool
) -> NDArray[np.int32]:
    """Return `rank_of` if it keeps the limit, else an assignment that does, or what `on_overflow` says."""
    assert step.sizes is not None
    most = int(_sums(step.sizes, rank_of, step.world_size).max())
    if most <= max_tokens:
        return rank_of
    if may_move:
        rank_of = level_within(step.costs, step.sizes, step.order, step.world_size, max_tokens, step.target)
        rank_of = relabel(rank_of, step.sizes, step.world_size)
        most = int(_sums(step.sizes, rank_of, step.world_size).max())
        if most <= max_tokens:
            return rank_of
    if on_overflow == "raise":
        longest, mean = int(step.sizes.max()), -(-int(step.sizes.sum()) // step.world_size)
        raise ConfigError(
            f"max_tokens_per_rank = {max_tokens:,} cannot be kept: a rank has {most:,} tokens at best; the longest "
            f"sample has {longest:,}, the mean of the ranks is {mean:,}; raise the limit, make the batches smaller, or "
            'pass on_overflow="warn"'
        )
    # The same words in every step, so that it is shown once.
    warnings.warn(f"max_tokens_per_rank = {max_tokens:,} is not kept in every step", TokenLimitWarning, stacklevel=3)
    return rank_of


def _sums(values: NDArray[np.int64], rank_of: NDArray[np.int32], world_size: int) -> NDArray[np.int64]:
    """Add up the values of each rank: int64 [W]."""
    sums = np.zeros(world_size, dtype=np.int64)
    np.add.at(sums, rank_of, values)
    return sums
