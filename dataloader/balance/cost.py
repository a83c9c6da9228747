"""Lengths -> what a sample costs to train, as integers.

A cost is any callable that takes the lengths and the numbers of candidates of a batch's samples, and returns int64:

    cost({"item_id": [12, 0, 7], "action": [12, 0, 7], ...}, num_candidates=[1, 0, 1]) -> [c0, c1, c2]

Costs are integers so that every rank computes the same plan from the gathered costs, whatever its floating-point unit
rounds. They are shifted right by a number of bits that follows from the configuration alone, so that the costs of a
whole step add up below 2^62.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import ACTION, ITEM_ID

# The costs of a step are summed in int64: one bit is the sign, one is left for the sum of two sums.
_COST_BITS = 62


class Cost(Protocol):
    """What a sample costs, in any unit: only ratios matter."""

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the cost of each sample.

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
        """Return the tokens of each sample: int64 [B], given the lengths per jagged key, int64 [B]."""
        ...


@runtime_checkable
class BoundsCosts(Protocol):
    """A cost that knows its largest value, so that costs can be scaled to add up without overflow; optional."""

    @property
    def max_cost(self) -> int:
        """The cost of the most expensive sample that can occur."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost(ABC):
    """Base of costs that depend on the number of a sample's tokens."""

    interleave_actions: bool = False
    """Each action is a token of its own after its item."""

    contextual: tuple[str, ...] = ()
    """Keys whose values are tokens in front of the history."""

    history_key: str = ITEM_ID
    """Key whose values are the tokens of the history; `semantic_id` for a SemanticIdBatch."""

    max_tokens: int = 131_072
    """Largest number of tokens of one sample; sets the scale on which costs are summed without overflow."""

    _AT_LEAST_ONE: ClassVar[tuple[str, ...]] = ("max_tokens",)

    def __post_init__(self) -> None:
        for name in self._AT_LEAST_ONE:
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @property
    def max_cost(self) -> int:
        """The cost of a sample of `max_tokens`."""
        return int(self.of_tokens(np.array([self.max_tokens], dtype=object))[0])

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the cost of each sample: int64 [B].

        Raises:
            ConfigError: the batch lacks a key whose values are tokens, or a cost would overflow.

        """
        tokens = self.tokens(lengths)
        # In int64 a cost that is too large would wrap around, possibly to a plausible one.
        longest = int(tokens.max(initial=0))
        if int(self.of_tokens(np.array([longest], dtype=object))[0]).bit_length() > _COST_BITS + 1:
            raise ConfigError(
                f"the cost of a sample of {longest:,} tokens does not fit in int64; max_tokens is {self.max_tokens:,}: "
                "create the cost with a larger max_tokens, or cut histories to it"
            )
        return self.of_tokens(tokens)

    def tokens(self, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample in the model: int64 [B]."""
        keys = (self.history_key, *((ACTION,) if self.interleave_actions else ()), *self.contextual)
        missing = [key for key in keys if key not in lengths]
        if missing:
            raise ConfigError(f"the cost needs the key {missing[0]!r}; batches have {', '.join(lengths)}")
        tokens: NDArray[np.int64] = np.sum([lengths[key] for key in keys], axis=0)
        return tokens

    @abstractmethod
    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of samples with these numbers of tokens, of the same shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HSTUCost(TokenCost):
    """Floating-point operations of the forward and backward pass through an HSTU encoder (Zhai et al., 2024).

    For a sample with s tokens, width d = `hidden` and w = `heads * head_dim`, the matrix products of a layer take, with
    2 operations for a multiplication and an addition,

        U, V, Q, K projections   s rows, d -> 4 w      8 s d w
        scores Q K^T             s x s, over w         2 s^2 w    (half of it where attention is causal)
        weighted values          s x s, over w         2 s^2 w    (half of it where attention is causal)
        output projection        s rows, w -> d        2 s w d

    in the forward pass, and twice that in the backward pass: each product A B needs the gradients of A and of B, of the
    same size. Norms, gates and activations are linear in s and small next to the projections; they are left out.
    """

    hidden: int
    """Width of the residual stream."""

    heads: int
    """Attention heads of a layer."""

    head_dim: int
    """Width of a head, for U, V, Q and K alike."""

    layers: int
    """Number of layers."""

    causal: bool = True
    """Each token attends to earlier ones only, and the kernel skips the others."""

    _AT_LEAST_ONE: ClassVar[tuple[str, ...]] = ("max_tokens", "hidden", "heads", "head_dim", "layers")

    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the operations of samples with these numbers of tokens, of the same shape."""
        width = self.heads * self.head_dim
        projections = 10 * tokens * self.hidden * width
        attention = (2 if self.causal else 4) * tokens * tokens * width
        return 3 * self.layers * (projections + attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfAttentionCost(TokenCost):
    """Floating-point operations of the forward and backward pass through a transformer: SASRec, semantic-id models.

    For a sample with s tokens, width d = `hidden`, w = `heads * head_dim` and a feed-forward network of inner width
    f = int(`ffn_multiplier` * d), the matrix products of a layer take, with 2 operations for a multiplication and an
    addition,

        Q, K, V projections      s rows, d -> 3 w      6 s d w
        scores Q K^T             s x s, over w         2 s^2 w    (half of it where attention is causal)
        weighted values          s x s, over w         2 s^2 w    (half of it where attention is causal)
        output projection        s rows, w -> d        2 s w d
        feed-forward             s rows, d -> f -> d   4 s d f

    in the forward pass, and twice that in the backward pass, as for `HSTUCost`. The scores of one head are over
    `head_dim`, so those of all heads are over w. Norms, softmax and activations are left out.
    """

    hidden: int
    """Width of the residual stream."""

    heads: int
    """Attention heads of a layer."""

    head_dim: int
    """Width of a head."""

    layers: int
    """Number of layers."""

    ffn_multiplier: float
    """Inner width of the feed-forward network as a multiple of `hidden`, rounded down: 4, or 8/3."""

    causal: bool = True
    """Each token attends to earlier ones only, and the kernel skips the others."""

    _AT_LEAST_ONE: ClassVar[tuple[str, ...]] = ("max_tokens", "hidden", "heads", "head_dim", "layers")

    def __post_init__(self) -> None:
        TokenCost.__post_init__(self)
        if not 0 < self.ffn_multiplier < math.inf:
            raise ConfigError(f"ffn_multiplier must be positive and finite, got {self.ffn_multiplier}")

    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the operations of samples with these numbers of tokens, of the same shape."""
        width = self.heads * self.head_dim
        projections = 8 * tokens * self.hidden * width
        attention = (2 if self.causal else 4) * tokens * tokens * width
        feed_forward = 4 * tokens * self.hidden * int(self.ffn_multiplier * self.hidden)
        return 3 * self.layers * (projections + attention + feed_forward)


