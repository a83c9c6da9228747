"""`SemanticIdModel`: a causal decoder that predicts the codes of the next item one after the other (TIGER, 2023).

    levels = 2     features   user_id u   semantic_id a1 a2 b1 b2   candidate_id c1 c2

    token           u   a1  a2  b1  b2  BOS  c1  c2
    predicts                b1  b2       c1  c2          (b1 and b2 in batches with labels of the history)

Each code is predicted at the token before it; only the target's first one is predicted at BOS, which stands for the end
of the history. Sizes are known on the host, so nothing waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Bounds, Count
from evenrank.core.settings import Settings
from evenrank.dataloader import SemanticIdBatch
from evenrank.dataloader.balance import SelfAttentionCost
from evenrank.dataloader.codes import CANDIDATE_ID, SEMANTIC_ID
from hstu.layers import Sequences, offsets_of, rows_and_index
from hstu.model import arrange

BOS = "BOS"
_ROTARY_BASE = 10_000.0  # of Su et al., RoFormer, 2021, section 3.3


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(Settings):
    """The shape of a decoder over semantic ids."""

    codebook_sizes: tuple[Count, ...]
    """[levels]: the codes of a level are in 0..size-1; as in `CodeTable.codebook_sizes`."""
    contextual: Mapping[str, int] = field(default_factory=dict)
    """Features whose values are tokens in front of the history, such as `user_id`, with the size of their vocabulary,
    as in `Manifest.vocabulary_sizes`.
    """
    hidden: Count = 128
    """Width of the residual stream."""
    heads: Count = 4
    """Attention heads of a layer; `hidden / heads`, the width of a head, must be even."""
    layers: Count = 4
    """Number of layers."""
    ffn_multiplier: Count = 4
    """Inner width of the feed-forward network as a multiple of `hidden`."""
    dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.1
    """Of what a layer adds to the residual stream; 0 where balanced and unbalanced training are compared."""

    def _check(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ConfigError(f"hidden must be a multiple of 2 * heads, got {self.hidden} and {self.heads}")

    @property
    def levels(self) -> int:
        """Codes of an item."""
        return len(self.codebook_sizes)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def cost(self) -> SelfAttentionCost:
        """Return what a sample costs in this model, for balancing; BOS, the same for all samples, is left out."""
        return SelfAttentionCost(
            hidden=self.hidden,
            heads=self.heads,
            head_dim=self.head_dim,
            layers=self.layers,
            ffn_multiplier=self.ffn_multiplier,
            history_key=SEMANTIC_ID,
            contextual=(*self.contextual, CANDIDATE_ID),
        )


def lay_out(batch: SemanticIdBatch, names: Sequence[str]) -> tuple[Sequences, dict[str, Tensor]]:
    """Return where the samples of a batch are, and the token of each value of each feature: int64 [values].

    Args:
        batch: of a loader of evenrank or a Balancer, which know the lengths of the longest rows.
        names: the features whose values are a sample's tokens, and BOS, in this order. Rows of padding have BOS.

    Raises:
        ConfigError: the batch lacks a feature.
    """
    known = batch.features.keys()
    if missing := [name for name in names if name not in (*known, BOS)]:
        raise ConfigError(
            f"the model needs the feature {missing[0]!r}; batches have {', '.join(known)}; see contextual of the "
            "DecoderConfig, user_id and candidate_feature of the LoaderConfig"
        )
    assert batch.max_lengths is not None
    lengths = dict(zip(known, batch.features.lengths().view(len(known), -1).long(), strict=True))
    lengths[BOS] = torch.ones_like(lengths[known[0]])
    sizes = {**dict(zip(known, batch.features.length_per_key(), strict=True)), BOS: batch.batch_size}
    longest = {**batch.max_lengths, BOS: 1}
    offsets = offsets_of(torch.stack([lengths[name] for name in names]).sum(dim=0))
    places, begins = {}, offsets[:-1]
    for name in names:
        rows, index = rows_and_index(lengths[name], sizes[name])
        places[name] = begins[rows] + index
        begins = begins + lengths[name]
    none = torch.zeros_like(begins)  # attention is causal for all tokens
    sequences = Sequences(
        offsets=offsets,
        num_contextual=none,
        num_candidates=none,
        num_tokens=sum(sizes[name] for name in names),
        max_length=sum(longest[name] for name in names),
    )
    return sequences, places


def predicting_tokens(batch: SemanticIdBatch, bos: Tensor, levels: int) -> Tensor:
    """Return the token at which each label is predicted: int64 [labels].

    The last `levels` labels of a sample are the target's codes, and those before them the last codes of the history.
    `bos` is the token BOS of each row.
    """
    counts = batch.labels.lengths().long()
    rows, index = rows_and_index(counts, batch.labels.length_per_key()[0])
    from_target = index - (counts[rows] - levels)  # 0 for the target's first code, negative before it
    # The token before BOS predicts nothing, so the history's last code, -1, is predicted two tokens before BOS.
    tokens: Tensor = bos[rows] + from_target - (from_target < 0).long()
    return tokens


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query, key and value [tokens, heads, head_dim] to what each token receives, of the same shape."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Attend from each token to itself and to earlier ones of its sample: [tokens, heads, head_dim], as all arguments.

    On CUDA with work only for the tokens that exist. Elsewhere, and in float64, PyTorch has no kernels for that, so all
    samples are padded to the longest; padding comes last, so no token of a sample sees it.
    """
    if not query.is_cuda or query.dtype == torch.float64:
        query, key, value = (sequences.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
        return sequences.unpad(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2))
    # With both lengths given, nothing has to wait for the device to know them.
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(
            tensor.contiguous(), sequences.offsets, min_seqlen=1, max_seqlen=sequences.max_length
        ).transpose(1, 2)
        for tensor in (query, key, value)
    )
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).values()


