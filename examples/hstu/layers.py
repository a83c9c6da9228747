"""`HSTULayer`: attention without softmax, and what is around it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from torch.utils.checkpoint import checkpoint

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry
from evenrank.core.rules import Bounds, Count, OneOf
from evenrank.core.settings import Settings
from evenrank.dataloader.balance import HSTUCost
from evenrank.datasets.schema import ACTION, ITEM_ID
from evenrank.training import Flops, ModelFlops, hstu_work

NORM_EPS = 1e-6  # attention divides by max_length, so short samples give LayerNorm small values


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Where the samples of a batch are in tensors [tokens, ...], and what their tokens are."""

    offsets: Tensor
    """int64 [B + 1]: sample b has the tokens offsets[b] .. offsets[b + 1] - 1."""
    num_contextual: Tensor
    """int64 [B]: how many of a sample's first tokens are contextual."""
    num_candidates: Tensor
    """int64 [B]: how many of a sample's last tokens are candidates."""
    num_tokens: int
    """Of the batch; on the host, so that nothing has to wait for the device."""
    max_length: int
    """A number of tokens that no sample of the batch exceeds; the closer, the less is launched for nothing."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sample: int64 [B]."""
        return self.offsets.diff()

    @cached_property
    def longest_first(self) -> Tensor:
        """The samples by descending length: int64 [B]."""
        return self.lengths.argsort(descending=True)

    @cached_property
    def rows(self) -> Tensor:
        """The sample of each token: int64 [tokens]."""
        return rows_and_index(self.lengths, self.num_tokens)[0]

    @cached_property
    def positions(self) -> Tensor:
        """Each token's place in its sample, from 0: int64 [tokens]."""
        return torch.arange(self.num_tokens, device=self.offsets.device) - self.offsets[self.rows]

    def pad(self, values: Tensor) -> Tensor:
        """Return values [tokens, ...] as [B, max_length, ...], with zeros behind each sample's tokens."""
        padded = values.new_zeros(len(self.offsets) - 1, self.max_length, *values.shape[1:])
        return padded.index_put((self.rows, self.positions), values)

    def unpad(self, padded: Tensor) -> Tensor:
        """Return the tokens of [B, max_length, ...]: [tokens, ...]."""
        return padded[self.rows, self.positions]

    def mask(self) -> Tensor:
        """Return which tokens see which: bool [B, max_length, max_length], False wherever there is no token.

        A sample's tokens are its contextual ones, its history and its candidates. With 1, 3 and 2 of them, row i sees:

            contextual   x x x x
            history      x x
                         x x x
                         x x x x
            candidates   x x x x x
                         x x x x   x
        """
        places = torch.arange(self.max_length, device=self.offsets.device)
        query, key = places[:, None], places[None, :]
        lengths, contextual, candidates = (
            counts[:, None, None] for counts in (self.lengths, self.num_contextual, self.num_candidates)
        )
        history = lengths - candidates  # contextual tokens included
        sees_history = (key < history) & ((key <= query) | (query < contextual))
        mask: Tensor = (query < lengths) & (sees_history | ((query == key) & (key < lengths)))
        return mask


def rows_and_index(counts: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
    """Return the row of each value of jagged rows, and its number in it: int64 [num_values] both.

    `counts`, int64 [B], are the values of each row, and `num_values` is their sum, on the host.
    """
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=num_values)
    return rows, torch.arange(num_values, device=counts.device) - offsets_of(counts)[rows]


def offsets_of(counts: Tensor) -> Tensor:
    """Return where each row begins, and where the last one ends: int64 [B + 1]."""
    return pad(counts.cumsum(0), (1, 0))


