"""The Triton kernels of HSTU's attention, forward and backward.

A program of attention computes one block of ROWS tokens of one head of a sample, and reads other tokens by blocks of
COLUMNS:

    attention_forward          a block of queries, over the keys that it sees
    attention_backward_query   a block of queries, over the keys that it sees: the gradient of the queries
    attention_backward_key     a block of keys, over the queries that see it: the gradients of the keys and the values

Only blocks that are seen in part are masked; `Sequences` says which tokens see which. Products of float32 are those of
three TF32 products (`tf32x3`), about as exact as float32; of bfloat16, that setting changes nothing. With TMA, blocks
are loaded by the tensor memory accelerator (Hopper and later; elsewhere Triton loads them as without), which leaves
more registers and issue slots to the products.
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
