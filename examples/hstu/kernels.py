"""The Triton kernels of HSTU: attention, and what a layer computes between its matrix products, forward and backward.

A program of attention computes one block of ROWS tokens of one head of a sample, and reads other tokens by blocks of
COLUMNS:

    attention_forward          a block of queries, over the keys that it sees
    attention_backward_query   a block of queries, over the keys that it sees: the gradient of the queries
    attention_backward_key     a block of keys, over the queries that see it: the gradients of the keys and the values

Only blocks that are seen in part are masked; `Sequences` says which tokens see which. Products of float32 are those of
three TF32 products (`tf32x3`), about as exact as float32; of bfloat16, that setting changes nothing. With TMA, blocks
are loaded by the tensor memory accelerator (Hopper and later; elsewhere Triton loads them as without), which leaves
more registers and issue slots to the products.

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
def _silu(products, scale, EXACT: tl.constexpr):
    """Return SiLU and twice its derivative at the scores, which are `scale` times the products of queries and keys."""
    if EXACT:
        scores = products * scale
        sigmoid = 1.0 / (1.0 + tl.exp(-scores))
        return scores * sigmoid, 2.0 * sigmoid * (1.0 + scores * (1.0 - sigmoid))
    # sigmoid(x) = (1 + tanh(x / 2)) / 2: one instruction for an exponential and a division, a third of the time. SiLU
    # is off by at most 1e-5 for x from -20 to 20 on an H200, less than rounding x to bfloat16 makes it.
    half = products * (0.5 * scale)
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, is_pure=True, pack=1)
    silu = half * tanh + half
    return silu, silu * (1.0 - tanh) + (1.0 + tanh)


@triton.jit
def _products(left, right):
    """Return the products of the rows of two blocks: float32 [left rows, right rows]."""
    return tl.dot(left, tl.trans(right), input_precision="tf32x3")


@triton.jit
def _products_in_halves(left, right, HEAD_DIM: tl.constexpr):
    """Return the same, with half as many terms in each sum, because tensor cores truncate when they add."""
    left_low, left_high = _halves(left, HEAD_DIM)
    right_low, right_high = _halves(right, HEAD_DIM)
    return _products(left_low, right_low) + _products(left_high, right_high)


@triton.jit
def _halves(block, HEAD_DIM: tl.constexpr):
    halves = tl.reshape(block, (block.shape[0], 2, HEAD_DIM // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def _load(base, tokens, stride, length, HEAD_DIM: tl.constexpr):
    """Load the values of these tokens of one head, with zeros beyond the sample's end."""
    dims = tl.arange(0, HEAD_DIM)
    return tl.load(base + tokens[:, None] * stride + dims[None, :], mask=tokens[:, None] < length, other=0.0)


@triton.jit
def _blocks(base, stride, length, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, TMA: tl.constexpr):
    """Return what `_load_block` reads the blocks of one head of a sample from, whose first token is at `base`."""
    if TMA:
        return tl.make_tensor_descriptor(base, [length, HEAD_DIM], [stride, 1], [COLUMNS, HEAD_DIM])
    else:
        return base


@triton.jit
def _load_block(
    blocks, tokens, block, stride, length, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, TMA: tl.constexpr
):
    """Load a block, whose tokens these are, with zeros beyond the sample's end."""
    if TMA:
        return blocks.load([block * COLUMNS, 0])
    else:
        return _load(blocks, tokens, stride, length, HEAD_DIM)


@triton.jit
def _store(base, tokens, stride, length, values, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, HEAD_DIM)
    target = base + tokens[:, None] * stride + dims[None, :]
    tl.store(target, values.to(base.dtype.element_ty), mask=tokens[:, None] < length)


@triton.jit
def _sees(queries, keys, history, contextual):
    """Return which queries see which keys; the shapes broadcast. Beyond a sample's end are zeros, which add nothing."""
    end = tl.where(queries < contextual, history, tl.minimum(queries + 1, history))
    return (keys < end) | (keys == queries)


@triton.jit
def _sample_of_program(offsets, num_contextual, num_candidates, order):
    """Return first token, tokens, contextual tokens and tokens before the candidates of the program's sample."""
    sample = tl.load(order + tl.program_id(2))
    start = tl.load(offsets + sample)
    length = (tl.load(offsets + sample + 1) - start).to(tl.int32)
    contextual = tl.load(num_contextual + sample).to(tl.int32)
    return start, length, contextual, length - tl.load(num_candidates + sample).to(tl.int32)