class Attention(Protocol):
    """The call that all implementations of attention have in common; see `padded_attention`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
        """Return what each token receives: [tokens, heads, head_dim]."""
        ...


ATTENTIONS: Registry[Attention] = Registry("attention", expected="a function", accepts=callable)


@ATTENTIONS.register("padded")
def padded_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    """Attend by padding all samples to the longest: the reference, in plain PyTorch, for every device and dtype.

        out_i = sum over the tokens j that i sees of SiLU(q_i · k_j / sqrt(head_dim)) / scale_length * v_j

    There is no softmax: weights do not compete, and a token that sees nothing gets 0 (Zhai et al., equation 2).

    Query, key, value and the result are [tokens, heads, head_dim]; `scale_length` is the longest that a sample can be,
    the same for all batches.
    """
    queries, keys, values = (sequences.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    weights = silu(scores) * sequences.mask()[:, None] / scale_length
    return sequences.unpad((weights @ values).transpose(1, 2))


@ATTENTIONS.register("triton")
def _triton(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    if not query.is_cuda:
        raise ConfigError(f"the attention 'triton' needs a CUDA device, got {query.device}; choose 'auto' or 'padded'")
    from hstu.fused import triton_attention  # Triton comes with PyTorch for CUDA alone

    return triton_attention(query, key, value, sequences, scale_length=scale_length)


@ATTENTIONS.register("auto")
def _auto(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    name = "padded"
    if query.is_cuda:
        from hstu.fused import DTYPES, HEAD_DIMS

        name = "triton" if query.shape[-1] in HEAD_DIMS and query.dtype in DTYPES else "padded"
    return ATTENTIONS[name](query, key, value, sequences, scale_length=scale_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class HSTUConfig(Settings):
    """The shape of an HSTU encoder, and how it is computed."""

    max_length: Count
    """The longest that a sample can be, in tokens: contextual ones, items and, if interleaved, actions. Attention
    weights are divided by it, the same for every batch, so that logits do not depend on the other samples of a batch.
    """
    contextual: tuple[str, ...] = ()
    """Features whose values are tokens in front of the history, such as `user_id`, in this order."""
    item_features: tuple[str, ...] = ()
    """Features of items, one value per item, whose embeddings are added to those of the items."""
    interleave_actions: bool = True
    """Each action is a token of its own after its item; otherwise actions are not read."""
    embedding_dim: Count = 128
    """Width of all embedding tables."""
    hidden: Count = 256
    """Width of the residual stream."""
    heads: Count = 4
    """Attention heads of a layer."""
    head_dim: Count = 64
    """Width of a head, for U, V, Q and K alike."""
    layers: Count = 4
    """Number of layers."""
    position_buckets: Count = 1024
    """Positions with an embedding of their own; later tokens share the last one."""
    dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.1
    """Of what a layer adds to the residual stream; 0 where balanced and unbalanced training are compared."""
    attention: Annotated[str, OneOf(ATTENTIONS)] = "auto"
    """Name in `ATTENTIONS`; `auto`: `triton` on CUDA if it has kernels for head_dim and dtype, else `padded`."""
    fused: bool = True
    """Compute layers by fused Triton kernels where those can run; see the README."""
    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them: fused layers their input LayerNorm and
    SiLU, other layers all of theirs."""

    @property
    def features(self) -> tuple[str, ...]:
        """The features whose values are tokens."""
        return (*self.contextual, ITEM_ID, *((ACTION,) if self.interleave_actions else ()))

    def cost(self) -> HSTUCost:
        """Return what a sample costs in this model, for balancing."""
        return HSTUCost(
            hidden=self.hidden,
            heads=self.heads,
            head_dim=self.head_dim,
            layers=self.layers,
            interleave_actions=self.interleave_actions,
            contextual=self.contextual,
            max_tokens=self.max_length,
        )


class HSTUAttention(nn.Module):
    """The attention of a layer; a module, so that hooks such as an AttentionTracker's can find it."""

    def __init__(self, name: str, scale_length: int) -> None:
        super().__init__()
        self.name = name
        self.scale_length = scale_length

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return what each token receives: [tokens, heads, head_dim], as all three arguments are."""
        return ATTENTIONS[self.name](query, key, value, sequences, scale_length=self.scale_length)


def attention_flops(layer: nn.Module, arguments: Mapping[str, Any]) -> Flops:
    """Return the FLOPs of a call of an HSTUAttention; as kernels are quoted, the backward has 2.5 times as many."""
    sequences = arguments["sequences"]
    history = sequences.lengths - sequences.num_candidates
    work = hstu_work(history, sequences.num_contextual, sequences.num_candidates, predictions=0)
    heads, head_dim = arguments["query"].shape[1:]
    return ModelFlops(per_token=0, per_pair=4 * heads * head_dim).of(work).with_recomputed_scores()


class HSTULayer(nn.Module):
    """One layer (Zhai et al., equations 1 to 3).

    U, V, Q, K = SiLU(linear(LayerNorm(X)))
    X + linear(dropout(LayerNorm(attention(Q, K, V)) * U))
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.head_dim, self.fused, self.recompute = config.head_dim, config.fused, config.recompute
        width = config.heads * config.head_dim
        self.input_norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.uvqk = nn.Linear(config.hidden, 4 * width)  # [heads, (U, V, Q, K), head_dim]
        self.attention = HSTUAttention(config.attention, config.max_length)
        self.output_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(width, config.hidden)

    def forward(self, tokens: Tensor, update: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Apply the layer to the residual stream, which is `tokens` + `update`, [tokens, hidden] both.

        Fused kernels compute the sum together with the norm that follows it, so the layer returns its parts: the next
        `tokens` and `update`.
        """
        if self.fused and tokens.is_cuda and self.is_plain():
            from hstu.fused import fused_layer, has_kernels  # Triton comes with PyTorch for CUDA alone

            if has_kernels(self, tokens, update):
                return fused_layer(self, tokens, update, sequences)
        if self.recompute:
            result: tuple[Tensor, Tensor] = checkpoint(self.by_parts, tokens, update, sequences, use_reentrant=False)
            return result
        return self.by_parts(tokens, update, sequences)

    def is_plain(self) -> bool:
        """Return whether the fused kernels compute what the modules would: no dropout, no hooks."""
        hooks = (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in self.children())
        return not (self.training and self.dropout.p) and not any(hooks)

    def by_parts(self, tokens: Tensor, update: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Apply the layer module by module; see `forward`."""
        stream = tokens + update
        projected = silu(self.uvqk(self.input_norm(stream)))
        u, v, q, k = projected.unflatten(-1, (-1, 4, self.head_dim)).unbind(-2)
        attended = self.attention(q, k, v, sequences)
        gated = self.output_norm(attended.flatten(-2)) * u.flatten(-2)
        return stream, self.output(self.dropout(gated))
