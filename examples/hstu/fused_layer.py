"""A whole layer as one autograd.Function: the operations of `HSTULayer`, without what autograd does about each of them.

A layer launches about 30 kernels, each of which takes a GPU 10 to 300 us. Built from modules, the host needs as long to
launch them: a node of the graph for each, casts of weights, hooks. Then the step takes as long as the host, and a rank
with less work is no faster. Here the host needs about half as long, and results are the same, bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hstu import fused
from hstu.attention import Sequences
from hstu.by_sample_attention import BY_SAMPLE
from hstu.fused_kernels import silu_backward, silu_forward
from hstu.triton_attention import BY_BLOCK, DTYPES, HEAD_DIMS, Schedule, attend, attend_backward

# Of the attentions that are known to be these kernels, by name.
SCHEDULES = {"auto": BY_BLOCK, "triton": BY_BLOCK, "triton-by-sample": BY_SAMPLE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a layer is computed, besides its parameters."""

    sequences: Sequences
    schedule: Schedule
    """Of attention."""
    scale_length: int
    """What attention weights are divided by."""
    head_dim: int
    dtype: torch.dtype
    """Of the matrix products."""
    input_eps: float
    """Of the first norm."""
    output_eps: float
    """Of the norm behind attention."""
    recompute: bool
    """Keep what the linears and attention return, and compute everything else again in the backward pass."""


def options_for(layer: Any, tokens: Tensor, sequences: Sequences) -> Options | None:
    """Return how to compute an HSTULayer as a whole; None: its attention has no kernels for that."""
    device = tokens.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tokens.dtype
    schedule = SCHEDULES.get(layer.attention.name)
    if schedule is None or dtype not in DTYPES or layer.head_dim not in HEAD_DIMS:
        return None
    return Options(
        sequences=sequences,
        schedule=schedule,
        scale_length=layer.attention.scale_length,
        head_dim=layer.head_dim,
        dtype=dtype,
        input_eps=layer.input_norm.eps,
        output_eps=layer.output_norm.eps,
        recompute=layer.recompute,
    )


def whole_layer(tokens: Tensor, update: Tensor, parameters: list[Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """Apply a layer; see `HSTULayer.forward`.

    Args:
        tokens: [tokens, hidden].
        update: like `tokens`.
        parameters: weight and bias of the input norm, the first linear, the output norm and the last linear.
        options: everything else.

    """
    stream, next_update = _Layer.apply(tokens, update, *parameters, options)  # type: ignore[no-untyped-call]
    return stream, next_update


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        update: Tensor,
        input_weight: Tensor,
        input_bias: Tensor,
        uvqk_weight: Tensor,
        uvqk_bias: Tensor,
        output_norm_weight: Tensor,
        output_norm_bias: Tensor,
        output_weight: Tensor,
        output_bias: Tensor,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        dtype = options.dtype
        tokens, update = tokens.contiguous(), update.contiguous()
        stream = torch.empty_like(tokens, dtype=torch.promote_types(tokens.dtype, update.dtype))
        normed = torch.empty_like(tokens, dtype=dtype)
        statistics = fused.norm_rows(tokens, update, stream, None, input_weight, input_bias, options.input_eps, normed)
        uvqk = uvqk_weight.to(dtype)
        projected = torch.addmm(uvqk_bias.to(dtype), normed, uvqk.t())
        u, v, q, k, activated = _activate(projected, options.head_dim)
        attended = attend(q, k, v, options.sequences, options.scale_length, options.schedule)
        gated = torch.empty_like(attended)
        output_statistics = fused.norm_rows(
            attended, None, None, u, output_norm_weight, output_norm_bias, options.output_eps, gated
        )
        output = output_weight.to(dtype)
        next_update = torch.addmm(output_bias.to(dtype), gated.flatten(1), output.t())
        kept = (None, None) if options.recompute else (normed, activated)
        ctx.save_for_backward(
            stream, statistics, input_weight, input_bias, uvqk, projected, attended, output_statistics,
            output_norm_weight, output_norm_bias, output, gated, *kept,
        )  # fmt: skip
        ctx.options = options
        ctx.dtypes = tokens.dtype, update.dtype, uvqk_weight.dtype, output_weight.dtype
        return stream, next_update

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor, d_next_update: Tensor) -> tuple[Tensor | None, ...]:
        (
            stream, statistics, input_weight, input_bias, uvqk, projected, attended, output_statistics,
            output_norm_weight, output_norm_bias, output, gated, normed, activated,
        ) = ctx.saved_tensors  # fmt: skip
        options: Options = ctx.options
        tokens_dtype, update_dtype, uvqk_dtype, output_dtype = ctx.dtypes
        u, v, q, k, _ = _activate(projected, options.head_dim, activated)

        d_next_update = d_next_update.contiguous()
        d_output_bias = d_next_update.sum(0).to(output_dtype)
        d_output = (d_next_update.t() @ gated.flatten(1)).to(output_dtype)
        d_attended, d_u = torch.empty_like(attended), torch.empty_like(attended)
        d_output_norm = fused.norm_rows_backward(
            attended, u, output_norm_weight, output_norm_bias, output_statistics, d_next_update @ output, None,
            d_attended, None, d_u,
        )  # fmt: skip
        d_q, d_k, d_v = attend_backward(q, k, v, d_attended, options.sequences, options.scale_length, options.schedule)
        d_parts = torch.empty_like(_parts(projected, options.head_dim))
        fused.silu_heads(silu_backward, [_parts(projected, options.head_dim), d_u, d_v, d_q, d_k, d_parts])
        d_projected = d_parts.view_as(projected)
        if normed is None:
            normed = torch.empty_like(stream, dtype=options.dtype)
            fused.norm_rows(stream, None, None, None, input_weight, input_bias, options.input_eps, normed)
        d_uvqk_bias = d_projected.sum(0).to(uvqk_dtype)
        d_uvqk = (d_projected.t() @ normed).to(uvqk_dtype)
        d_tokens = torch.empty_like(stream)
        d_update = d_tokens if update_dtype == stream.dtype else torch.empty_like(stream, dtype=update_dtype)
        d_input = fused.norm_rows_backward(
            stream, None, input_weight, input_bias, statistics, d_projected @ uvqk, d_stream,
            d_tokens, None if d_update is d_tokens else d_update, None,
        )  # fmt: skip
        d_tokens = d_tokens.to(tokens_dtype)
        return d_tokens, d_update, *d_input, d_uvqk, d_uvqk_bias, *d_output_norm, d_output, d_output_bias, None


def _parts(projected: Tensor, head_dim: int) -> Tensor:
    return projected.view(len(projected), projected.shape[1] // (4 * head_dim), 4, head_dim)


def _activate(
    projected: Tensor, head_dim: int, activated: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return U without SiLU, as the gate takes it; V, Q and K with it; and the tensor of all three."""
    parts = _parts(projected, head_dim)
    if activated is None:
        activated = torch.empty_like(parts[:, :, 1:], memory_format=torch.contiguous_format)
        fused.silu_heads(silu_forward, [parts, activated])
    v, q, k = activated.unbind(2)
    return parts.select(2, 0), v, q, k, activated
