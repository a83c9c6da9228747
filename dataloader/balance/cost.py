"""Lengths -> what a sample costs to train, as integers.

A cost is any callable that takes the lengths and the numbers of candidates of a batch's samples, and returns int64:

    cost({"item_id": [12, 0, 7], "action": [12, 0, 7], ...}, num_candidates=[1, 0, 1]) -> [c0, c1, c2]

Costs are integers so that every rank computes the same plan from the gathered costs, whatever its floating-point unit
rounds. They are shifted right by a number of bits that follows from the configuration alone, so that the costs of a
whole step add up below 2^62.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError

# The costs of a step are summed in int64: one bit is the sign, one is left for the sum of two sums.
COST_BITS = 62

MAX_TOKENS = (1 << 31) - 1
"""Tokens of a sample, which ranks send as int32."""


class Cost(Protocol):
    """What a sample costs, in any unit: only ratios matter."""

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the cost of each sample.

        The arrays are the function's own: it may write to them and keep them.

        Args:
            lengths: per jagged key, int64 [B]. A key that occurs in a second KeyedJaggedTensor is called `field.key`.
            num_candidates: int64 [B]; zeros for batches without candidates.

        Returns:
            int64 [B], none negative.

        """
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A cost that knows the number of tokens of a sample in the model; optional."""

    def tokens(self, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the tokens of each sample: int64 [B], each 0..2^31-1, given the lengths per jagged key, int64 [B]."""
        ...


@runtime_checkable
class BoundsCosts(Protocol):
    """A cost that knows its largest value, so that costs can be scaled to add up without overflow; optional."""

    @property
    def max_cost(self) -> int:
        """The cost of the most expensive sample that can occur."""
        ...


def count_tokens(cost: Cost, lengths: Mapping[str, NDArray[np.int64]], num_samples: int) -> NDArray[np.int64]:
    """Return the tokens of each sample: int64 [num_samples].

    Args:
        cost: counts them if it has a method `tokens`; otherwise they are the sum of the lengths over all keys.
        lengths: per jagged key, int64 [num_samples].
        num_samples: the number of samples.

    Raises:
        ConfigError: the cost returns anything but integers 0..2^31-1, one for each sample.

    """
    if not isinstance(cost, CountsTokens):
        total: NDArray[np.int64] = np.sum([*lengths.values(), np.zeros(num_samples, dtype=np.int64)], axis=0)
        return total
    tokens = np.asarray(cost.tokens(_copied(lengths)))
    if tokens.shape != (num_samples,) or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"a cost's tokens() must return int64 of shape {(num_samples,)}, got {tokens.dtype} of shape {tokens.shape}"
        )
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < 0 or high > MAX_TOKENS:
        raise ConfigError(f"a cost's tokens() must return 0..{MAX_TOKENS} for each sample, got {low}..{high}")
    return tokens.astype(np.int64)


def cost_shift(cost: Cost, samples_per_step: int) -> int:
    """Return by how many bits costs are shifted right so that those of a whole step add up within 62 bits.

    It follows from the configuration alone, so it is the same on all ranks and in all steps. A cost without a
    `max_cost` is not shifted.
    """
    if not isinstance(cost, BoundsCosts):
        return 0
    return max(0, (samples_per_step * int(cost.max_cost)).bit_length() - COST_BITS)


def scaled_costs(
    cost: Cost,
    lengths: Mapping[str, NDArray[np.int64]],
    num_candidates: NDArray[np.int64],
    *,
    num_real: int,
    samples_per_step: int,
) -> NDArray[np.int64]:
    """Call `cost` for the rows of a batch, check what it returns, and scale it so that costs can be summed.

    Args:
        cost: what a sample costs.
        lengths: per jagged key, int64 [B].
        num_candidates: int64 [B].
        num_real: how many of the first rows are samples.
        samples_per_step: rows of all ranks in a step, whose costs are summed.

    Returns:
        int64 [B]; padding costs 0, whatever `cost` returns for a length of 0.

    Raises:
        ConfigError: the costs are not integers, one is negative, or so large that a step could overflow.

    """
    costs = np.asarray(cost(_copied(lengths), num_candidates.copy()))
    if costs.shape != num_candidates.shape or costs.dtype.kind not in "iu":
        raise ConfigError(
            f"a cost must return int64 of shape {num_candidates.shape}, got {costs.dtype} of shape {costs.shape}"
        )
    real = costs[:num_real]
    scaled = np.zeros(costs.shape, dtype=np.int64)
    scaled[:num_real] = real.astype(np.int64, copy=False) >> cost_shift(cost, samples_per_step)
    if len(real) and int(real.min()) < 0:
        raise ConfigError(f"a cost must not be negative, got {int(real.min())}")
    limit = (1 << COST_BITS) // samples_per_step
    if int(scaled.max()) > limit:
        raise ConfigError(
            f"a cost of {int(real.max())} is too large to be summed over {samples_per_step:,} samples; raise "
            f"max_tokens of the cost, or return costs of at most {limit}"
        )
    return scaled


def _copied(lengths: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """Return copies for a user's function, which may work in place: the same lengths say where histories begin."""
    return {key: lengths_of_key.copy() for key, lengths_of_key in lengths.items()}
