"""The Triton kernels of what a layer computes between its matrix products, forward and backward.

    norm    LayerNorm of rows, after an update is added to them, if there is one; times SiLU(gate), if there is a gate
    silu    SiLU of V, Q and K, which are beside U in what the first linear returns: [tokens, heads, (U, V, Q, K), dim]

All are bound by memory, so each reads and writes every value once. They compute in float32, whatever they read and
write. Gradients of weight and bias are summed over NORM_ROWS rows by each program, then by torch over programs:
nothing is added atomically, so equal inputs give equal bits.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


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
