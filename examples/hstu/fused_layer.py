"""A whole layer as one autograd.Function: the operations of `HSTULayer`, without what autograd does about each of them.

A layer launches about 30 kernels, each of which takes a GPU 10 to 300 us. Built from modules, the host needs as long to
launch them: a node of the graph for each, casts of weights, hooks. Then the step takes as long as the host, and a rank
with less work is no faster. As one function, the host needs less than the GPU. Results have the same bits as those of
`fused` with the same attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hstu.attention import Sequences
from hstu.fused_launch import (
    norm_rows,
    norm_rows_backward,
    product_dtype,
    silu_heads,
    silu_heads_backward,
    split_heads,
)
from hstu.triton_attention import DTYPES, HEAD_DIMS, attend, attend_backward

KERNEL_ATTENTIONS = ("auto", "triton")
"""Names of the attentions in `ATTENTIONS` that are these kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a layer is computed, besides its parameters."""

    sequences: Sequences
    """Where the samples are."""
    scale_length: int
    """What attention weights are divided by."""
    head_dim: int
    """Width of a head."""
    dtype: torch.dtype
    """Of the matrix products."""
    input_eps: float
    """Of the first norm."""
    output_eps: float
    """Of the norm behind attention."""
    recompute: bool
    """Whether the backward pass computes the first norm and SiLU again, instead of keeping what they return."""


def options_for(layer: Any, tokens: Tensor, update: Tensor, sequences: Sequences) -> Options | None:
    """Return how to compute an HSTULayer as a whole; None: its attention has no kernels for that."""
    dtype = product_dtype(torch.promote_types(tokens.dtype, update.dtype), tokens.device.type)
    if layer.attention.name not in KERNEL_ATTENTIONS or dtype not in DTYPES or layer.head_dim not in HEAD_DIMS:
        return None
    return Options(
        sequences=sequences,
        scale_length=layer.attention.scale_length,
        head_dim=layer.head_dim,
        dtype=dtype,
        input_eps=layer.input_norm.eps,
        output_eps=layer.output_norm.eps,
        recompute=layer.recompute,
    )


def whole_layer(layer: Any, tokens: Tensor, update: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Apply an HSTULayer; see `HSTULayer.forward`.

    Args:
        layer: whose parameters are used.
        tokens: [tokens, hidden], in bfloat16 or float32.
        update: like `tokens`, maybe in the other dtype.
        options: from `options_for`.

    """
    modules = (layer.input_norm, layer.uvqk, layer.output_norm, layer.output)
    parameters = [parameter for module in modules for parameter in (module.weight, module.bias)]
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
        statistics = norm_rows(
            tokens, input_weight, input_bias, options.input_eps, output=normed, update=update, total=stream
        )
        uvqk = uvqk_weight.to(dtype)
        projected = torch.addmm(uvqk_bias.to(dtype), normed, uvqk.t())
        u = split_heads(projected, options.head_dim).select(2, 0)  # `norm_rows` applies SiLU
        activated = silu_heads(projected, options.head_dim)
        v, q, k = activated.unbind(2)
        attended = attend(q, k, v, options.sequences, options.scale_length)
        gated = torch.empty_like(attended)
        output_statistics = norm_rows(
            attended, output_norm_weight, output_norm_bias, options.output_eps, output=gated, u=u
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
    @once_differentiable
    def backward(ctx: Any, d_stream: Tensor, d_next_update: Tensor) -> tuple[Tensor | None, ...]:
        (
            stream, statistics, input_weight, input_bias, uvqk, projected, attended, output_statistics,
            output_norm_weight, output_norm_bias, output, gated, normed, activated,
        ) = ctx.saved_tensors  # fmt: skip
        options: Options = ctx.options
        tokens_dtype, update_dtype, uvqk_dtype, output_dtype = ctx.dtypes

        d_next_update = d_next_update.contiguous()
        d_output_bias = d_next_update.sum(0).to(output_dtype)
        d_output = (d_next_update.t() @ gated.flatten(1)).to(output_dtype)
        d_attended, d_u = torch.empty_like(attended), torch.empty_like(attended)
        d_output_norm = norm_rows_backward(
            d_next_update @ output, attended, output_norm_weight, output_norm_bias, output_statistics,
            d_values=d_attended, u=split_heads(projected, options.head_dim).select(2, 0), d_u=d_u,
        )  # fmt: skip

        if activated is None:
            activated = silu_heads(projected, options.head_dim)
        v, q, k = activated.unbind(2)
        d_q, d_k, d_v = attend_backward(q, k, v, d_attended, options.sequences, options.scale_length)
        d_projected = silu_heads_backward(projected, d_u, d_v, d_q, d_k)

        if normed is None:
            normed = torch.empty_like(stream, dtype=options.dtype)
            norm_rows(stream, input_weight, input_bias, options.input_eps, output=normed)
        d_uvqk_bias = d_projected.sum(0).to(uvqk_dtype)
        d_uvqk = (d_projected.t() @ normed).to(uvqk_dtype)
        d_tokens = torch.empty_like(stream)
        d_update = None if update_dtype == stream.dtype else torch.empty_like(stream, dtype=update_dtype)
        d_input_norm = norm_rows_backward(
            d_projected @ uvqk, stream, input_weight, input_bias, statistics,
            d_values=d_tokens, d_total=d_stream, d_update=d_update,
        )  # fmt: skip
        return (
            d_tokens.to(tokens_dtype), d_tokens if d_update is None else d_update,
            *d_input_norm, d_uvqk, d_uvqk_bias, *d_output_norm, d_output, d_output_bias, None,
        )  # fmt: skip
