"""`partition`: costs -> who trains on what, by a registered strategy; users register theirs in the same way."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry
from evenrank.core.rules import Bounds, Count
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.partition.parts import (
    BUILT_IN,
    PADDING,
    assign_slots,
    heaviest_load_bound,
    keep_token_limit,
    mark_padding,
    read_slots,
)
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending, sums_by_rank

DEFAULT_STRATEGY: Final = "lpt-swap"
DEFAULT_TOLERANCE: Final = 0.001
OnOverflow = Literal["raise", "warn"]
Tolerance = Annotated[float, Bounds(at_least=0, below=1)]

_NO_TOKENS = np.empty((1, 0), dtype=np.int64)
# Just below the 32 MiB up to which glibc raises its thresholds; see mallopt(3), M_MMAP_THRESHOLD.
_LARGE_BLOCK = 31 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionProblem:
    """Input of a strategy: the n = W * B slots of a step. Slot r * B + j is row j of rank r, a sample or padding."""

    costs: NDArray[np.int64]
    """[n], 0 for padding."""
    tokens: NDArray[np.int64] | None
    """[n], 0 for padding; None if they are not known."""
    home: NDArray[np.int32]
    """[n]: the rank that loaded each slot, ascending."""
    order: NDArray[np.int64]
    """[n]: the slots by descending cost."""
    world_size: int
    """W."""
    target: int
    """The load that is good enough."""


Strategy = Callable[[PartitionProblem], NDArray[np.integer]]
"""Returns the rank of each slot: integers [n], in which each rank occurs B times. Every rank calls it, so it must be a
pure function: the same result for the same problem on all ranks. The problem's arrays are its own: it may write to
them."""

STRATEGIES: Registry[Strategy] = Registry("strategy", expected="a function of a PartitionProblem", accepts=callable)


def register_strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Return a decorator that makes a function available as `strategy=name`, on every rank that runs it.

    It raises a ConfigError if another module has taken the name or the decorated object cannot be called. The same
    module may replace its strategy; `STRATEGIES.unregister(name)` removes one.
    """
    return STRATEGIES.register(name)


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A strategy of the package, which one compiled call carries out for many steps."""

    number: int

    def __call__(self, problem: PartitionProblem) -> NDArray[np.int32]:
        costs, order, target = problem.costs[np.newaxis], problem.order[np.newaxis], np.array([problem.target])
        tokens = _NO_TOKENS if problem.tokens is None else problem.tokens[np.newaxis]
        arguments = self.number, costs, tokens, order, problem.home, problem.world_size, target
        assigned: NDArray[np.int32] = assign_slots(*arguments)[0]
        return assigned


for _name, _number in BUILT_IN.items():
    register_strategy(_name)(_BuiltIn(_number))


class TokenLimitWarning(UserWarning):
    """In some step a rank has more tokens than `max_tokens_per_rank`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Who trains on which sample of a step."""

    rank_of: NDArray[np.int32]
    """[W, B]: the rank that trains row j of rank r; -1 where that row is padding."""
    padded: bool = False
    """See `partition`."""

    def loads(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the load of each rank, [W], given the cost of each row: int64 or float64, [W, B] or [W * B]."""
        is_real = self.rank_of >= 0
        real, rank_of = values.reshape(is_real.shape)[is_real], self.rank_of[is_real]
        if self.padded:
            largest = np.zeros(len(is_real), dtype=values.dtype)
            np.maximum.at(largest, rank_of, real)
            padded: NDArray[Any] = largest * is_real.shape[1]
            return padded
        if values.dtype.kind == "f":
            return np.bincount(rank_of, weights=real, minlength=len(is_real))
        return sums_by_rank(real, rank_of, len(is_real))

    @property
    def moved(self) -> NDArray[np.bool_]:
        """Which samples move to another rank than the one that loaded them: bool [W, B]."""
        home = np.arange(len(self.rank_of))[:, np.newaxis]
        moved: NDArray[np.bool_] = (self.rank_of >= 0) & (self.rank_of != home)
        return moved


