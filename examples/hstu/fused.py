"""Layers by fused Triton kernels: the functions of `unfused`, and `whole_layer`, a layer as one autograd.Function.

Each value is read and written once, in the dtype that the products take: bfloat16 under autocast, where torch's
LayerNorm returns float32. The residual stream stays as it is. Statistics, sums and SiLU are computed in float32.

A layer launches about 20 kernels, each of which takes a GPU 10 to 300 us. Built from modules, the host needs as long to
launch them: a node of the graph for each, casts of weights, hooks. Then the step takes as long as the host, and a rank
with less work is no faster. As one function, the host needs less than the GPU. Results keep their bits, except for the
gradients of the linears: kernels sum those of biases in passing, and those of weights are not rounded to bfloat16.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hstu.attention import Sequences
from hstu.divided import ParallelLayerNorm
from hstu.fused_operations import (
    norm_rows,
    norm_rows_backward,
    partial_sums,
    product_dtype,
    silu_heads,
    silu_heads_backward,
    split_heads,
)
from hstu.triton_attention import DTYPES, HEAD_DIMS, attend, attend_backward


def norm(tokens: Tensor, update: Tensor | None, module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return the residual stream and LayerNorm of it, the latter in the dtype of the linears; see `unfused.norm`."""
    stream, normed = _Norm.apply(tokens, update, module.weight, module.bias, module.eps)  # type: ignore[no-untyped-call]
    return stream, normed


