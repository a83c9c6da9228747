"""`partition`: costs -> who trains what, by one of several strategies.

A pure function on integers, so every rank computes the same assignment from the same input.
"""

import copy
import warnings
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.partition.lower_bound import heaviest_load_bound
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending
from evenrank.dataloader.balance.partition.registry import STRATEGIES, PartitionProblem
from evenrank.dataloader.balance.partition.relabel import relabel
from evenrank.dataloader.balance.partition.token_limit import balance_within_token_limit

PADDING = -1
DEFAULT_STRATEGY: Final = "lpt-swap"
DEFAULT_TOLERANCE: Final = 0.001
OnOverflow = Literal["raise", "warn"]

_MAX_TOTAL_COST = 1 << 62


class TokenLimitWarning(UserWarning):
    """In some step a rank has more tokens than `max_tokens_per_rank`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Who trains which sample of a step."""

    rank_of: NDArray[np.int32]
    """[W, B]: the rank that trains row j of rank r; -1 where that row is padding."""

    def loads(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the load of each rank: int64 [W].

        Args:
            costs: the cost (or the tokens) of each row, int64 [W, B] or [W * B]; padding is ignored.

        """
        is_real = self.rank_of >= 0
        return sums_by_rank(
            costs.reshape(self.rank_of.shape)[is_real], self.rank_of[is_real], world_size=len(self.rank_of)
        )

    @property
    def moved(self) -> NDArray[np.bool_]:
        """Which samples are trained on another rank than the one that loaded them: bool [W, B]."""
        stays = self.rank_of == np.arange(len(self.rank_of))[:, np.newaxis]
        moved: NDArray[np.bool_] = (self.rank_of >= 0) & ~stays
        return moved


def partition(
    costs: NDArray[np.int64],
    world_size: int,
    *,
    tokens: NDArray[np.int64] | None = None,
    num_real: NDArray[np.int64] | None = None,
    strategy: str = DEFAULT_STRATEGY,
    tolerance: float = DEFAULT_TOLERANCE,
    max_tokens_per_rank: int | None = None,
    on_overflow: OnOverflow = "raise",
) -> Assignment:
    """Decide which rank trains which sample of a step, with an equal number of rows on each rank.

    The strategies are those that are registered, among them ours:

    - `none`: every sample stays on its rank.
    - `karmarkar-karp`: the largest differencing method.
    - `lpt-swap`: longest processing time first, then swaps; never worse than `none`.
    - `min-move`: swaps that move the fewest tokens; never worse than `none`.

    Args:
        costs: int64 [W * B] or [W, B] in rank order, none negative, with a sum of at most 2^62.
        world_size: W.
        tokens: int64, shaped like `costs`: the tokens of each sample. Given these, `karmarkar-karp` and `lpt-swap`
            choose which rank gets which part so that many tokens stay, and `min-move` moves few tokens (without, little
            cost).
        num_real: int64 [W]: the number of samples of each rank, which are its first rows; the others are padding. None:
            all rows are samples.
        strategy: one of these, or one of your own; see `register_strategy`.
        tolerance: relative tolerance: a heaviest load of (1 + tolerance) * lower bound is good enough.
        max_tokens_per_rank: limit to the sum of `tokens` of each rank. Where the strategy exceeds it, samples are
            assigned by tokens first, and costs are levelled within the limit.
        on_overflow: if that fails too: `raise`, or `warn` and return the assignment that exceeds the limit least.

    Raises:
        ConfigError: an argument is out of range, the strategy returned no such assignment, or `max_tokens_per_rank`
            could not be kept.

    """
    check_options(tolerance=tolerance, max_tokens_per_rank=max_tokens_per_rank, on_overflow=on_overflow)
    if max_tokens_per_rank is not None and tokens is None:
        raise ConfigError("max_tokens_per_rank needs the tokens of the samples")
    batch_size = rows_per_rank(costs, world_size)
    is_real = real_rows(batch_size, world_size, num_real)
    slot_costs = by_slot("costs", costs, is_real)
    order = argsort_descending(slot_costs)
    bound = int(heaviest_load_bound(slot_costs, order, world_size))
    problem = PartitionProblem(
        costs=slot_costs,
        tokens=None if tokens is None else by_slot("tokens", tokens, is_real),
        home=np.repeat(np.arange(world_size, dtype=np.int32), batch_size),
        order=order,
        world_size=world_size,
        target=bound + int(bound * tolerance),
    )
    # A strategy of the user may work in place.
    rank_of = _call(strategy, problem if max_tokens_per_rank is None else copy.deepcopy(problem))
    if max_tokens_per_rank is not None:
        rank_of = _within_token_limit(
            problem, rank_of, max_tokens_per_rank, may_move=strategy != "none", on_overflow=on_overflow
        )
    return Assignment(rank_of=np.where(is_real, rank_of.reshape(is_real.shape), np.int32(PADDING)))


def check_options(*, tolerance: float, max_tokens_per_rank: int | None, on_overflow: str) -> None:
    """Raise a ConfigError if an option of `partition` is out of range."""
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance must be at least 0 and below 1, got {tolerance}")
    if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
        raise ConfigError(f"max_tokens_per_rank must be at least 1, got {max_tokens_per_rank}")
    if on_overflow not in get_args(OnOverflow):
        raise ConfigError(f"on_overflow must be one of {', '.join(get_args(OnOverflow))}, got {on_overflow!r}")


def lower_bound(costs: NDArray[np.int64], world_size: int) -> int:
    """Return a load that the heaviest of `world_size` ranks has at least, with B = len(costs) / world_size rows each.

    See `partition/lower_bound.py` for the formula.

    Args:
        costs: int64 [W * B], padding included as zeros.
        world_size: W.

    """
    slot_costs = np.ascontiguousarray(costs.reshape(-1), dtype=np.int64)
    return int(heaviest_load_bound(slot_costs, argsort_descending(slot_costs), world_size))


def rows_per_rank(costs: NDArray[np.int64], world_size: int) -> int:
    """Return B, given costs of shape [W * B] or [W, B].

    Raises:
        ConfigError: there are no rows, or another number on some rank.

    """
    if world_size < 1 or costs.size == 0 or costs.size % world_size:
        raise ConfigError(
            f"costs must be batch_size for each of world_size ranks, got {costs.size} costs for world_size={world_size}"
        )
    return costs.size // world_size


def real_rows(batch_size: int, world_size: int, num_real: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """Return which rows are samples: bool [W, B].

    Args:
        batch_size: B.
        world_size: W.
        num_real: int64 [W], how many of each rank's first rows are samples; None: all.

    Raises:
        ConfigError: `num_real` is out of range.

    """
    counts = np.full(world_size, batch_size) if num_real is None else np.asarray(num_real)
    if counts.shape != (world_size,) or counts.min() < 0 or counts.max() > batch_size:
        raise ConfigError(f"num_real must be 0..{batch_size} for each of {world_size} ranks, got {counts.tolist()}")
    is_real: NDArray[np.bool_] = np.arange(batch_size) < counts[:, np.newaxis]
    return is_real


def by_slot(name: str, values: NDArray[np.int64], is_real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the values of all rows as int64 [W * B], 0 for padding.

    Args:
        name: what error messages call the values.
        values: integers [W * B] or [W, B].
        is_real: bool [W, B].

    Raises:
        ConfigError: there are more or fewer values, one is negative, or their sum exceeds 2^62.

    """
    if values.size != is_real.size:
        raise ConfigError(f"{name} must have one value for each of {is_real.size} rows, got {values.size}")
    by_slot: NDArray[np.int64] = (
        np.where(is_real, values.reshape(is_real.shape), 0).reshape(-1).astype(np.int64, copy=False)
    )
    if int(by_slot.min()) < 0 or float(by_slot.sum(dtype=np.float64)) > _MAX_TOTAL_COST:
        raise ConfigError(
            f"{name} must not be negative and must sum to at most 2^62, got {by_slot.min()}..{by_slot.max()}"
        )
    return by_slot


def sums_by_rank(values: NDArray[np.int64], rank_of: NDArray[np.int32], *, world_size: int) -> NDArray[np.int64]:
    """Return the sum of the values of each rank: int64 [W], given values and ranks of one shape."""
    sums = np.zeros(world_size, dtype=np.int64)
    np.add.at(sums, rank_of, values)
    return sums


def _call(strategy: str, problem: PartitionProblem) -> NDArray[np.int32]:
    """Return what the strategy returns, after checking it: an exchange must not be given rows that do not fit."""
    num_slots, world_size = len(problem.costs), problem.world_size
    rank_of = STRATEGIES[strategy](problem)
    if not isinstance(rank_of, np.ndarray) or rank_of.shape != (num_slots,) or rank_of.dtype.kind not in "iu":
        described = f"{rank_of.dtype} {rank_of.shape}" if isinstance(rank_of, np.ndarray) else type(rank_of).__name__
        raise ConfigError(f"the strategy {strategy!r} must return integers of shape ({num_slots},), got {described}")
    low, high = int(rank_of.min(initial=0)), int(rank_of.max(initial=0))
    if low < 0 or high >= world_size:
        raise ConfigError(f"the strategy {strategy!r} must return ranks 0..{world_size - 1}, got {low}..{high}")
    counts = np.bincount(rank_of, minlength=world_size)
    batch_size = num_slots // world_size
    if (is_wrong := counts != batch_size).any():
        rank = int(np.argmax(is_wrong))
        raise ConfigError(
            f"the strategy {strategy!r} must assign {batch_size} of the {num_slots} slots, padding included, to each "
            f"rank; rank {rank} got {counts[rank]}"
        )
    return rank_of.astype(np.int32, copy=False)


def _within_token_limit(
    problem: PartitionProblem, rank_of: NDArray[np.int32], max_tokens: int, *, may_move: bool, on_overflow: str
) -> NDArray[np.int32]:
    """Return `rank_of` if it keeps the limit, else an assignment that does, or act as `on_overflow` says."""
    assert problem.tokens is not None
    world_size = problem.world_size
    most_tokens = int(sums_by_rank(problem.tokens, rank_of, world_size=world_size).max())
    if most_tokens <= max_tokens:
        return rank_of
    if may_move:
        rank_of = balance_within_token_limit(
            problem.costs, problem.tokens, problem.order, world_size, max_tokens, problem.target
        )
        rank_of = relabel(rank_of, problem.tokens, problem.home, world_size)
        most_tokens = int(sums_by_rank(problem.tokens, rank_of, world_size=world_size).max())
        if most_tokens <= max_tokens:
            return rank_of
    if on_overflow == "raise":
        longest, mean = int(problem.tokens.max()), -(-int(problem.tokens.sum()) // world_size)
        raise ConfigError(
            f"max_tokens_per_rank = {max_tokens:,} cannot be kept: the best assignment found has a rank with "
            f"{most_tokens:,} tokens; the longest sample has {longest:,}, the mean of the ranks is {mean:,}; raise the "
            'limit, use smaller batches, or pass on_overflow="warn"'
        )
    # The same message in every step, so that Python shows it once.
    warnings.warn(f"max_tokens_per_rank = {max_tokens:,} is exceeded in some steps", TokenLimitWarning, stacklevel=3)
    return rank_of
