"""What a layer computes between its matrix products, by fused Triton kernels; the functions are those of `unfused`.

Each value is read and written once, in the dtype that the products take: bfloat16 under autocast, where torch's
LayerNorm returns float32. The residual stream stays as it is. Statistics, sums and SiLU are computed in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from hstu.fused_launch import (
    norm_rows,
    norm_rows_backward,
    product_dtype,
    silu_heads,
    silu_heads_backward,
    split_heads,
)


def norm(tokens: Tensor, update: Tensor | None, module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return the residual stream and LayerNorm of it, the latter in the dtype of the linears; see `unfused.norm`."""
    if update is not None and type(update) is not Tensor:  # a sum over ranks in progress; kernels do not wait for it
        tokens, update = tokens + update, None
    stream, normed = _Norm.apply(tokens, update, module.weight, module.bias, module.eps)  # type: ignore[no-untyped-call]
    return stream, normed


def activate(projected: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return U as it is, since `gate` applies SiLU to it, and SiLU of V, Q and K; see `unfused.activate`."""
    u, v, q, k = _Activate.apply(projected, head_dim)  # type: ignore[no-untyped-call]
    return u, v, q, k


def gate(attended: Tensor, u: Tensor, module: nn.Module) -> Tensor:
    """Return LayerNorm(attended) * SiLU(U); see `unfused.gate`."""
    if isinstance(module, nn.LayerNorm):
        gated: Tensor = _Gate.apply(attended, u, module.weight, module.bias, module.eps)  # type: ignore[no-untyped-call]
    else:  # columns are divided among ranks
        gated = module(attended.flatten(-2)) * silu(u).flatten(-2)
    return gated


class _Norm(torch.autograd.Function):
    """Both results have one backward, which adds the gradient of the one to that of the other in the same pass."""

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
        return stream, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: Tensor, d_normed: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias, statistics = ctx.saved_tensors
        d_values, d_update = torch.empty_like(values), None
        if ctx.update_dtype not in (None, values.dtype):
            d_update = torch.empty_like(values, dtype=ctx.update_dtype)
        d_parameters = norm_rows_backward(
            d_normed, values, weight, bias, statistics, d_values=d_values, d_total=d_stream, d_update=d_update
        )
        if ctx.update_dtype == values.dtype:
            d_update = d_values
        return d_values, d_update, *d_parameters, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        values = attended.contiguous()
        u = u if u.stride(-1) == 1 else u.contiguous()
        gated = torch.empty_like(values)
        statistics = norm_rows(values, weight, bias, eps, output=gated, u=u)
        ctx.save_for_backward(values, u, weight, bias, statistics)
        return gated.flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, u, weight, bias, statistics = ctx.saved_tensors
        d_values, d_u = torch.empty_like(values), torch.empty_like(values, dtype=u.dtype)
        d_parameters = norm_rows_backward(gradient, values, weight, bias, statistics, d_values=d_values, u=u, d_u=d_u)
        return d_values, d_u, *d_parameters, None


class _Activate(torch.autograd.Function):
    """Its backward takes the four gradients from where they are, so that nothing but SiLU's derivative joins them."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, head_dim: int) -> tuple[Tensor, ...]:
        projected = projected.contiguous()
        ctx.save_for_backward(projected)
        return split_heads(projected, head_dim).select(2, 0), *silu_heads(projected, head_dim).unbind(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (projected,) = ctx.saved_tensors
        return silu_heads_backward(projected, *gradients), None
