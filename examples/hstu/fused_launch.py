"""Launches the kernels of `fused_kernels` on tensors without gradients: what `fused` and `fused_layer` have in common.

Tensors of rows must be contiguous, except U, whose heads may be apart. Outputs are written in the dtypes they have.
"""

import torch
import triton
from torch import Tensor

from hstu import fused_kernels
from hstu.launch import Kernel

_NORM_FORWARD, _NORM_BACKWARD = Kernel(fused_kernels.norm_forward), Kernel(fused_kernels.norm_backward)
_SILU_FORWARD, _SILU_BACKWARD = Kernel(fused_kernels.silu_forward), Kernel(fused_kernels.silu_backward)
NORM_ROWS = 16  # of a program in the backward pass; with more there would be fewer partial sums, but fewer programs
SILU_VALUES = 2048  # of each of V, Q and K in a program


def product_dtype(stream: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of matrix products: that of autocast on a type of device, or else of the residual stream."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else stream


def norm_rows(
    values: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    output: Tensor,
    update: Tensor | None = None,
    total: Tensor | None = None,
    u: Tensor | None = None,
) -> Tensor:
    """Write LayerNorm of rows, also of several heads.

    Args:
        values: [tokens, width] or [tokens, heads, head_dim].
        weight: [width], or [heads * head_dim].
        bias: like `weight`.
        eps: added to the variance.
        output: like `values`; written.
        update: like `values`, which it is added to before.
        total: the sum of both, if there is an `update`; written.
        u: [tokens, heads, head_dim]; the output is multiplied by SiLU of it.

    Returns:
        What the backward pass needs of each row: float32 [tokens, 2], its mean and 1 / standard deviation.

    """
    statistics = torch.empty(len(values), 2, dtype=torch.float32, device=values.device)
    if len(values):
        _NORM_FORWARD.launch(
            (len(values), 1, 1), values, update, total, u, weight, bias, output, statistics,
            len(weight), *_strides(u), eps, **_constants(u, weight),
        )  # fmt: skip
    return statistics


def norm_rows_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    *,
    d_values: Tensor,
    u: Tensor | None = None,
    d_u: Tensor | None = None,
    d_total: Tensor | None = None,
    d_update: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of rows.

    Args:
        gradient: of the output.
        values: what was normalized: the total, if there was an update.
        weight: as in `norm_rows`.
        bias: as in `norm_rows`.
        statistics: from `norm_rows`.
        d_values: like `values`; written.
        u: as in `norm_rows`.
        d_u: like `values`, if there is a `u`; written.
        d_total: the gradient of `values` from elsewhere, which is added to that of the norm.
        d_update: the same as `d_values` in another dtype; written.

    Returns:
        The gradients of weight and bias.

    """
    programs = triton.cdiv(len(values), NORM_ROWS)
    sums = torch.empty(programs, 2, len(weight), dtype=torch.float32, device=values.device)
    if programs:
        d_total = None if d_total is None else d_total.contiguous()
        _NORM_BACKWARD.launch(
            (programs, 1, 1),
            values, u, weight, bias, statistics, gradient.contiguous(), d_total, d_values, d_update, d_u, sums,
            len(values), len(weight), *_strides(u), NORM_ROWS=NORM_ROWS, **_constants(u, weight),
        )  # fmt: skip
    d_weight, d_bias = sums.sum(0)
    return d_weight.to(weight.dtype), d_bias.to(bias.dtype)


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return what the first linear returns as [tokens, heads, (U, V, Q, K), head_dim]."""
    return projected.view(len(projected), projected.shape[1] // (4 * head_dim), 4, head_dim)


def silu_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return SiLU of V, Q and K: [tokens, heads, (V, Q, K), head_dim]."""
    parts = split_heads(projected, head_dim)
    activated = torch.empty_like(parts[:, :, 1:], memory_format=torch.contiguous_format)
    _launch_silu(_SILU_FORWARD, [parts, activated], parts.shape)
    return activated


def silu_heads_backward(projected: Tensor, d_u: Tensor, d_v: Tensor, d_q: Tensor, d_k: Tensor) -> Tensor:
    """Return the gradient of `projected`.

    Args:
        projected: what the first linear has returned.
        d_u: that of U, which has been through SiLU's derivative: [tokens, heads, head_dim].
        d_v: that of SiLU(V), like `d_u`.
        d_q: that of SiLU(Q), like `d_u`.
        d_k: that of SiLU(K), like `d_u`.

    """
    parts = split_heads(projected, d_u.shape[2])
    d_parts = torch.empty_like(parts)
    gradients = [gradient.contiguous() for gradient in (d_u, d_v, d_q, d_k)]
    _launch_silu(_SILU_BACKWARD, [parts, *gradients, d_parts], parts.shape)
    return d_parts.view_as(projected)


def _launch_silu(kernel: Kernel, tensors: list[Tensor], shape: torch.Size) -> None:
    tokens, heads, _, head_dim = shape
    block = triton.next_power_of_2(head_dim)
    rows = max(SILU_VALUES // block, 1)
    if tokens:
        grid = (triton.cdiv(tokens * heads, rows), 1, 1)
        kernel.launch(grid, *tensors, tokens * heads, HEAD_DIM=head_dim, BLOCK=block, ROWS=rows, num_warps=4)


def _strides(u: Tensor | None) -> tuple[int, int]:
    """Return those of tokens and heads."""
    return (0, 0) if u is None else (u.stride(0), u.stride(1))


def _constants(u: Tensor | None, weight: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(len(weight))
    head_dim = len(weight) if u is None else u.shape[-1]
    return {"HEAD_DIM": head_dim, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}
