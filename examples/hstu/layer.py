"""`HSTULayer`: one layer of the encoder (Zhai et al., 2024, equations 1 to 3).

U, V, Q, K = SiLU(linear(LayerNorm(X)))
X + linear(dropout(LayerNorm(attention(Q, K, V)) * U))
"""

from contextlib import nullcontext

from torch import Tensor, nn
from torch.nn.functional import silu

from hstu.attention import Sequences
from hstu.attentions import ATTENTIONS
from hstu.config import HSTUConfig
from hstu.recompute import keep_linear_alone, recompute_saved

NORM_EPS = 1e-6  # attention divides by max_length, so short samples give LayerNorm small values


class HSTUAttention(nn.Module):
    """The attention of a layer; a module, so that hooks can find it.

    Args:
        name: of the implementation in `ATTENTIONS`.
        scale_length: what attention weights are divided by.

    """

    def __init__(self, name: str, scale_length: int) -> None:
        super().__init__()
        self.name = name
        self.scale_length = scale_length

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return what each token receives: [tokens, heads, head_dim], as all three arguments are."""
        return ATTENTIONS[self.name](query, key, value, sequences, scale_length=self.scale_length)


class HSTULayer(nn.Module):
    """One layer. The outputs of its first linear are ordered by head, so that a shard of them has whole heads."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.head_dim
        self.recompute = config.recompute
        width = config.heads * config.head_dim
        self.input_norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.uvqk = nn.Linear(config.hidden, 4 * width)  # [heads, (U, V, Q, K), head_dim]
        self.attention = HSTUAttention(config.attention, config.max_length)
        self.output_norm: nn.Module = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(width, config.hidden)

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """Return the next residual stream, given this one: both [tokens, hidden]."""
        projected = keep_linear_alone(self._project, tokens) if self.recompute else self._project(tokens)
        activated = silu(projected)
        with recompute_saved(activated, lambda: silu(projected)) if self.recompute else nullcontext():
            heads = projected.shape[-1] // (4 * self.head_dim)  # of this shard
            u, v, q, k = activated.unflatten(-1, (heads, 4, self.head_dim)).unbind(-2)
            attended = self.attention(q, k, v, sequences)
            gated = self.output_norm(attended.flatten(-2)).view_as(u) * u
        update: Tensor = self.output(self.dropout(gated.flatten(-2)))
        return tokens + update

    def _project(self, tokens: Tensor) -> Tensor:
        projected: Tensor = self.uvqk(self.input_norm(tokens))
        return projected