def partition(
    costs: NDArray[np.int64],
    world_size: int,
    *,
    tokens: NDArray[np.int64] | None = None,
    num_real: NDArray[np.int64] | None = None,
    strategy: str = DEFAULT_STRATEGY,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    max_tokens_per_rank: Count | None = None,
    on_overflow: OnOverflow = "raise",
    padded: bool = False,
) -> Assignment:
    """Decide which rank trains on which sample of a step, with an equal number of rows on each rank.

    A pure function, so every rank computes the same assignment from the same input. Strategies of the package:

    - `none`: every sample stays on its rank.
    - `karmarkar-karp`: the largest differencing method.
    - `lpt-swap`: longest processing time first, then swaps; never worse than `none`.
    - `min-move`: swaps that move the fewest tokens; never worse than `none`.

    Args:
        costs: int64 [W * B] or [W, B] in rank order, none negative, with a sum of at most 2^62.
        world_size: W.
        tokens: int64, shaped like `costs`: the tokens of each sample. With these, `karmarkar-karp` and `lpt-swap`
            choose the ranks of their parts so that many tokens stay, and `min-move` moves few tokens, not little cost.
        num_real: int64 [W]: the samples of each rank, which are its first rows, before padding; None: all rows.
        strategy: one of these, or one of your own; see `register_strategy`.
        tolerance: a heaviest load of (1 + tolerance) * lower bound is good enough.
        max_tokens_per_rank: limit to the sum of `tokens` of each rank. Where the strategy exceeds it, samples are
            assigned by tokens first, and costs are levelled within the limit.
        on_overflow: if that fails too: `raise`, or `warn` and return the assignment that exceeds the limit least.
        padded: each of a rank's B rows costs as much as its most expensive sample, to whose length all are padded. The
            most expensive sample of the step then sets its time, whoever trains on it, so every sample stays.

    Raises:
        ConfigError: an argument is out of range, the strategy returned no such assignment, or `max_tokens_per_rank`
            could not be kept.
    """
    if costs.size == 0 or world_size < 1 or costs.size % world_size:
        raise ConfigError(
            f"costs must be batch_size for each of world_size ranks, got {costs.size} costs for world_size={world_size}"
        )
    of_step = None if num_real is None else np.asarray(num_real, dtype=np.int64)[np.newaxis]
    (rank_of,) = partition_steps(
        costs.reshape(1, -1),
        world_size,
        tokens=None if tokens is None else tokens.reshape(1, -1),
        num_real=of_step,
        strategy=strategy,
        tolerance=tolerance,
        max_tokens_per_rank=max_tokens_per_rank,
        on_overflow=on_overflow,
        padded=padded,
    )
    return Assignment(rank_of=rank_of, padded=padded)