@triton.jit
def _seen_keys(first, length, contextual, history, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return which blocks of keys the queries first .. first + ROWS - 1 see.

    Returns:
        whole: how many blocks, from the first, all queries see as a whole.
        seen: how many more of the history they see in part.
        own: the first of the blocks with the keys of these queries themselves, if these have candidates.
        total: how many blocks with all of these.
    """
    whole = tl.minimum(first, history) // COLUMNS
    end = tl.where(first < contextual, history, tl.minimum(history, first + ROWS))
    seen = tl.cdiv(end, COLUMNS) - whole
    own = tl.maximum(tl.maximum(first, history) // COLUMNS, whole + seen)
    own_blocks = tl.cdiv(tl.minimum(first + ROWS, length), COLUMNS) - own
    return whole, seen, own, seen + tl.maximum(own_blocks, 0)


@triton.jit
def _attend(
    total, query, keys, values, block, queries, key_stride, value_stride, length, history, contextual, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    tokens = block * COLUMNS + tl.arange(0, COLUMNS)
    key = _load_block(keys, tokens, block, key_stride, length, COLUMNS, HEAD_DIM, TMA)
    if EXACT and HEAD_DIM == 256:
        weights, _ = _silu(_products_in_halves(query, key, HEAD_DIM), scale, EXACT)
    else:
        weights, _ = _silu(_products(query, key), scale, EXACT)
    if MASKED:
        weights = tl.where(_sees(queries[:, None], tokens[None, :], history, contextual), weights, 0.0)
    value = _load_block(values, tokens, block, value_stride, length, COLUMNS, HEAD_DIM, TMA)
    return tl.dot(weights.to(value.dtype), value, total, input_precision="tf32x3")


@triton.jit
def attention_forward(
    query, key, value, output, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, output_stride, output_head,
    scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute a block of the output; see the top of the file."""
    start, length, contextual, history = _sample_of_program(offsets, num_contextual, num_candidates, order)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # late queries see most
    if first >= length:
        return
    head = tl.program_id(1)
    query += start * query_stride + head * query_head
    key += start * key_stride + head * key_head
    value += start * value_stride + head * value_head
    keys = _blocks(key, key_stride, length, COLUMNS, HEAD_DIM, TMA)
    values = _blocks(value, value_stride, length, COLUMNS, HEAD_DIM, TMA)
    queries = first + tl.arange(0, ROWS)
    mine = _load(query, queries, query_stride, length, HEAD_DIM)
    total = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    whole, seen, own, rest = _seen_keys(first, length, contextual, history, ROWS, COLUMNS)
    for block in range(whole):
        total = _attend(
            total, mine, keys, values, block, queries, key_stride, value_stride, length, history, contextual, scale,
            HEAD_DIM, COLUMNS, EXACT, TMA, False,
        )  # fmt: skip
    for number in range(rest):
        block = tl.where(number < seen, whole + number, own + number - seen)
        total = _attend(
            total, mine, keys, values, block, queries, key_stride, value_stride, length, history, contextual, scale,
            HEAD_DIM, COLUMNS, EXACT, TMA, True,
        )  # fmt: skip
    _store(output + start * output_stride + head * output_head, queries, output_stride, length,
           total * weight_scale, HEAD_DIM)  # fmt: skip


@triton.jit
def _add_query_gradient(
    total, query, gradient, keys, values, block, queries, key_stride, value_stride, length, history, contextual, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    tokens = block * COLUMNS + tl.arange(0, COLUMNS)
    key = _load_block(keys, tokens, block, key_stride, length, COLUMNS, HEAD_DIM, TMA)
    value = _load_block(values, tokens, block, value_stride, length, COLUMNS, HEAD_DIM, TMA)
    _, slope = _silu(_products(query, key), scale, EXACT)
    d_scores = _products(gradient, value) * slope
    if MASKED:
        d_scores = tl.where(_sees(queries[:, None], tokens[None, :], history, contextual), d_scores, 0.0)
    return tl.dot(d_scores.to(key.dtype), key, total, input_precision="tf32x3")


@triton.jit
def attention_backward_query(
    query, key, value, gradient, d_query, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute a block of the gradient of the queries."""
    start, length, contextual, history = _sample_of_program(offsets, num_contextual, num_candidates, order)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first >= length:
        return
    head = tl.program_id(1)
    key += start * key_stride + head * key_head
    value += start * value_stride + head * value_head
    keys = _blocks(key, key_stride, length, COLUMNS, HEAD_DIM, TMA)
    values = _blocks(value, value_stride, length, COLUMNS, HEAD_DIM, TMA)
    queries = first + tl.arange(0, ROWS)
    mine = _load(query + start * query_stride + head * query_head, queries, query_stride, length, HEAD_DIM)
    my_gradient = _load(
        gradient + start * gradient_stride + head * gradient_head, queries, gradient_stride, length, HEAD_DIM
    )
    total = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    whole, seen, own, rest = _seen_keys(first, length, contextual, history, ROWS, COLUMNS)
    for block in range(whole):
        total = _add_query_gradient(
            total, mine, my_gradient, keys, values, block, queries, key_stride, value_stride, length, history,
            contextual, scale, HEAD_DIM, COLUMNS, EXACT, TMA, False,
        )  # fmt: skip
    for number in range(rest):
        block = tl.where(number < seen, whole + number, own + number - seen)
        total = _add_query_gradient(
            total, mine, my_gradient, keys, values, block, queries, key_stride, value_stride, length, history,
            contextual, scale, HEAD_DIM, COLUMNS, EXACT, TMA, True,
        )  # fmt: skip
    _store(d_query + start * output_stride + head * output_head, queries, output_stride, length,
           total * (0.5 * scale * weight_scale), HEAD_DIM)  # fmt: skip


@triton.jit
def _add_key_gradients(
    d_key, d_value, key, value, queries, gradients, block, keys, query_stride, gradient_stride, length, history,
    contextual, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_VALUE: tl.constexpr,
):  # fmt: skip
    tokens = block * COLUMNS + tl.arange(0, COLUMNS)
    query = _load_block(queries, tokens, block, query_stride, length, COLUMNS, HEAD_DIM, TMA)
    gradient = _load_block(gradients, tokens, block, gradient_stride, length, COLUMNS, HEAD_DIM, TMA)
    weights, slope = _silu(_products(key, query), scale, EXACT)
    if MASKED:
        sees = _sees(tokens[None, :], keys[:, None], history, contextual)
        weights, slope = tl.where(sees, weights, 0.0), tl.where(sees, slope, 0.0)
    if HAS_VALUE:
        d_value = tl.dot(weights.to(gradient.dtype), gradient, d_value, input_precision="tf32x3")
    if HAS_KEY:
        d_scores = _products(value, gradient) * slope
        d_key = tl.dot(d_scores.to(query.dtype), query, d_key, input_precision="tf32x3")
    return d_key, d_value


@triton.jit
def attention_backward_key(
    query, key, value, gradient, d_key, d_value, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_VALUE: tl.constexpr,
):  # fmt: skip
    """Compute a block of the gradients of the keys, the values or both."""
    start, length, contextual, history = _sample_of_program(offsets, num_contextual, num_candidates, order)
    first = tl.program_id(0) * ROWS  # early keys are seen most
    if first >= length:
        return
    head = tl.program_id(1)
    query += start * query_stride + head * query_head
    gradient += start * gradient_stride + head * gradient_head
    queries = _blocks(query, query_stride, length, COLUMNS, HEAD_DIM, TMA)
    gradients = _blocks(gradient, gradient_stride, length, COLUMNS, HEAD_DIM, TMA)
    keys = first + tl.arange(0, ROWS)
    my_key = _load(key + start * key_stride + head * key_head, keys, key_stride, length, HEAD_DIM)
    my_value = _load(value + start * value_stride + head * value_head, keys, value_stride, length, HEAD_DIM)
    key_total = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    value_total = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    # In part: contextual queries before these keys, the keys' own queries and, if some keys are candidates, all later
    # queries. As a whole, otherwise: all later queries.
    own = first // COLUMNS
    before = tl.where(first < history, tl.minimum(tl.cdiv(contextual, COLUMNS), own), 0)
    blocks = tl.cdiv(length, COLUMNS)
    own_end = tl.minimum(tl.cdiv(first + ROWS, COLUMNS), blocks)
    part_end = tl.where((first < history) & (first + ROWS > history), blocks, own_end)
    for number in range(before + part_end - own):
        block = tl.where(number < before, number, own + number - before)
        key_total, value_total = _add_key_gradients(
            key_total, value_total, my_key, my_value, queries, gradients, block, keys, query_stride, gradient_stride,
            length, history, contextual, scale, HEAD_DIM, COLUMNS, EXACT, TMA, True, HAS_KEY, HAS_VALUE,
        )  # fmt: skip
    for block in range(part_end, tl.where(first + ROWS > history, part_end, blocks)):
        key_total, value_total = _add_key_gradients(
            key_total, value_total, my_key, my_value, queries, gradients, block, keys, query_stride, gradient_stride,
            length, history, contextual, scale, HEAD_DIM, COLUMNS, EXACT, TMA, False, HAS_KEY, HAS_VALUE,
        )  # fmt: skip
    target = start * output_stride + head * output_head
    if HAS_KEY:
        _store(d_key + target, keys, output_stride, length, key_total * (0.5 * scale * weight_scale), HEAD_DIM)
    if HAS_VALUE:
        _store(d_value + target, keys, output_stride, length, value_total * weight_scale, HEAD_DIM)


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