def activate(projected: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return U as it is, since `gate` applies SiLU to it, and SiLU of V, Q and K; see `unfused.activate`."""
    u, v, q, k = _Activate.apply(projected, head_dim)  # type: ignore[no-untyped-call]
    return u, v, q, k


def gate(attended: Tensor, u: Tensor, module: nn.LayerNorm) -> Tensor:
    """Return LayerNorm(attended) * SiLU(U); see `unfused.gate`."""
    gated: Tensor = _Gate.apply(attended, u, module.weight, module.bias, module.eps, _group_of(module))  # type: ignore[no-untyped-call]
    return gated


def _group_of(module: nn.LayerNorm) -> dist.ProcessGroup | None:
    return module.group if isinstance(module, ParallelLayerNorm) else None


class _Norm(torch.autograd.Function):
    """Both results have one backward, which adds the gradient of the one to that of the other in the same pass.

    That of the stream may be None: behind the last layer, nothing but the norm uses it.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        values, stream, total = tokens.contiguous(), tokens, None
        if update is not None:
            update = update.contiguous()
            stream = total = torch.empty_like(values, dtype=torch.promote_types(tokens.dtype, update.dtype))
        normed = torch.empty_like(values, dtype=product_dtype(stream.dtype, tokens.device.type))
        statistics = norm_rows(values, weight, bias, eps, output=normed, update=update, total=total)
        ctx.save_for_backward(values if total is None else total, weight, bias, statistics)
        ctx.update_dtype = None if update is None else update.dtype
        ctx.set_materialize_grads(False)
        return stream, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        values, weight, bias, statistics = ctx.saved_tensors
        if d_normed is None:
            d_normed = torch.zeros_like(values)
        d_values, d_update = torch.empty_like(values), None
        if ctx.update_dtype not in (None, values.dtype):
            d_update = torch.empty_like(values, dtype=ctx.update_dtype)
        sums = partial_sums(values, 2 * len(weight))
        norm_rows_backward(
            d_normed, values, weight, bias, statistics,
            d_values=d_values, sums=sums, d_total=d_stream, d_update=d_update,
        )  # fmt: skip
        if ctx.update_dtype == values.dtype:
            d_update = d_values
        d_weight, d_bias = sums.sum(0).to(weight.dtype).split(len(weight))
        return d_values, d_update, d_weight, d_bias, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attended: Tensor,
        u: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        values = attended.contiguous()
        u = u if u.stride(-1) == 1 else u.contiguous()
        gated = torch.empty_like(values)
        statistics = norm_rows(values, weight, bias, eps, output=gated, u=u, group=group)
        ctx.save_for_backward(values, u, weight, bias, statistics)
        ctx.group = group
        return gated.flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, u, weight, bias, statistics = ctx.saved_tensors
        d_values, d_u = torch.empty_like(values), torch.empty_like(values, dtype=u.dtype)
        sums = partial_sums(values, 3 * len(weight))
        norm_rows_backward(
            gradient, values, weight, bias, statistics,
            d_values=d_values, sums=sums, u=u, d_u=d_u, u_sums=sums[:, 2 * len(weight) :], group=ctx.group,
        )  # fmt: skip
        d_weight, d_bias, _ = sums.sum(0).to(weight.dtype).split(len(weight))
        return d_values, d_u, d_weight, d_bias, None, None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, head_dim: int) -> tuple[Tensor, ...]:
        projected = projected.contiguous()
        ctx.save_for_backward(projected)
        return split_heads(projected, head_dim).select(2, 0), *silu_heads(projected, head_dim).unbind(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_u: Tensor, d_v: Tensor, d_q: Tensor, d_k: Tensor) -> tuple[Tensor, None]:
        (projected,) = ctx.saved_tensors
        d_projected, sums = torch.empty_like(projected), partial_sums(projected, projected.shape[1])
        split_heads(d_projected, d_u.shape[2]).select(2, 0).copy_(d_u)  # which has been through SiLU's derivative
        silu_heads_backward(projected, d_v, d_q, d_k, d_projected=d_projected, sums=sums)
        return d_projected, None


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
    group: dist.ProcessGroup | None
    """Ranks among which the heads are divided; see `divided`."""


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
        group=_group_of(layer.output_norm),
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
            attended, output_norm_weight, output_norm_bias, options.output_eps, output=gated, u=u, group=options.group
        )
        output, bias = output_weight.to(dtype), output_bias.to(dtype)
        if options.group is not None and options.group.rank() > 0:  # once in the sum
            bias = torch.zeros_like(bias)
        next_update = torch.addmm(bias, gated.flatten(1), output.t())
        if options.group is not None:
            dist.all_reduce(next_update, group=options.group)
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

        hidden, width, head_dim = len(input_weight), len(output_norm_weight), options.head_dim
        sums = partial_sums(stream, 6 * width + 3 * hidden)
        uvqk_sums = sums[:, 2 * width :]

        d_next_update = d_next_update.contiguous()
        d_output = _summed_products(d_next_update, gated.flatten(1), output_dtype)
        d_attended, d_projected = torch.empty_like(attended), torch.empty_like(projected)
        norm_rows_backward(
            d_next_update @ output, attended, output_norm_weight, output_norm_bias, output_statistics,
            d_values=d_attended, sums=sums, u=split_heads(projected, head_dim).select(2, 0),
            d_u=split_heads(d_projected, head_dim).select(2, 0), u_sums=uvqk_sums, group=options.group,
        )  # fmt: skip

        if activated is None:
            activated = silu_heads(projected, head_dim)
        v, q, k = activated.unbind(2)
        d_q, d_k, d_v = attend_backward(q, k, v, d_attended, options.sequences, options.scale_length)
        silu_heads_backward(projected, d_v, d_q, d_k, d_projected=d_projected, sums=uvqk_sums)

        d_normed, reducing = d_projected @ uvqk, None
        if options.group is not None:  # while gradients of the weights are computed
            reducing = dist.all_reduce(d_normed, group=options.group, async_op=True)
        if normed is None:
            normed = torch.empty_like(stream, dtype=options.dtype)
            norm_rows(stream, input_weight, input_bias, options.input_eps, output=normed)
        d_uvqk = _summed_products(d_projected, normed, uvqk_dtype)
        if reducing is not None:
            reducing.wait()
        d_tokens = torch.empty_like(stream)
        d_update = None if update_dtype == stream.dtype else torch.empty_like(stream, dtype=update_dtype)
        norm_rows_backward(
            d_normed, stream, input_weight, input_bias, statistics,
            d_values=d_tokens, sums=sums[:, 6 * width :],
            d_total=d_stream, d_update=d_update, also_summed=d_next_update,
        )  # fmt: skip
        norm_dtype, output_norm_dtype = input_weight.dtype, output_norm_weight.dtype
        dtypes = [output_norm_dtype, output_norm_dtype, uvqk_dtype, norm_dtype, norm_dtype, output_dtype]
        totals = sums.sum(0).split([width, width, 4 * width, hidden, hidden, hidden])
        d_output_norm_weight, d_output_norm_bias, d_uvqk_bias, d_input_weight, d_input_bias, d_output_bias = (
            total.to(dtype) for total, dtype in zip(totals, dtypes, strict=True)
        )
        return (
            d_tokens.to(tokens_dtype), d_tokens if d_update is None else d_update, d_input_weight, d_input_bias,
            d_uvqk, d_uvqk_bias, d_output_norm_weight, d_output_norm_bias, d_output, d_output_bias, None,
        )  # fmt: skip


def _summed_products(d_output: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a linear's weight in the weight's dtype: the sum over tokens of gradient times input."""
    if d_output.dtype == torch.bfloat16 and dtype == torch.float32:
        return torch.mm(d_output.t(), inputs, out_dtype=dtype)  # without rounding on the way
    return (d_output.t() @ inputs).to(dtype)
