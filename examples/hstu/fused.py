"""What a layer computes between its matrix products, by fused Triton kernels; the functions are those of `unfused`.

Each value is read and written once, in the dtype that the products take: bfloat16 under autocast, where torch's
LayerNorm returns float32. The residual stream stays as it is. Statistics, sums and SiLU are computed in float32.
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn.functional import silu

from hstu.fused_kernels import norm_backward, norm_forward, silu_backward, silu_forward

NORM_ROWS = 16  # of a program in the backward pass; with more there would be fewer partial sums, but fewer programs
SILU_VALUES = 2048  # of each of V, Q and K in a program


def norm(tokens: Tensor, update: Tensor | None, module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return the residual stream and LayerNorm of it, the latter in the dtype of the linears; see `unfused.norm`."""
    if update is not None and type(update) is not Tensor:  # of several ranks, and kernels do not wait for these
        tokens, update = tokens + update, None
    device = tokens.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tokens.dtype
    stream, normed = _Norm.apply(tokens, update, module.weight, module.bias, module.eps, dtype)  # type: ignore[no-untyped-call]
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
        ctx: Any, tokens: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        values = tokens.contiguous()
        stream = tokens
        if update is not None:
            update = update.contiguous()
            stream = torch.empty_like(values, dtype=torch.promote_types(tokens.dtype, update.dtype))
        normed = torch.empty_like(values, dtype=dtype)
        statistics = norm_rows(values, update, stream, None, weight, bias, eps, normed)
        ctx.save_for_backward(values if update is None else stream, weight, bias, statistics)
        ctx.update_dtype = None if update is None else update.dtype
        return stream, normed

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor, d_normed: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias, statistics = ctx.saved_tensors
        d_values, d_update = torch.empty_like(values), None
        if ctx.update_dtype not in (None, values.dtype):
            d_update = torch.empty_like(values, dtype=ctx.update_dtype)
        d_weight, d_bias = norm_rows_backward(
            values, None, weight, bias, statistics, d_normed, d_stream, d_values, d_update, None
        )
        if ctx.update_dtype == values.dtype:
            d_update = d_values
        return d_values, d_update, d_weight, d_bias, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        values = attended.contiguous()
        u = u if u.stride(-1) == 1 else u.contiguous()
        gated = torch.empty_like(values)
        statistics = norm_rows(values, None, None, u, weight, bias, eps, gated)
        ctx.save_for_backward(values, u, weight, bias, statistics)
        return gated.flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, u, weight, bias, statistics = ctx.saved_tensors
        d_values, d_u = torch.empty_like(values), torch.empty_like(values, dtype=u.dtype)
        d_weight, d_bias = norm_rows_backward(values, u, weight, bias, statistics, gradient, None, d_values, None, d_u)
        return d_values, d_u, d_weight, d_bias, None


class _Activate(torch.autograd.Function):
    """Its backward takes the four gradients from where they are, so that nothing but SiLU's derivative joins them."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, head_dim: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(projected)
        parts = projected.view(len(projected), projected.shape[1] // (4 * head_dim), 4, head_dim)
        activated = torch.empty_like(parts[:, :, 1:], memory_format=torch.contiguous_format)
        silu_heads(silu_forward, [parts, activated])
        return parts.select(2, 0), *activated.unbind(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (projected,) = ctx.saved_tensors
        parts = projected.view(len(projected), gradients[0].shape[1], 4, gradients[0].shape[2])
        d_parts = torch.empty_like(parts)
        silu_heads(silu_backward, [parts, *[gradient.contiguous() for gradient in gradients], d_parts])
        return d_parts.view_as(projected), None


def norm_rows(
    values: Tensor,
    update: Tensor | None,
    total: Tensor | None,
    u: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    output: Tensor,
) -> Tensor:
    """Write the results, and return what the backward pass needs of each row besides: float32 [rows, 2]."""
    statistics = torch.empty(len(values), 2, dtype=torch.float32, device=values.device)
    if len(values):
        norm_forward[(len(values),)](
            values, update, total, u, weight, bias, output, statistics,
            len(weight), *_strides(u), eps, **_constants(u, weight),
        )  # fmt: skip
    return statistics


def norm_rows_backward(
    values: Tensor,
    u: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    gradient: Tensor,
    d_residual: Tensor | None,
    d_values: Tensor,
    d_update: Tensor | None,
    d_u: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of what has rows, and return those of weight and bias."""
    programs = triton.cdiv(len(values), NORM_ROWS)
    sums = torch.empty(programs, 2, len(weight), dtype=torch.float32, device=values.device)
    if programs:
        d_residual = None if d_residual is None else d_residual.contiguous()
        norm_backward[(programs,)](
            values, u, weight, bias, statistics, gradient.contiguous(), d_residual, d_values, d_update, d_u, sums,
            len(values), len(weight), *_strides(u), NORM_ROWS=NORM_ROWS, **_constants(u, weight),
        )  # fmt: skip
    d_weight, d_bias = sums.sum(0)
    return d_weight.to(weight.dtype), d_bias.to(bias.dtype)


def _strides(u: Tensor | None) -> tuple[int, int]:
    """Return those of tokens and heads."""
    return (0, 0) if u is None else (u.stride(0), u.stride(1))


def _constants(u: Tensor | None, weight: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(len(weight))
    head_dim = len(weight) if u is None else u.shape[-1]
    return {"HEAD_DIM": head_dim, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def silu_heads(kernel: Any, tensors: list[Tensor]) -> None:
    """Launch a kernel over the heads of all tokens, given first [tokens, heads, 4, head_dim]."""
    tokens, heads, _, head_dim = tensors[0].shape
    block = triton.next_power_of_2(head_dim)
    rows = max(SILU_VALUES // block, 1)
    if tokens:
        kernel[(triton.cdiv(tokens * heads, rows),)](
            *tensors, tokens * heads, HEAD_DIM=head_dim, BLOCK=block, ROWS=rows, num_warps=4
        )
