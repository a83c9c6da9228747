"""FLOPs of a batch, from its lengths.

They are the floating-point operations of matrix products: one of [m, k] and [k, n] takes 2 m k n. Norms, activations,
gates, softmax, position buckets and embedding lookups are left out, as in the model FLOPs by which utilization is
defined (Chowdhery et al., 2022, "PaLM", appendix B). FLOPs are linear in three counts:

    tokens        rows of the linear layers
    pairs         pairs of tokens of which the first attends to the second: scores and weighted values
    predictions   rows of the head, the loss tokens

Wasted operations, on padding or masked pairs, are not counted; neither is recomputation.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count
from evenrank.core.settings import check_types
from evenrank.dataloader.batches.batch import SequenceBatch
from evenrank.datasets.schema import ACTION, ITEM_ID

Scalar = int | Tensor
"""An int, or an int64 scalar on any device, so that counting on a GPU does not wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Operations of a forward and a backward pass."""

    linear_forward: Scalar
    linear_backward: Scalar
    """Twice the forward's: each product A B has the gradients of A and of B, of the same size."""
    attention_forward: Scalar
    """FLOPs of scores and weighted values."""
    attention_backward: Scalar
    """Twice the forward's, or 2.5 times; see `with_recomputed_scores`."""

    @property
    def forward(self) -> Scalar:
        """Of linear layers and attention."""
        return self.linear_forward + self.attention_forward

    @property
    def backward(self) -> Scalar:
        """Of linear layers and attention."""
        return self.linear_backward + self.attention_backward

    @property
    def total(self) -> Scalar:
        """Forward and backward."""
        return self.forward + self.backward

    def with_recomputed_scores(self) -> Self:
        """Scalar the scores that fused kernels compute again in the backward pass: 5 products there, after 2.

        This is for the speed of kernels (Dao, 2023, "FlashAttention-2", section 4.1); MFU is defined without them.
        """
        return dataclasses.replace(self, attention_backward=self.attention_forward * 5 // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The counts of a batch in which FLOPs are linear."""

    tokens: Scalar
    pairs: Scalar
    """Pairs of tokens of which the first attends to the second, itself included; per head and layer."""
    predictions: Scalar
    """Rows of the head, such as candidates or loss tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Forward FLOPs of a model per unit of its work; see `hstu_flops` and `decoder_flops`."""

    per_token: int
    """FLOPs of all linear layers that a token passes through."""
    per_pair: int
    """FLOPs of all attention layers and heads: 4 heads head_dim in each layer."""
    per_prediction: int = 0
    """Of the head."""

    def of(self, work: Work) -> Flops:
        """Return the FLOPs of a step; scalars on a device where the counts are."""
        linear = self.per_token * work.tokens + self.per_prediction * work.predictions
        attention = self.per_pair * work.pairs
        return Flops(
            linear_forward=linear,
            linear_backward=2 * linear,
            attention_forward=attention,
            attention_backward=2 * attention,
        )


def mlp_flops(widths: Sequence[int]) -> int:
    """Return the forward FLOPs of a row through linear layers of these widths, the input's first."""
    return sum(2 * inner * outer for inner, outer in pairwise(widths))


def hstu_flops(
    *,
    hidden: Count,
    heads: Count,
    head_dim: Count,
    layers: Count,
    embedding: Sequence[int] = (),
    head: Sequence[int] = (),
) -> ModelFlops:
    """Return the FLOPs of an HSTU model (Zhai et al., 2024): in each layer, one linear to U, V, Q, K and one back.

    Args:
        hidden: width of the residual stream.
        heads: attention heads of a layer; of this rank, if they are distributed in tensor parallelism.
        embedding: widths of the MLP between embedding and first layer, such as (128, 256, 256).
        head: widths of the MLP of a prediction, such as (256, 512, tasks), or (hidden, scored items) for a sampled
            softmax with negatives of its own for each prediction.
    """
    check_types(hstu_flops, locals())
    width = heads * head_dim
    per_token = mlp_flops(embedding) + layers * (mlp_flops((hidden, 4 * width)) + mlp_flops((width, hidden)))
    return ModelFlops(per_token=per_token, per_pair=layers * 4 * width, per_prediction=mlp_flops(head))


def decoder_flops(
    *, hidden: Count, heads: Count, head_dim: Count, layers: Count, ffn_hidden: Count, head: Sequence[int] = ()
) -> ModelFlops:
    """Return the FLOPs of a decoder with softmax attention and a feed-forward network of two linears, as in SASRec.

    See `hstu_flops`; `ffn_hidden` is the inner width of the feed-forward network.
    """
    check_types(decoder_flops, locals())
    width = heads * head_dim
    layer = mlp_flops((hidden, 3 * width)) + mlp_flops((width, hidden)) + mlp_flops((hidden, ffn_hidden, hidden))
    return ModelFlops(per_token=layers * layer, per_pair=layers * 4 * width, per_prediction=mlp_flops(head))


def hstu_pairs(history: Tensor, contextual: Tensor, candidates: Tensor) -> Tensor:
    """Return the number of pairs of each sample's tokens of which the first attends to the second: int64 [B].

    Contextual tokens attend to one another and the whole history; tokens of the history to themselves and earlier ones;
    candidates to the history and themselves. With 3 tokens of history, 1 of them contextual, and 2 candidates:

        contextual   x x x
        history      x x
                     x x x
        candidates   x x x x
                     x x x   x

    All are integers [B]; `history` includes `contextual`.
    """
    history, contextual, candidates = history.long(), contextual.long(), candidates.long()
    causal = (history * (history + 1) - contextual * (contextual + 1)) // 2
    return causal + contextual * history + candidates * (history + 1)


def hstu_work(history: Tensor, contextual: Tensor, candidates: Tensor, *, predictions: Scalar) -> Work:
    """Return the work of an HSTU model on samples of the lengths of `hstu_pairs`, without waiting for their device.

    `predictions` are `batch.loss_tokens` for most models.
    """
    pairs = hstu_pairs(history, contextual, candidates).sum()
    return Work(tokens=(history + candidates).long().sum(), pairs=pairs, predictions=predictions)


def causal_work(tokens: Tensor, *, predictions: Scalar) -> Work:
    """Return the work of a causal decoder on samples of `tokens` (integers [B]), without waiting for their device."""
    none = torch.zeros_like(tokens)
    return hstu_work(tokens, none, none, predictions=predictions)


def batch_work(batch: SequenceBatch, *, interleave_actions: bool, contextual: Sequence[str] = ()) -> Work:
    """Return the work of an HSTU model on a batch, as scalars on the batch's device, without waiting for it.

    Contextual tokens attend to the whole history, unless it has loss tokens: in retrieval, and with labels of the
    history, they would reveal its future, so they attend only to earlier ones.

    With `interleave_actions`, each action is a token of its own after its item; see `HSTUCost`. The values of the keys
    `contextual` are tokens in front of the history.
    """
    items, candidates = _lengths(batch, ITEM_ID), batch.num_candidates[: batch.num_real]
    history = items - candidates
    if interleave_actions:
        actions = _lengths(batch, ACTION)  # of the first items: of the history alone, or of the candidates as well
        candidate_actions = (actions - history).clamp(min=0).minimum(candidates)
        history = history + actions - candidate_actions
        candidates = candidates + candidate_actions
    front = sum((_lengths(batch, key) for key in contextual), torch.zeros_like(items))
    if (labels := batch.any_labels) is None:  # retrieval: each item is predicted
        sees_history = torch.zeros_like(front)
    else:
        sees_history = front.masked_fill((labels.lengths() > batch.num_candidates)[: batch.num_real], 0)
    return hstu_work(history + front, sees_history, candidates, predictions=batch.loss_tokens)


def _lengths(batch: SequenceBatch, key: str) -> Tensor:
    keys = batch.features.keys()
    if key not in keys:
        raise ConfigError(f"the work needs the key {key!r}; batches have {', '.join(keys)}")
    lengths: Tensor = batch.features.lengths().view(len(keys), -1)[keys.index(key)]
    return lengths[: batch.num_real].long()  # padding is no work
