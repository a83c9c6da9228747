"""Costs of models that are known from their shape: tokens, and the floating-point operations of layers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count, Positive
from evenrank.core.settings import Settings
from evenrank.dataloader.balance.costs.cost import COST_BITS, register_cost
from evenrank.datasets.schema import ACTION, ITEM_ID


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost(Settings, ABC):
    """Base of costs that depend on the numbers of a sample's history and candidate tokens.

    The tokens of a sample are, in this order, the values of the `contextual` keys and of `history_key`, with
    each action after its item if actions are interleaved. The last `num_candidates` values of `history_key` are the
    candidates, together with their actions if the batch has them; everything else is the history.
    """

    interleave_actions: bool
    """Each action is a token of its own after its item. A batch has actions whether or not a model reads them, so this
    does not follow from the batch."""
    contextual: tuple[str, ...] = ()
    """Keys whose values are tokens in front of the history."""
    history_key: str = ITEM_ID
    """Key whose values are the tokens of the history; `semantic_id` for a SemanticIdBatch."""
    max_tokens: Count = 131_072
    """Largest number of tokens of one sample; sets the scale on which costs are summed without overflow."""

    @property
    def max_cost(self) -> int:
        """The cost of a sample of `max_tokens`."""
        return self._of_history(self.max_tokens)

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the cost of each sample: int64 [B]; a ConfigError if the batch lacks a key or a cost overflows."""
        tokens = self.tokens(lengths)
        candidates = self.candidate_tokens(lengths, num_candidates)
        longest = int(tokens.max(initial=0))  # in int64 its cost could wrap around, possibly to a plausible one
        if self._of_history(longest).bit_length() > COST_BITS + 1:
            raise ConfigError(
                f"the cost of a sample of {longest:,} tokens does not fit in int64; max_tokens is {self.max_tokens:,}: "
                "create the cost with a larger max_tokens, or cut histories to it"
            )
        return self.of_tokens(tokens - candidates, candidates)

    def tokens(self, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample in the model: int64 [B]."""
        keys = (self.history_key, *((ACTION,) if self.interleave_actions else ()), *self.contextual)
        if missing := [key for key in keys if key not in lengths]:
            kind, known = type(self).__name__, ", ".join(lengths)
            raise ConfigError(f"the cost {kind} needs the key {missing[0]!r}; the batch has the keys {known}")
        tokens = lengths[keys[0]].astype(np.int64)
        for key in keys[1:]:
            tokens += lengths[key]
        return tokens

    def candidate_tokens(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the number of candidate tokens of each sample: int64 [B]; the others are the history."""
        history_items = lengths[self.history_key] - num_candidates
        if int(history_items.min(initial=0)) < 0:
            row = int(np.argmin(history_items))
            raise ConfigError(
                f"row {row} has {num_candidates[row]} candidates, but {lengths[self.history_key][row]} values of "
                f"{self.history_key!r}, the last of which are the candidates; correct num_candidates or history_key"
            )
        if not self.interleave_actions:
            return num_candidates
        # Actions belong to the first items: to the history alone, or to candidates as well.
        tokens: NDArray[np.int64] = num_candidates + np.clip(lengths[ACTION] - history_items, 0, num_candidates)
        return tokens

    @abstractmethod
    def of_tokens(self, history: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of samples with these numbers of history and candidate tokens, of the same shape.

        Of samples with equally many tokens, one without candidates must cost most.
        """

    def _of_history(self, tokens: int) -> int:
        """Return the cost of a sample with this many tokens of history and no candidates, without overflow."""
        return int(self.of_tokens(np.array([tokens], dtype=object), np.zeros(1, dtype=object))[0])


def attended_pairs(history: NDArray[np.int64], candidates: NDArray[np.int64], *, causal: bool) -> NDArray[np.int64]:
    """Return twice the number of pairs of tokens in which one attends to the other, of the same shape.

    Candidates attend to the history and to themselves, not to one another, and the history does not attend to them.
    Where attention is causal, a token's pair with itself counts half. With h history and c candidate tokens, 3 and 2:

        causal   h^2 / 2 + c (h + 1/2)       full   h^2 + c (h + 1)
                 1/2                                1 1 1
                 1   1/2                            1 1 1
                 1   1   1/2                        1 1 1
                 1   1   1   1/2                    1 1 1 1
                 1   1   1       1/2                1 1 1   1
    """
    if causal:
        return history * history + candidates * (2 * history + 1)
    return 2 * (history * history + candidates * (history + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost(TokenCost):
    """Base of the floating-point operations of the forward and backward pass through equal attention layers.

    For a sample with s tokens in p attended pairs (see `attended_pairs`) and w = `heads * head_dim`, the matrix
    products of the forward pass of a layer take, with 2 operations for a multiplication and an addition,

        scores Q K^T             p pairs, over w       2 p w
        weighted values          p pairs, over w       2 p w
        products of tokens       see the model         s * `operations_per_token`

    and twice that in the backward pass: each product A B needs the gradients of A and of B. Norms, gates and
    activations are linear in s and small next to these products; they are left out.
    """

    hidden: Count
    """Width of the residual stream."""
    heads: Count
    head_dim: Count
    """Width of a head, for queries, keys and values alike."""
    layers: Count
    causal: bool = True
    """Each token of the history attends to earlier ones only, and the kernel skips the others."""

    @property
    @abstractmethod
    def operations_per_token(self) -> int:
        """Operations of the products of a token in a layer's forward pass that do not depend on other tokens."""

    def of_tokens(self, history: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the operations of samples with these numbers of tokens, of the same shape."""
        attention = attended_pairs(history, candidates, causal=self.causal) * (2 * self.heads * self.head_dim)
        return ((history + candidates) * self.operations_per_token + attention) * (3 * self.layers)


@register_cost("hstu")
@dataclass(frozen=True, kw_only=True, slots=True)
class HSTUCost(LayerCost):
    """Floating-point operations of the forward and backward pass through an HSTU encoder (Zhai et al., 2024).

    With d = `hidden` and w = `heads * head_dim`, each of a layer's s tokens takes, besides attention (see `LayerCost`),

        U, V, Q, K projections   s rows, d -> 4 w      8 s d w
        output projection        s rows, w -> d        2 s w d
    """

    @property
    def operations_per_token(self) -> int:
        """Operations of the products of a token in a layer's forward pass."""
        return 10 * self.hidden * self.heads * self.head_dim


@register_cost("self-attention")
@dataclass(frozen=True, kw_only=True, slots=True)
class SelfAttentionCost(LayerCost):
    """Floating-point operations of the forward and backward pass through a transformer: SASRec, semantic-id models.

    With d = `hidden`, w = `heads * head_dim` and a feed-forward network of inner width f = int(`ffn_multiplier` * d),
    each of a layer's s tokens takes, besides attention (see `LayerCost`),

        Q, K, V projections      s rows, d -> 3 w      6 s d w
        output projection        s rows, w -> d        2 s w d
        feed-forward             s rows, d -> f -> d   4 s d f
    """

    interleave_actions: bool = False
    """Each action is a token of its own after its item; SASRec and semantic-id models have no tokens for actions."""
    ffn_multiplier: Positive
    """Inner width of the feed-forward network as a multiple of `hidden`, rounded down: 4, or 8/3."""

    @property
    def operations_per_token(self) -> int:
        """Operations of the products of a token in a layer's forward pass."""
        return 8 * self.hidden * self.heads * self.head_dim + 4 * self.hidden * int(self.ffn_multiplier * self.hidden)


@register_cost("linear")
@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCost(TokenCost):
    """The number of tokens of a sample, for models without attention, or whose attention takes little time."""

    def of_tokens(self, history: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of tokens, of the same shape."""
        return history + candidates


def counted_tokens(cost: object) -> dict[str, Any] | None:
    """Return the settings of a cost that say which tokens count, by name; None if it has none."""
    row = cost.row if isinstance(cost, PaddedCost) else cost
    if not isinstance(row, TokenCost):
        return None
    return {name: getattr(row, name) for name in ("history_key", "interleave_actions", "contextual", "max_tokens")}


@register_cost("padded")
@dataclass(frozen=True, slots=True)
class PaddedCost(Settings):
    """Cost of models that pad the samples of a rank to the longest: each row costs as much as the longest sample.

    A rank with B rows whose longest has s tokens costs B a s + B b s^2, where `row` gives a s + b s^2 to a sample of s
    tokens alone. The rank that trains on a sample makes no difference, because the longest sample of a step sets its
    time on any rank. `BalanceConfig(window=k)` gives each step samples of similar cost instead.
    """

    row: TokenCost
    """Cost of one row."""

    @property
    def max_cost(self) -> int:
        """The cost of the most expensive sample that can occur."""
        return self.row.max_cost

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the cost of one row as long as each sample: int64 [B]."""
        return self.row(lengths, num_candidates)

    def tokens(self, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, without padding: int64 [B]."""
        return self.row.tokens(lengths)
