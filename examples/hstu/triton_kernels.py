"""The Triton kernels of HSTU attention: forward, and the gradients of the queries and of the keys and values.

A program computes one block of ROWS tokens of one head of a sample, and reads the other tokens by blocks of COLUMNS:

    forward          a block of queries, over the keys that it sees
    backward_query   a block of queries, over the keys that it sees: the gradient of the queries
    backward_key     a block of keys, over the queries that see it: the gradients of the keys and the values

Only blocks that are seen in part are masked; `Sequences` in attention.py says which tokens see which. Products of
float32 are those of three TF32 products (`tf32x3`), about as exact as float32; of bfloat16, that setting changes
nothing.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    if EXACT:
        return 1.0 / (1.0 + tl.exp(-x))
    # One instruction instead of an exponential and a division, which cost a third of the time. x * sigmoid(x) is off by
    # at most 1e-5 for x from -20 to 20 on an H200, less than rounding x to bfloat16 makes it.
    half = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], tl.float32, is_pure=True, pack=1)
    return 0.5 + 0.5 * half


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
def _store(base, tokens, stride, length, values, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, HEAD_DIM)
    target = base + tokens[:, None] * stride + dims[None, :]
    tl.store(target, values.to(base.dtype.element_ty), mask=tokens[:, None] < length)


@triton.jit
def _sees(queries, keys, history, contextual):
    """Return which queries see which keys; the shapes broadcast. Beyond a sample's end are zeros, which add nothing."""
    return ((keys < history) & ((keys <= queries) | (queries < contextual))) | (queries == keys)


@triton.jit
def sample_of_program(offsets, num_contextual, num_candidates, order):
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
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    tokens = block * COLUMNS + tl.arange(0, COLUMNS)
    key = _load(keys, tokens, key_stride, length, HEAD_DIM)
    if EXACT and HEAD_DIM == 256:
        scores = _products_in_halves(query, key, HEAD_DIM) * scale
    else:
        scores = _products(query, key) * scale
    weights = scores * _sigmoid(scores, EXACT)
    if MASKED:
        weights = tl.where(_sees(queries[:, None], tokens[None, :], history, contextual), weights, 0.0)
    value = _load(values, tokens, value_stride, length, HEAD_DIM)
    return tl.dot(weights.to(value.dtype), value, total, input_precision="tf32x3")


