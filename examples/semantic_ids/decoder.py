"""`Decoder`: a pre-norm transformer over jagged tokens, with rotary position embeddings."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from semantic_ids.attention import Attend
from semantic_ids.config import DecoderConfig

_ROTARY_BASE = 10_000.0  # of Su et al., RoFormer, 2021, section 3.3


class Decoder(nn.Module):
    """Layers of attention and feed-forward network. Which token sees which is up to the caller."""

    frequencies: Tensor  # [head_dim / 2], radians per position

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.register_buffer("frequencies", _ROTARY_BASE**-exponents, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Return the output at each token: [tokens, hidden].

        Args:
            tokens: [tokens, hidden].
            positions: int64 [tokens]: place of each token in its sample.
            attends: the attention of each layer.
        """
        angles = positions[:, None] * self.frequencies
        rotation = (angles.cos()[:, None], angles.sin()[:, None])  # [tokens, 1, head_dim / 2]
        for layer, attend in zip(self.layers, attends, strict=True):
            tokens = layer(tokens, rotation, attend)
        output: Tensor = self.norm(tokens)
        return output


class DecoderLayer(nn.Module):
    """One layer."""

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
