"""`HSTULayer`: one layer of the encoder (Zhai et al., 2024, equations 1 to 3).

U, V, Q, K = SiLU(linear(LayerNorm(X)))
X + linear(dropout(LayerNorm(attention(Q, K, V)) * U))
"""

from contextlib import nullcontext
from functools import partial

from torch import Tensor, nn

from hstu import unfused
from hstu.attention import Sequences
from hstu.attentions import ATTENTIONS
from hstu.config import HSTUConfig
from hstu.pointwise import Pointwise, pointwise_for
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


_PARTS = [nn.LayerNorm, nn.Linear, HSTUAttention, nn.LayerNorm, nn.Dropout, nn.Linear]


class HSTULayer(nn.Module):
    """One layer. The outputs of its first linear are ordered by head, so that a shard of them has whole heads."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.head_dim
        self.fused_norms = config.fused_norms
        self.recompute = config.recompute
        width = config.heads * config.head_dim
        self.input_norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.uvqk = nn.Linear(config.hidden, 4 * width)  # [heads, (U, V, Q, K), head_dim]
        self.attention = HSTUAttention(config.attention, config.max_length)
        self.output_norm: nn.Module = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(width, config.hidden)

    def forward(self, tokens: Tensor, update: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Apply the layer to the residual stream, which is `tokens` + `update`.

        The sum is computed together with the norm that follows it, so the layer does not return it but its parts.

        Args:
            tokens: [tokens, hidden].
            update: like `tokens`.
            sequences: where the samples are.

        Returns:
            The next `tokens` and `update`.

        """
        pointwise = pointwise_for(tokens, fused=self.fused_norms)
        if pointwise is not unfused and self.is_plain(update):
            from hstu.fused_layer import options_for, whole_layer  # Triton comes with PyTorch for CUDA alone

            if (options := options_for(self, tokens, update, sequences)) is not None:
                return whole_layer(self, tokens, update, options)
        return self.by_parts(pointwise, tokens, update, sequences)

    def is_plain(self, update: Tensor) -> bool:
        """Return whether the layer is what `fused_layer` computes: no dropout, no part replaced, no hooks on any."""
        parts = list(self.children())
        return (
            not (self.training and self.dropout.p)
            and [type(part) for part in parts] == _PARTS
            and not any(_has_hooks(part) for part in parts)  # with them, someone watches it, or divides it among ranks
            and type(update) is Tensor  # not a sum over ranks in progress
        )

    def by_parts(
        self, pointwise: Pointwise, tokens: Tensor, update: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Apply the layer module by module; see `forward`."""
        project = partial(self._project, pointwise)
        if self.recompute:  # keeps the argument: the sum, not its parts
            tokens, projected = keep_linear_alone(project, tokens + update)
        else:
            tokens, projected = project(tokens, update)
        activate = partial(pointwise.activate, projected, self.head_dim)
        u, v, q, k = activate()
        with recompute_saved(k, lambda: activate()[-1]) if self.recompute else nullcontext():
            attended = self.attention(q, k, v, sequences)
            gated = pointwise.gate(attended, u, self.output_norm)
        return tokens, self.output(self.dropout(gated))

    def _project(self, pointwise: Pointwise, tokens: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and what the first linear returns."""
        stream, normed = pointwise.norm(tokens, update, self.input_norm)
        return stream, self.uvqk(normed)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