@triton.jit
def forward(
    query, key, value, output, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, output_stride, output_head,
    scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute a block of the output; see the top of the file."""
    start, length, contextual, history = sample_of_program(offsets, num_contextual, num_candidates, order)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # late queries see most
    if first >= length:
        return
    head = tl.program_id(1)
    query += start * query_stride + head * query_head
    key += start * key_stride + head * key_head
    value += start * value_stride + head * value_head
    queries = first + tl.arange(0, ROWS)
    mine = _load(query, queries, query_stride, length, HEAD_DIM)
    total = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    whole, seen, own, rest = _seen_keys(first, length, contextual, history, ROWS, COLUMNS)
    for block in range(whole):
        total = _attend(
            total, mine, key, value, block, queries, key_stride, value_stride, length, history, contextual, scale,
            HEAD_DIM, COLUMNS, EXACT, False,
        )  # fmt: skip
    for number in range(rest):
        block = tl.where(number < seen, whole + number, own + number - seen)
        total = _attend(
            total, mine, key, value, block, queries, key_stride, value_stride, length, history, contextual, scale,
            HEAD_DIM, COLUMNS, EXACT, True,
        )  # fmt: skip
    _store(output + start * output_stride + head * output_head, queries, output_stride, length,
           total * weight_scale, HEAD_DIM)  # fmt: skip


@triton.jit
def _add_query_gradient(
    total, query, gradient, keys, values, block, queries, key_stride, value_stride, length, history, contextual, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    tokens = block * COLUMNS + tl.arange(0, COLUMNS)
    key = _load(keys, tokens, key_stride, length, HEAD_DIM)
    value = _load(values, tokens, value_stride, length, HEAD_DIM)
    scores = _products(query, key) * scale
    sigmoid = _sigmoid(scores, EXACT)
    d_weights = _products(gradient, value)
    d_scores = d_weights * sigmoid * (1.0 + scores * (1.0 - sigmoid))
    if MASKED:
        d_scores = tl.where(_sees(queries[:, None], tokens[None, :], history, contextual), d_scores, 0.0)
    return tl.dot(d_scores.to(key.dtype), key, total, input_precision="tf32x3")


@triton.jit
def query_gradients(
    first, start, length, contextual, history, query, key, value, gradient, d_query,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the queries first .. first + ROWS - 1 of the program's sample and head."""
    head = tl.program_id(1)
    key += start * key_stride + head * key_head
    value += start * value_stride + head * value_head
    queries = first + tl.arange(0, ROWS)
    mine = _load(query + start * query_stride + head * query_head, queries, query_stride, length, HEAD_DIM)
    my_gradient = _load(
        gradient + start * gradient_stride + head * gradient_head, queries, gradient_stride, length, HEAD_DIM
    )
    total = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    whole, seen, own, rest = _seen_keys(first, length, contextual, history, ROWS, COLUMNS)
    for block in range(whole):
        total = _add_query_gradient(
            total, mine, my_gradient, key, value, block, queries, key_stride, value_stride, length, history, contextual,
            scale, HEAD_DIM, COLUMNS, EXACT, False,
        )  # fmt: skip
    for number in range(rest):
        block = tl.where(number < seen, whole + number, own + number - seen)
        total = _add_query_gradient(
            total, mine, my_gradient, key, value, block, queries, key_stride, value_stride, length, history, contextual,
            scale, HEAD_DIM, COLUMNS, EXACT, True,
        )  # fmt: skip
    _store(d_query + start * output_stride + head * output_head, queries, output_stride, length,
           total * (scale * weight_scale), HEAD_DIM)  # fmt: skip


@triton.jit
def backward_query(
    query, key, value, gradient, d_query, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute a block of the gradient of the queries."""
    start, length, contextual, history = sample_of_program(offsets, num_contextual, num_candidates, order)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first >= length:
        return
    query_gradients(
        first, start, length, contextual, history, query, key, value, gradient, d_query,
        query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
        output_stride, output_head, scale, weight_scale, HEAD_DIM, ROWS, COLUMNS, EXACT,
    )  # fmt: skip


@triton.jit
def _add_key_gradients(
    d_key, d_value, key, value, queries_base, gradients, block, keys, query_stride, gradient_stride, length, history,
    contextual, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_VALUE: tl.constexpr,
):  # fmt: skip
    tokens = block * COLUMNS + tl.arange(0, COLUMNS)
    query = _load(queries_base, tokens, query_stride, length, HEAD_DIM)
    gradient = _load(gradients, tokens, gradient_stride, length, HEAD_DIM)
    scores = _products(key, query) * scale  # [keys, queries]
    sigmoid = _sigmoid(scores, EXACT)
    if MASKED:
        sigmoid = tl.where(_sees(tokens[None, :], keys[:, None], history, contextual), sigmoid, 0.0)
    if HAS_VALUE:
        d_value = tl.dot((scores * sigmoid).to(gradient.dtype), gradient, d_value, input_precision="tf32x3")
    if HAS_KEY:
        d_weights = _products(value, gradient)
        d_scores = d_weights * sigmoid * (1.0 + scores * (1.0 - sigmoid))
        d_key = tl.dot(d_scores.to(query.dtype), query, d_key, input_precision="tf32x3")
    return d_key, d_value


@triton.jit
def key_gradients(
    first, start, length, contextual, history, query, key, value, gradient, d_key, d_value,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_VALUE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the keys and values first .. first + ROWS - 1 of the program's sample and head."""
    head = tl.program_id(1)
    query += start * query_stride + head * query_head
    gradient += start * gradient_stride + head * gradient_head
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
            key_total, value_total, my_key, my_value, query, gradient, block, keys, query_stride, gradient_stride,
            length, history, contextual, scale, HEAD_DIM, COLUMNS, EXACT, True, HAS_KEY, HAS_VALUE,
        )  # fmt: skip
    for block in range(part_end, tl.where(first + ROWS > history, part_end, blocks)):
        key_total, value_total = _add_key_gradients(
            key_total, value_total, my_key, my_value, query, gradient, block, keys, query_stride, gradient_stride,
            length, history, contextual, scale, HEAD_DIM, COLUMNS, EXACT, False, HAS_KEY, HAS_VALUE,
        )  # fmt: skip
    target = start * output_stride + head * output_head
    if HAS_KEY:
        _store(d_key + target, keys, output_stride, length, key_total * (scale * weight_scale), HEAD_DIM)
    if HAS_VALUE:
        _store(d_value + target, keys, output_stride, length, value_total * weight_scale, HEAD_DIM)


@triton.jit
def backward_key(
    query, key, value, gradient, d_key, d_value, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_VALUE: tl.constexpr,
):  # fmt: skip
    """Compute a block of the gradients of the keys, the values or both."""
    start, length, contextual, history = sample_of_program(offsets, num_contextual, num_candidates, order)
    first = tl.program_id(0) * ROWS  # early keys are seen most
    if first >= length:
        return
    key_gradients(
        first, start, length, contextual, history, query, key, value, gradient, d_key, d_value,
        query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
        output_stride, output_head, scale, weight_scale, HEAD_DIM, ROWS, COLUMNS, EXACT, HAS_KEY, HAS_VALUE,
    )  # fmt: skip