def count_tokens(cost: Cost, lengths: Mapping[str, NDArray[np.int64]], num_samples: int) -> NDArray[np.int64]:
    """Return the tokens of each sample: int64 [num_samples].

    Args:
        cost: counts them if it has a method `tokens`; otherwise they are the sum of the lengths over all keys.
        lengths: per jagged key, int64 [num_samples].
        num_samples: the number of samples.

    """
    if isinstance(cost, CountsTokens):
        return np.asarray(cost.tokens(lengths), dtype=np.int64)
    total: NDArray[np.int64] = np.sum([*lengths.values(), np.zeros(num_samples, dtype=np.int64)], axis=0)
    return total


def cost_shift(cost: Cost, samples_per_step: int) -> int:
    """Return by how many bits costs are shifted right so that those of a whole step add up within 62 bits.

    It follows from the configuration alone, so it is the same on all ranks and in all steps. A cost without a
    `max_cost` is not shifted.
    """
    if not isinstance(cost, BoundsCosts):
        return 0
    return max(0, (samples_per_step * int(cost.max_cost)).bit_length() - _COST_BITS)


def scaled_costs(
    cost: Cost,
    lengths: Mapping[str, NDArray[np.int64]],
    num_candidates: NDArray[np.int64],
    *,
    num_real: int,
    world_size: int,
) -> NDArray[np.int64]:
    """Call `cost` for the rows of a batch, check what it returns, and scale it so that costs can be summed.

    Args:
        cost: what a sample costs.
        lengths: per jagged key, int64 [B].
        num_candidates: int64 [B].
        num_real: how many of the first rows are samples.
        world_size: the number of ranks whose costs are summed.

    Returns:
        int64 [B]; padding costs 0, whatever `cost` returns for a length of 0.

    Raises:
        ConfigError: the costs are not integers, one is negative, or so large that a step could overflow.

    """
    costs = np.asarray(cost(lengths, num_candidates))
    if costs.shape != num_candidates.shape or costs.dtype.kind not in "iu":
        raise ConfigError(
            f"a cost must return int64 of shape {num_candidates.shape}, got {costs.dtype} of shape {costs.shape}"
        )
    real = costs[:num_real]
    samples_per_step = world_size * len(costs)
    scaled = np.zeros(costs.shape, dtype=np.int64)
    scaled[:num_real] = real.astype(np.int64) >> cost_shift(cost, samples_per_step)
    if len(real) and int(real.min()) < 0:
        raise ConfigError(f"a cost must not be negative, got {int(real.min())}")
    limit = (1 << _COST_BITS) // samples_per_step
    if int(scaled.max()) > limit:
        raise ConfigError(
            f"a cost of {int(real.max())} is too large to be summed over {samples_per_step:,} samples; raise "
            f"max_tokens of the cost, or return costs of at most {limit}"
        )
    return scaled
