"""The backward kernels with one program per (sample, head), which computes the sample's blocks one after another.

For comparison alone; see by_sample_attention.py. Parameters are those of the kernels in triton_kernels.py.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from hstu.triton_kernels import key_gradients, query_gradients, sample_of_program


@triton.jit
def backward_query(
    query, key, value, gradient, d_query, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the queries of a sample."""
    start, length, contextual, history = sample_of_program(offsets, num_contextual, num_candidates, order)
    for first in range(0, length, ROWS):
        query_gradients(
            first, start, length, contextual, history, query, key, value, gradient, d_query,
            query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
            output_stride, output_head, scale, weight_scale, HEAD_DIM, ROWS, COLUMNS, EXACT,
        )  # fmt: skip


@triton.jit
def backward_key(
    query, key, value, gradient, d_key, d_value, offsets, num_contextual, num_candidates, order,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
    output_stride, output_head, scale, weight_scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_VALUE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the keys, the values or both of a sample."""
    start, length, contextual, history = sample_of_program(offsets, num_contextual, num_candidates, order)
    for first in range(0, length, ROWS):
        key_gradients(
            first, start, length, contextual, history, query, key, value, gradient, d_key, d_value,
            query_stride, query_head, key_stride, key_head, value_stride, value_head, gradient_stride, gradient_head,
            output_stride, output_head, scale, weight_scale, HEAD_DIM, ROWS, COLUMNS, EXACT, HAS_KEY, HAS_VALUE,
        )  # fmt: skip
