"""Triton kernels of what a layer computes between its matrix products, forward and backward, and their launches.

    norm    LayerNorm of rows, after an update is added to them, if there is one; times SiLU(gate), if there is a gate
    silu    SiLU of V, Q and K, which are beside U in what the first linear returns: [tokens, heads, (U, V, Q, K), dim]

All are bound by memory, so each reads and writes every value once. They compute in float32, whatever they read and
write. Gradients of weight and bias are summed over NORM_ROWS rows by each program, then by torch over programs:
nothing is added atomically, so equal inputs give equal bits.

Tensors of rows must be contiguous, except U, whose heads may be apart. Outputs are written in the dtypes they have.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from hstu.launch import Kernel


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load(base, offsets, inside):
    return tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(base, offsets, inside, values):
    tl.store(base + offsets, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def norm_forward(
    values, update, total, gate, weight, bias, output, statistics, width, gate_row, gate_head, eps,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a row, and its mean and 1 / standard deviation.

    `update`, like `values`, is added to these, which gives `total`; `gate` is [rows, heads, dim]. Both may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = _load(values, row * width + columns, inside)
    if update is not None:
        x += _load(update, row * width + columns, inside)
        x = x.to(total.dtype.element_ty).to(tl.float32)  # what the backward pass normalizes
        _store(total, row * width + columns, inside, x)
    mean = tl.sum(x, 0) / width
    centered = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / width + eps)
    tl.store(statistics + 2 * row, mean)
    tl.store(statistics + 2 * row + 1, scale)
    y = centered * scale * _load(weight, columns, inside) + _load(bias, columns, inside)
    if gate is not None:
        u = _load(gate, row * gate_row + columns // HEAD_DIM * gate_head + columns % HEAD_DIM, inside)
        y *= u * _sigmoid(u)
    _store(output, row * width + columns, inside, y)


@triton.jit
def norm_backward(
    values, gate, weight, bias, statistics, gradient, d_total, d_values, d_update, d_gate, partial_sums,
    rows, width, gate_row, gate_head,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, NORM_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of NORM_ROWS rows, and their sums for weight and bias: [programs, 2, width].

    `d_total`, like `values`, is added to the gradient of these. `d_update` is that gradient in another dtype. Both
    may be None, as `gate` and `d_gate` may be.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = _load(weight, columns, inside)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    d_bias = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0) * NORM_ROWS
    for number in range(tl.minimum(rows - first, NORM_ROWS)):
        row = first.to(tl.int64) + number
        places = row * width + columns
        mean = tl.load(statistics + 2 * row)
        scale = tl.load(statistics + 2 * row + 1)
        normed = (_load(values, places, inside) - mean) * scale  # beyond the width, gradients are zeros
        dy = _load(gradient, places, inside)
        if gate is not None:
            u = _load(gate, row * gate_row + columns // HEAD_DIM * gate_head + columns % HEAD_DIM, inside)
            sigmoid = _sigmoid(u)
            y = normed * w + _load(bias, columns, inside)
            _store(d_gate, places, inside, dy * y * sigmoid * (1.0 + u * (1.0 - sigmoid)))
            dy *= u * sigmoid
        d_weight += dy * normed
        d_bias += dy
        dy *= w
        dx = (dy - tl.sum(dy, 0) / width - normed * (tl.sum(dy * normed, 0) / width)) * scale
        if d_total is not None:
            dx += _load(d_total, places, inside)
        _store(d_values, places, inside, dx)
        if d_update is not None:
            _store(d_update, places, inside, dx)
    sums = partial_sums + tl.program_id(0) * 2 * width
    _store(sums, columns, inside, d_weight)
    _store(sums, width + columns, inside, d_bias)


@triton.jit
def silu_forward(projected, activated, rows, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Compute V, Q and K of ROWS heads of tokens: [rows, (U, V, Q, K), dim] -> [rows, (V, Q, K), dim]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (dims < HEAD_DIM)
    for part in tl.static_range(3):
        x = _load(projected, (4 * row + part + 1) * HEAD_DIM + dims, inside)
        _store(activated, (3 * row + part) * HEAD_DIM + dims, inside, x * _sigmoid(x))


@triton.jit
def _add_part(
    projected, gradient, d_projected, row, dims, inside, PART: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    places = (4 * row + PART) * HEAD_DIM + dims
    dx = _load(gradient, row * HEAD_DIM + dims, inside)
    if PART:  # U's is that of the gate, which has been through SiLU's derivative
        x = _load(projected, places, inside)
        sigmoid = _sigmoid(x)
        dx *= sigmoid * (1.0 + x * (1.0 - sigmoid))
    _store(d_projected, places, inside, dx)


@triton.jit
def silu_backward(
    projected, d_u, d_v, d_q, d_k, d_projected, rows,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Join the gradients of U, V, Q and K, [rows, dim] each, of ROWS heads of tokens: [rows, (U, V, Q, K), dim]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (dims < HEAD_DIM)
    _add_part(projected, d_u, d_projected, row, dims, inside, 0, HEAD_DIM)
    _add_part(projected, d_v, d_projected, row, dims, inside, 1, HEAD_DIM)
    _add_part(projected, d_q, d_projected, row, dims, inside, 2, HEAD_DIM)
    _add_part(projected, d_k, d_projected, row, dims, inside, 3, HEAD_DIM)


_NORM_FORWARD, _NORM_BACKWARD = Kernel(norm_forward), Kernel(norm_backward)
_SILU_FORWARD, _SILU_BACKWARD = Kernel(silu_forward), Kernel(silu_backward)
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