class DecoderLayer(nn.Module):
    """One layer of a pre-norm transformer: attention and feed-forward network."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)
        inner = config.ffn_multiplier * config.hidden
        self.feed_forward = nn.Sequential(
            nn.RMSNorm(config.hidden), nn.Linear(config.hidden, inner), nn.GELU(), nn.Linear(inner, config.hidden)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the tokens [tokens, hidden] with what they receive added."""
        projected = self.query_key_value(self.attention_norm(tokens))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended = attend(_rotate(query, rotation), _rotate(key, rotation), value)
        tokens = tokens + self.dropout(self.output(attended.flatten(1)))
        result: Tensor = tokens + self.dropout(self.feed_forward(tokens))
        return result


def _rotate(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair of components (i, i + head_dim / 2) of [tokens, heads, head_dim] by the angle of its token."""
    cos, sin = (part.to(vectors.dtype) for part in rotation)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class SemanticIdModel(nn.Module):
    """A causal decoder over [contextual tokens, codes of the history, BOS, codes of the candidate].

    Batches need `candidate_feature=True` in their LoaderConfig; `history_labels` may be set or not, and
    `label_offsets` must not be.
    """

    level_offsets: Tensor  # int64 [levels]: the first token of each level
    frequencies: Tensor  # [head_dim / 2], radians per position

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.code_embedding = nn.Embedding(sum(config.codebook_sizes), config.hidden)
        self.bos = nn.Parameter(torch.empty(1, config.hidden))
        self.contextual = nn.ModuleList(nn.Embedding(size, config.hidden) for size in config.contextual.values())
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.heads = nn.ModuleList(nn.Linear(config.hidden, size, bias=False) for size in config.codebook_sizes)
        offsets = list(accumulate(config.codebook_sizes[:-1], initial=0))
        frequencies = _ROTARY_BASE ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.register_buffer("level_offsets", torch.tensor(offsets), persistent=False)
        self.register_buffer("frequencies", frequencies, persistent=False)
        for table in (self.code_embedding.weight, self.bos, *self.contextual.parameters()):
            nn.init.normal_(table, std=0.02)

    def forward(self, batch: SemanticIdBatch) -> tuple[Tensor, list[Tensor]]:
        """Return the sum of each level's loss over the batch's labels, and the logits of the levels.

        Every level has equally many labels, so the sum of what `scale_loss` returns is the mean over all labels.

        Returns:
            Loss sums [levels]; per level, logits [labeled events, codebook size]. All at least float32.
        """
        levels = self.config.levels
        sequences, places = lay_out(batch, (*self.config.contextual, SEMANTIC_ID, BOS, CANDIDATE_ID))
        if batch.num_real and (num_codes := (batch.max_lengths or {})[CANDIDATE_ID]) != levels:
            raise ConfigError(
                f"the batch has {num_codes} codes per item, codebook_sizes {levels} levels; create the DecoderConfig "
                "with the codebook_sizes of the batches' CodeTable"
            )
        attend = partial(causal_attention, sequences=sequences)
        outputs = self.decode(self.embed(batch, places), sequences.positions, [attend] * self.config.layers)
        at_labels = outputs[predicting_tokens(batch, places[BOS], levels)].view(-1, levels, self.config.hidden)
        logits = [self.logits(at_labels[:, level], level) for level in range(levels)]
        labels = batch.labels.values().view(-1, levels)
        losses = [cross_entropy(logits[level], labels[:, level], reduction="sum") for level in range(levels)]
        return torch.stack(losses), logits

    def embed(self, batch: SemanticIdBatch, places: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of all tokens: [tokens, hidden]."""
        tables = dict(zip(self.config.contextual, self.contextual, strict=True))
        embeddings = {
            name: tables.get(name, self.code_embedding)(batch.features[name].values()) for name in places if name != BOS
        }
        return arrange({**embeddings, BOS: self.bos.expand(batch.batch_size, -1)}, places)

    def decode(self, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Return the output at each token: [tokens, hidden], as is `tokens`. Each layer has an attention of its own."""
        angles = positions[:, None] * self.frequencies
        rotation = (angles.cos()[:, None], angles.sin()[:, None])  # [tokens, 1, head_dim / 2]
        for layer, attend in zip(self.layers, attends, strict=True):
            tokens = layer(tokens, rotation, attend)
        output: Tensor = self.norm(tokens)
        return output

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """Return the logits of a level, [..., codebook size], at least float32, given outputs [..., hidden]."""
        logits: Tensor = self.heads[level](outputs)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
