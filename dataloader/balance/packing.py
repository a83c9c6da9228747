"""Packing: steps of as many samples as fit a number of tokens per rank.

A step takes a prefix of the remaining order, so the rest of an epoch is still a position. Its end follows from the
tokens of the samples alone, by a rule that is the same on every rank:

1. The step has at most W * B samples, and W * N tokens, for W ranks of at most B samples and N tokens each.
2. A prefix fits if no rank exceeds N when its samples, longest first, go to the rank with the fewest tokens that has
   fewer than B samples.
3. If the longest prefix of 1. does not fit, it is shortened by 1, 2, 4, ... samples until it fits, and a bisection
   finds one that fits and would not with one sample more.

world_size = 2, batch_size = 3, max_tokens = 10

    tokens       6 5 4 3     2 9 8 1     7 1 1 1 1     9 ...
    by rank      6 3, 5 4    9 1, 8 2    7 1, 1 1 1

The first step could take the 2 as well, as 6 4 and 5 3 2, but whether any assignment fits is bin packing, which is
NP-hard. A step takes one sort of its samples, and O(n log W) for each of the few prefixes that are tried.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, lpt_with_room
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending, sums_by_rank
from evenrank.dataloader.balance.partition.strategies import OnOverflow, TokenLimitWarning
from evenrank.datasets.order import StepSchedule

# Samples whose tokens are in memory at a time. Those after the last step of a block are read again with the next one.
_SAMPLES_PER_BLOCK = 1 << 18
_STEPS_PER_BLOCK = 8  # at least
_MAX_TOTAL = 1 << 62  # of int64, so that one more sample does not overflow


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedSchedule(StepSchedule):
    """Steps of different sizes; without balancing each rank would load an equal share of one, within one sample."""

    world_size: int
    start: int  # position before the first step
    ends: NDArray[np.int64]  # [num_steps]: position after each step, ascending

    @property
    def num_steps(self) -> int:
        """Remaining steps."""
        return len(self.ends)

    def position_after(self, step: int) -> int:
        """Return the position after this step."""
        return int(self.ends[step])

    def first_position(self, step: int, rank: int) -> int:
        """Return the first position of a rank in a step; for the rank `world_size`, the end of the step."""
        first = int(self.ends[step - 1]) if step else self.start
        share, larger = divmod(int(self.ends[step]) - first, self.world_size)
        return first + rank * share + min(rank, larger)

    def num_loaded(self, step: int) -> NDArray[np.int64]:
        """Return the number of positions of each rank in a step."""
        share, larger = divmod(int(self.ends[step]) - self.first_position(step, 0), self.world_size)
        return share + (np.arange(self.world_size) < larger)


def clip_tokens(
    tokens: NDArray[np.int64], max_tokens: int, on_overflow: OnOverflow, name: Callable[[int], str]
) -> NDArray[np.int64]:
    """Return tokens [n] with those of longer samples set to `max_tokens`, which fill a rank of their own.

    Raises:
        ConfigError: a sample is longer, and `on_overflow` is `raise`; `name` returns its name by its index.
    """
    longest = int(np.argmax(tokens))
    if tokens[longest] <= max_tokens:
        return tokens
    if on_overflow == "raise":
        raise ConfigError(
            f"{name(longest)} has {tokens[longest]:,} tokens, more than max_tokens_per_rank = {max_tokens:,}; raise "
            'the limit, train on shorter histories, or pass on_overflow="warn" to give such samples a rank of their own'
        )
    message = f"some samples have more tokens than max_tokens_per_rank = {max_tokens:,}; each gets a rank of its own"
    warnings.warn(message, TokenLimitWarning, stacklevel=2)
    return np.minimum(tokens, max_tokens)


def pack(
    tokens_at: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    *,
    num_samples: int,
    start: int,
    world_size: int,
    batch_size: int,
    max_tokens: int,
    drop_last: bool,
) -> PackedSchedule:
    """Plan the steps from position `start` on, of at most `batch_size` samples and `max_tokens` tokens per rank.

    `tokens_at` returns the tokens of the samples at ascending positions: int64 [n], each 0..max_tokens. `drop_last`
    leaves out a last step that has room: fewer samples and fewer tokens than all ranks may have.
    """
    block_size = max(_SAMPLES_PER_BLOCK, _STEPS_PER_BLOCK * world_size * batch_size)
    max_tokens = min(max_tokens, _MAX_TOTAL // world_size)
    ends, first = [np.empty(0, dtype=np.int64)], start
    while first < num_samples:
        block_end = min(first + block_size, num_samples)
        is_last = block_end == num_samples
        tokens = tokens_at(np.arange(first, block_end, dtype=np.int64))
        ends_in_block, has_room = _pack_block(tokens, world_size, batch_size, max_tokens, is_last)
        if is_last and drop_last and has_room:
            ends_in_block = ends_in_block[:-1]
        ends.append(first + ends_in_block)
        first = num_samples if is_last else int(ends[-1][-1])
    return PackedSchedule(world_size=world_size, start=start, ends=np.concatenate(ends))


def pack_in_hand(
    tokens: NDArray[np.int64], world_size: int, batch_size: int, max_tokens: int, *, is_last: bool
) -> NDArray[np.int64]:
    """Return the end of each step of the samples in hand, of which more may follow unless `is_last`; see `pack`."""
    ends, _ = _pack_block(tokens, world_size, batch_size, min(max_tokens, _MAX_TOTAL // world_size), is_last)
    return ends


def warm_up() -> None:
    """Call the compiled functions of packing once, with its dtypes; see that of `partition`."""
    pack_in_hand(np.array([1, 2, 3]), 2, 2, 3, is_last=True)


@compiled
def _pack_block(
    tokens: NDArray[np.int64], world_size: int, batch_size: int, max_tokens: int, is_last: bool
) -> tuple[NDArray[np.int64], bool]:
    """Return the end of each step in a block of at least W * B samples, or the last, and whether the last has room."""
    max_samples, max_total = world_size * batch_size, world_size * max_tokens
    ends = np.empty(len(tokens), dtype=np.int64)
    num_steps, first, has_room = 0, 0, False
    while first < len(tokens) and (is_last or first + max_samples <= len(tokens)):
        size, total = 0, 0
        while size < max_samples and first + size < len(tokens) and total + tokens[first + size] <= max_total:
            total += tokens[first + size]
            size += 1
        fitting = _longest_that_fits(tokens[first : first + size], world_size, batch_size, max_tokens)
        has_room = size < max_samples and total < max_total
        first += fitting
        ends[num_steps] = first
        num_steps += 1
    return ends[:num_steps].copy(), has_room


@compiled
def _longest_that_fits(tokens: NDArray[np.int64], world_size: int, batch_size: int, max_tokens: int) -> int:
    """Return the number of first samples that fit, at least 1, given at least one, none above `max_tokens`."""
    order = argsort_descending(tokens)
    most = len(tokens)
    if _fits(tokens, order, most, world_size, batch_size, max_tokens):
        return most
    # `most` samples do not fit; `least` do.
    shorter_by = 1
    while most - shorter_by > 1 and not _fits(tokens, order, most - shorter_by, world_size, batch_size, max_tokens):
        most -= shorter_by
        shorter_by *= 2
    least = max(most - shorter_by, 1)
    while most - least > 1:
        middle = (least + most) // 2
        if _fits(tokens, order, middle, world_size, batch_size, max_tokens):
            least = middle
        else:
            most = middle
    return least


@compiled
def _fits(
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    num_samples: int,
    world_size: int,
    batch_size: int,
    max_tokens: int,
) -> bool:
    """Return whether the first samples fit; `order` has all of them by descending tokens."""
    first_tokens = tokens[:num_samples]
    # The most tokens of a rank depend neither on the numbering of the slots nor on slots without tokens.
    rank_of = lpt_with_room(first_tokens, order[order < num_samples], world_size, batch_size, 0, IGNORE_HOME)
    return bool(sums_by_rank(first_tokens, rank_of, world_size).max() <= max_tokens)