def partition_steps(
    costs: NDArray[np.int64],
    world_size: int,
    *,
    tokens: NDArray[np.int64] | None,
    num_real: NDArray[np.int64] | None,
    strategy: str,
    tolerance: Tolerance,
    max_tokens_per_rank: Count | None,
    on_overflow: OnOverflow,
    padded: bool,
) -> NDArray[np.int32]:
    """Decide for each of S steps which rank trains on which sample, as `partition` for each alone.

    A step takes microseconds, and a few calls of compiled code for all of them leave the GIL to the training.

    Args:
        costs: int64 [S, W * B], as `tokens`; `num_real` are int64 [S, W]. For the others see `partition`.

    Returns:
        The rank that trains row j of rank r in each step, int32 [S, W, B]; -1 where that row is padding.
    """
    _check_options(tolerance, max_tokens_per_rank, on_overflow)
    if max_tokens_per_rank is not None and tokens is None:
        raise ConfigError("max_tokens_per_rank needs the tokens of the samples")
    if tokens is not None and tokens.shape != costs.shape:
        raise ConfigError(f"tokens must have one value for each of {costs.shape[1]} rows, got {tokens.shape[1]}")
    counts = _counts_of_ranks(len(costs), costs.shape[1] // world_size, world_size, num_real)
    costs = np.array(costs, dtype=np.int64, order="C")  # copies, whose padding becomes 0
    tokens_of_rows = (
        np.empty((len(costs), 0), dtype=np.int64) if tokens is None else np.array(tokens, np.int64, order="C")
    )
    home, order, bounds, *are_valid = read_slots(costs, tokens_of_rows, counts)
    for name, values, is_valid in zip(("costs", "tokens"), (costs, tokens_of_rows), are_valid, strict=True):
        if not is_valid:
            found = f"got {values.min()}..{values.max()}"
            raise ConfigError(f"{name} must not be negative and must sum to at most 2^62, {found}")
    if padded:
        return mark_padding(np.tile(home, (len(costs), 1)), counts)
    targets = bounds + (bounds * tolerance).astype(np.int64)
    if isinstance(chosen := STRATEGIES[strategy], _BuiltIn):
        rank_of = assign_slots(chosen.number, costs, tokens_of_rows, order, home, world_size, targets)
    else:
        rank_of = np.empty(costs.shape, dtype=np.int32)
        for step in range(len(costs)):
            # Copies, because a strategy of the user may work in place.
            of_tokens = None if tokens is None else tokens_of_rows[step].copy()
            problem = PartitionProblem(
                costs=costs[step].copy(),
                tokens=of_tokens,
                home=home.copy(),
                order=order[step].copy(),
                world_size=world_size,
                target=int(targets[step]),
            )
            rank_of[step] = _checked(strategy, chosen(problem), costs.shape[1], world_size)
    if max_tokens_per_rank is not None:
        moves = strategy != "none"
        most = keep_token_limit(
            rank_of, costs, tokens_of_rows, order, home, targets, world_size, max_tokens_per_rank, moves
        )
        _check_tokens(most, tokens_of_rows, world_size, max_tokens_per_rank, on_overflow)
    return mark_padding(rank_of, counts)


@lru_cache(typed=True)  # the options are the same in every step
def _check_options(tolerance: float, max_tokens_per_rank: int | None, on_overflow: str) -> None:
    check_types(partition, locals())


def unbalanced(is_real: NDArray[np.bool_], *, padded: bool = False) -> Assignment:
    """Return the assignment in which every row stays on its rank, given which rows are samples: [W, B]."""
    home = np.arange(len(is_real), dtype=np.int32)[:, np.newaxis]
    return Assignment(rank_of=np.where(is_real, home, np.int32(PADDING)), padded=padded)


def lower_bound(costs: NDArray[np.int64], world_size: int, *, padded: bool = False) -> int:
    """Return a load that the heaviest of `world_size` ranks has at least, given costs, int64 [W * B], 0 for padding."""
    slot_costs = np.ascontiguousarray(costs.reshape(-1), dtype=np.int64)
    if padded:
        return int(slot_costs.max()) * (len(slot_costs) // world_size)
    return int(heaviest_load_bound(slot_costs, argsort_descending(slot_costs), world_size))


def real_rows(batch_size: int, world_size: int, num_real: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """Return which rows are samples, bool [W, B]: the first `num_real` of each rank; None: all."""
    counts = _counts_of_ranks(1, batch_size, world_size, None if num_real is None else num_real[np.newaxis])[0]
    is_real: NDArray[np.bool_] = np.arange(batch_size) < counts[:, np.newaxis]
    return is_real


def _counts_of_ranks(
    num_steps: int, batch_size: int, world_size: int, num_real: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return the samples of each rank in each step, int64 [S, W], after checking them."""
    shape = num_steps, world_size
    counts = np.full(shape, batch_size) if num_real is None else np.array(num_real, dtype=np.int64, order="C")
    if counts.shape != shape or counts.min() < 0 or counts.max() > batch_size:
        wrong = [
            of_step
            for of_step in counts.tolist()
            if len(of_step) != world_size or not 0 <= min(of_step) <= max(of_step) <= batch_size
        ]
        raise ConfigError(f"num_real must be 0..{batch_size} for each of {world_size} ranks, got {wrong[0]}")
    return counts


def _checked(strategy: str, rank_of: Any, num_slots: int, world_size: int) -> NDArray[np.integer[Any]]:
    """Return the ranks that a user's strategy assigns, after checking them: each rank must get exactly B slots."""
    if not isinstance(rank_of, np.ndarray) or rank_of.shape != (num_slots,) or rank_of.dtype.kind not in "iu":
        described = f"{rank_of.dtype} {rank_of.shape}" if isinstance(rank_of, np.ndarray) else type(rank_of).__name__
        raise ConfigError(f"the strategy {strategy!r} must return integers of shape ({num_slots},), got {described}")
    if not 0 <= rank_of.min() <= rank_of.max() < world_size:
        found = f"{rank_of.min()}..{rank_of.max()}"
        raise ConfigError(f"the strategy {strategy!r} must return ranks 0..{world_size - 1}, got {found}")
    counts, batch_size = np.bincount(rank_of.astype(np.int64), minlength=world_size), num_slots // world_size
    for rank in np.flatnonzero(counts != batch_size)[:1]:
        raise ConfigError(
            f"the strategy {strategy!r} must assign {batch_size} of the {num_slots} slots, padding included, to each "
            f"rank; rank {rank} got {counts[rank]}"
        )
    return rank_of


def _check_tokens(
    most: NDArray[np.int64], tokens: NDArray[np.int64], world_size: int, max_tokens: int, on_overflow: str
) -> None:
    """Act as `on_overflow` says where the rank with the most tokens, [S], has more than the limit."""
    for step in np.flatnonzero(most > max_tokens)[:1]:
        if on_overflow == "raise":
            longest, mean = int(tokens[step].max()), -(-int(tokens[step].sum()) // world_size)
            raise ConfigError(
                f"max_tokens_per_rank = {max_tokens:,} cannot be kept: the best assignment found has a rank with "
                f"{most[step]:,} tokens; the longest sample has {longest:,}, the mean of the ranks is {mean:,}; raise "
                'the limit, use smaller batches, or pass on_overflow="warn"'
            )
        # The same message in every step, so that Python shows it once.
        warnings.warn(
            f"max_tokens_per_rank = {max_tokens:,} is exceeded in some steps", TokenLimitWarning, stacklevel=4
        )


def warm_up(strategy: str, *, limits_tokens: bool = False) -> None:
    """Call the compiled functions of a plan once, with its dtypes, so that a background thread compiles nothing.

    Seconds on the first run after an installation; milliseconds once the functions are cached on disk. A user's own
    strategy is not called: it may raise, which a step reports on all ranks. `limits_tokens`: the steps have a limit.
    """
    costs, tokens = np.array([90, 50, 10, 50]), np.array([100, 50, 90, 60])
    partition(costs, 2, strategy=strategy if strategy in BUILT_IN else "none", tokens=tokens)
    if limits_tokens:  # balanced by cost alone, a rank has 190
        partition(costs, 2, tokens=tokens, max_tokens_per_rank=160)
    # glibc returns freed memory to the system above thresholds that grow with the largest block freed so far. With low
    # ones, the arrays of a plan cause page faults in every step: a third of its time for 1,024 ranks.
    np.empty(_LARGE_BLOCK, dtype=np.uint8)
