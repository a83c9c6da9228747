"""The Triton kernels of what a layer of HSTU computes between its matrix products, forward and backward.

    norm    LayerNorm of rows, after an update is added to them, if there is one; times SiLU(gate), if there is a gate
    silu    SiLU of V, Q and K, which are beside U in what the first linear returns: [tokens, heads, (U, V, Q, K), dim]

These are bound by memory, so each reads and writes every value once. They compute in float32, whatever they read and
write. Programs of the backward pass also sum gradients over their tokens, for weights and biases, instead of a second
pass that would read them again; torch adds up these sums. Tensors of rows must be contiguous, except U and its
gradient, whose heads may be apart. Nothing is added atomically, so equal inputs give equal bits.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load_row(base, offsets, inside):
    return tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_row(base, offsets, inside, values):
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
    x = _load_row(values, row * width + columns, inside)
    if update is not None:
        x += _load_row(update, row * width + columns, inside)
        x = x.to(total.dtype.element_ty).to(tl.float32)  # what the backward pass normalizes
        _store_row(total, row * width + columns, inside, x)
    mean = tl.sum(x, 0) / width
    centered = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / width + eps)
    tl.store(statistics + 2 * row, mean)
    tl.store(statistics + 2 * row + 1, scale)
    y = centered * scale * _load_row(weight, columns, inside) + _load_row(bias, columns, inside)
    if gate is not None:
        u = _load_row(gate, row * gate_row + columns // HEAD_DIM * gate_head + columns % HEAD_DIM, inside)
        y *= u * _sigmoid(u)
    _store_row(output, row * width + columns, inside, y)


@triton.jit
def norm_backward(
    values, gate, weight, bias, statistics, gradient, d_total, also_summed, d_values, d_update, d_gate, sums, gate_sums,
    rows, width, gate_row, gate_head, d_gate_row, d_gate_head, sums_row, rows_each,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `rows_each` rows, and sums over these.

    `sums` has those for weight and bias, and that of `also_summed`, which is like `values`. `d_total`, like `values`,
    is added to the gradient of these; `d_update` is that gradient in another dtype. All three tensors may be None, as
    may `gate`, `d_gate` and its sums, which have their heads as far apart as `d_gate`.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = _load_row(weight, columns, inside)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    d_bias = tl.zeros([BLOCK], dtype=tl.float32)
    d_gate_sum = tl.zeros([BLOCK], dtype=tl.float32)
    also_sum = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0) * rows_each
    for number in tl.range(tl.minimum(rows - first, rows_each), num_stages=3):
        row = first.to(tl.int64) + number
        places = row * width + columns
        # All loads come first, so that they wait for memory together.
        mean = tl.load(statistics + 2 * row)
        scale = tl.load(statistics + 2 * row + 1)
        normed = (_load_row(values, places, inside) - mean) * scale  # beyond the width, gradients are zeros
        dy = _load_row(gradient, places, inside)
        if d_total is not None:
            d_sum = _load_row(d_total, places, inside)
        if also_summed is not None:
            also_sum += _load_row(also_summed, places, inside)
        if gate is not None:
            u = _load_row(gate, row * gate_row + columns // HEAD_DIM * gate_head + columns % HEAD_DIM, inside)
            sigmoid = _sigmoid(u)
            y = normed * w + _load_row(bias, columns, inside)
            du = dy * y * sigmoid * (1.0 + u * (1.0 - sigmoid))
            _store_row(d_gate, row * d_gate_row + columns // HEAD_DIM * d_gate_head + columns % HEAD_DIM, inside, du)
            d_gate_sum += du
            dy *= u * sigmoid
        d_weight += dy * normed
        d_bias += dy
        dy *= w
        dx = (dy - tl.sum(dy, 0) / width - normed * (tl.sum(dy * normed, 0) / width)) * scale
        if d_total is not None:
            dx += d_sum
        _store_row(d_values, places, inside, dx)
        if d_update is not None:
            _store_row(d_update, places, inside, dx)
    program = tl.program_id(0).to(tl.int64) * sums_row
    _store_row(sums + program, columns, inside, d_weight)
    _store_row(sums + program, width + columns, inside, d_bias)
    if also_summed is not None:
        _store_row(sums + program, 2 * width + columns, inside, also_sum)
    if gate is not None:
        _store_row(gate_sums + program, columns // HEAD_DIM * d_gate_head + columns % HEAD_DIM, inside, d_gate_sum)


@triton.jit
def silu_forward(projected, activated, rows, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Compute V, Q and K of ROWS heads of tokens: [rows, (U, V, Q, K), dim] -> [rows, (V, Q, K), dim]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (dims < HEAD_DIM)
    for part in tl.static_range(3):
        x = _load_row(projected, (4 * row + part + 1) * HEAD_DIM + dims, inside)
        _store_row(activated, (3 * row + part) * HEAD_DIM + dims, inside, x * _sigmoid(x))


@triton.jit
def _silu_gradient(
    projected, gradient, d_projected, row, dims, inside, PART: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    places = (4 * row + PART) * HEAD_DIM + dims
    x = _load_row(projected, places, inside)
    sigmoid = _sigmoid(x)
    dx = _load_row(gradient, row * HEAD_DIM + dims, inside) * (sigmoid * (1.0 + x * (1.0 - sigmoid)))
    _store_row(d_projected, places, inside, dx)
    return dx


@triton.jit
def silu_backward(
    projected, d_v, d_q, d_k, d_projected, sums, tokens, heads, sums_row, tokens_each,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of V, Q and K, [tokens, heads, dim] each, of one head of `tokens_each` tokens, ROWS at a
    time, and their sums over these: [tokens, heads, (U, V, Q, K), dim], of which those of U are left out.
    """
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK)[None, :]
    d_v_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    d_q_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    d_k_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first = tl.program_id(0) * tokens_each
    count = tl.minimum(tokens - first, tokens_each)
    for done in range(0, count, ROWS):
        number = done + tl.arange(0, ROWS)[:, None]
        row = (first.to(tl.int64) + number) * heads + head
        inside = (number < count) & (dims < HEAD_DIM)
        d_v_sum += _silu_gradient(projected, d_v, d_projected, row, dims, inside, 1, HEAD_DIM)
        d_q_sum += _silu_gradient(projected, d_q, d_projected, row, dims, inside, 2, HEAD_DIM)
        d_k_sum += _silu_gradient(projected, d_k, d_projected, row, dims, inside, 3, HEAD_DIM)
    dim = tl.arange(0, BLOCK)
    sums += tl.program_id(0).to(tl.int64) * sums_row + 4 * head * HEAD_DIM
    _store_row(sums, HEAD_DIM + dim, dim < HEAD_DIM, tl.sum(d_v_sum, 0))
    _store_row(sums, 2 * HEAD_DIM + dim, dim < HEAD_DIM, tl.sum(d_q_sum, 0))
    _store_row(sums, 3 * HEAD_DIM + dim, dim < HEAD_DIM, tl.sum(d_k_sum, 0))
