"""Lengths -> what a sample costs to train on, as whole numbers.

A cost is anything that can be called with a batch's lengths and numbers of candidates and returns int64:

    cost({"item_id": [12, 0, 7], "action": [12, 0, 7], ...}, num_candidates=[1, 0, 1]) -> [c0, c1, c2]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch
from evenrank.datasets.schema import ACTION, ITEM_ID

# All costs of a step are added up in int64; one bit is the sign's, one is left for sums of two sums.
_COST_BITS = 62


class Cost(Protocol):
    """What a sample costs, in any unit: only ratios matter."""

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the cost of each sample.

        Args:
            lengths: per jagged key, int64 [B]. A key that a second KeyedJaggedTensor has too is called `field.key`.
            num_candidates: int64 [B]; zeros for batches that have none.

        Returns:
            int64 [B], none negative.

        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost:
    """What costs of sequence models have in common: which values of a sample are tokens of the model."""

    interleave_actions: bool = False  # each action is a token of its own behind its item
    contextual: tuple[str, ...] = ()  # keys whose values are tokens in front of the history
    history_key: str = ITEM_ID  # key whose values are the history's tokens; of a SemanticIdBatch, `semantic_id`
    max_tokens: int = 131_072  # of one sample; fixes the scale on which costs are added up without overflow

    def __post_init__(self) -> None:
        for name, value in ((entry.name, getattr(self, entry.name)) for entry in fields(self)):
            if name in ("hidden", "heads", "head_dim", "layers", "max_tokens") and value < 1:
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
            ConfigError: batches lack a key whose values are tokens, or a cost would overflow.

        """
        tokens = self.tokens(lengths)
        # In int64 a cost that is too large would wrap around, perhaps to one that looks sound.
        longest = int(tokens.max(initial=0))
        if int(self.of_tokens(np.array([longest], dtype=object))[0]).bit_length() > _COST_BITS + 1:
            raise ConfigError(
                f"the cost of a sample of {longest:,} tokens does not fit in int64; max_tokens is {self.max_tokens:,}: "
                "make the cost with a larger one, or cut histories to it"
            )
        return self.of_tokens(tokens)

    def tokens(self, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the tokens that each sample has in the model: int64 [B]."""
        keys = (self.history_key, *((ACTION,) if self.interleave_actions else ()), *self.contextual)
        missing = [key for key in keys if key not in lengths]
        if missing:
            raise ConfigError(f"the cost needs the key {missing[0]!r}; batches have {', '.join(lengths)}")
        tokens: NDArray[np.int64] = np.sum([lengths[key] for key in keys], axis=0)
        return tokens

    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of samples with these numbers of tokens, of the same shape."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class HSTUCost(TokenCost):
    """Floating-point operations of forward and backward through an HSTU encoder (Zhai et al., 2024).

    Of a sample with s tokens, width d = `hidden` and w = `heads * head_dim`, a layer's matrix products take, at 2
    operations for a multiplication and an addition,

        U, V, Q, K projections   s rows, d -> 4 w      8 s d w
        scores Q K^T             s x s, over w         2 s^2 w    (half of it where attention is causal)
        weighted values          s x s, over w         2 s^2 w    (likewise)
        output projection        s rows, w -> d        2 s w d

    forward, and twice that backward: each product A B has the gradients by A and by B, of the same size. Norms, gates
    and activations are linear in s and small beside the projections; they are left out.
    """

    hidden: int
    heads: int
    head_dim: int
    layers: int
    causal: bool = True

    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the operations of samples with these numbers of tokens, of the same shape."""
        width = self.heads * self.head_dim
        projections = 10 * tokens * self.hidden * width
        attention = (2 if self.causal else 4) * tokens * tokens * width
        return 3 * self.layers * (projections + attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfAttentionCost(TokenCost):
    """Floating-point operations of forward and backward through a transformer: SASRec, and models of semantic ids.

    Of a sample with s tokens, width d = `hidden`, w = `heads * head_dim` and a feed-forward network of inner width
    f = int(`ffn_multiplier` * d), a layer's matrix products take, at 2 operations for a multiplication and an addition,

        Q, K, V projections      s rows, d -> 3 w      6 s d w
        scores Q K^T             s x s, over w         2 s^2 w    (half of it where attention is causal)
        weighted values          s x s, over w         2 s^2 w    (likewise)
        output projection        s rows, w -> d        2 s w d
        feed-forward             s rows, d -> f -> d   4 s d f

    forward, and twice that backward, as for `HSTUCost`. The scores of each head are over `head_dim`, so those of all
    heads together are over w: heads are counted once. Norms, softmax and activations are left out.
    """

    hidden: int
    heads: int
    head_dim: int
    layers: int
    ffn_multiplier: float  # 4, or 8/3; the inner width is rounded down
    causal: bool = True

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


def tokens_of(cost: Cost, lengths: Mapping[str, NDArray[np.int64]], size: int) -> NDArray[np.int64]:
    """Return the tokens of each sample: int64 [size].

    Args:
        cost: if it has a method `tokens`, that says.
        lengths: per jagged key, int64 [size]; else the tokens are their sum over keys, 0 if there are no keys.
        size: how many samples there are.

    """
    if (tokens := getattr(cost, "tokens", None)) is not None:
        return np.asarray(tokens(lengths), dtype=np.int64)
    total: NDArray[np.int64] = np.sum([*lengths.values(), np.zeros(size, dtype=np.int64)], axis=0)
    return total


def cost_shift(cost: Cost, samples_per_step: int) -> int:
    """Return by how many bits costs are shifted right so that those of a whole step add up within 62 bits.

    It follows from the configuration alone, so it is the same on all ranks and in all steps. A cost that does not
    declare its `max_cost` is not shifted.
    """
    max_cost = getattr(cost, "max_cost", None)
    return 0 if max_cost is None else max(0, (samples_per_step * int(max_cost)).bit_length() - _COST_BITS)


def batch_costs(
    cost: Cost, batch: JaggedBatch, lengths: Mapping[str, NDArray[np.int64]], *, world_size: int
) -> NDArray[np.int64]:
    """Call `cost` for a batch, check what it returns, and scale it for adding up.

    Args:
        cost: what a sample costs.
        batch: gives `num_candidates`, if it has any, and which rows are real.
        lengths: per jagged key, int64 [B].
        world_size: the number of ranks whose samples are added up.

    Returns:
        int64 [B]; padding costs 0, whatever the function says of length 0.

    Raises:
        ConfigError: the costs are not whole numbers, one is negative, or so large that a step could overflow.

    """
    candidates = getattr(batch, "num_candidates", None)
    shape = (batch.batch_size,)
    costs = np.asarray(cost(lengths, np.zeros(shape, dtype=np.int64) if candidates is None else candidates.numpy()))
    if costs.shape != shape or costs.dtype.kind not in "iu":
        raise ConfigError(f"a cost must return int64 of shape {shape}, got {costs.dtype} of shape {costs.shape}")
    real = costs[: batch.num_real]
    samples_per_step = world_size * batch.batch_size
    scaled = np.zeros(shape, dtype=np.int64)
    scaled[: batch.num_real] = real.astype(np.int64) >> cost_shift(cost, samples_per_step)
    if len(real) and int(real.min()) < 0:
        raise ConfigError(f"a cost must not be negative, got {int(real.min())}")
    limit = (1 << _COST_BITS) // samples_per_step
    if int(scaled.max()) > limit:
        raise ConfigError(
            f"a cost of {int(real.max())} is too large to be added up over {samples_per_step:,} samples; raise "
            f"max_tokens of the cost, or return costs of at most {limit}"
        )
    return scaled
