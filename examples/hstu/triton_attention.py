"""HSTU attention by jagged Triton kernels, forward and backward, for CUDA.

Nothing is padded, and a sample's work is spread over as many programs as it has blocks of tokens, in both directions:
if one program had a whole sample, the longest sample would set the time of all, however well ranks are balanced.
Programs start in the order of their samples' lengths, longest
first, so that short work comes last and fills the gaps.

The backward computes the scores again. Nothing is added atomically, so equal inputs give equal bits.
"""

import math
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenrank.core.errors import ConfigError
from hstu import triton_kernels
from hstu.attention import Sequences
from hstu.launch import Kernel

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a kernel is launched."""

    rows: int
    """Tokens of a program's own block."""
    columns: int
    """Tokens of a block that it reads at a time."""
    warps: int
    """Of 32 threads, per program."""
    stages: int
    """Blocks that are loaded ahead."""
    tma: bool = False
    """Whether blocks are loaded by the tensor memory accelerator."""


BF16, FP32 = torch.bfloat16, torch.float32
# The fastest with equal lengths of 2,048, of those with 32 to 128 rows and columns, 4 or 8 warps and 1 to 4 stages: in
# bfloat16 with and without TMA on an H100, in float32 without on an H200. docs/results/training.md has what lost.
FORWARD = {
    (64, BF16): Launch(rows=64, columns=64, warps=4, stages=3),
    (128, BF16): Launch(rows=64, columns=32, warps=4, stages=3, tma=True),
    (256, BF16): Launch(rows=128, columns=32, warps=8, stages=3),
    (64, FP32): Launch(rows=32, columns=32, warps=4, stages=2),
    (128, FP32): Launch(rows=32, columns=32, warps=4, stages=2),
    (256, FP32): Launch(rows=32, columns=32, warps=4, stages=1),
}
BACKWARD_QUERY = {
    (64, BF16): Launch(rows=64, columns=64, warps=4, stages=2, tma=True),
    (128, BF16): Launch(rows=128, columns=64, warps=8, stages=3),
    (256, BF16): Launch(rows=128, columns=32, warps=8, stages=3, tma=True),
    (64, FP32): Launch(rows=64, columns=64, warps=4, stages=1),
    (128, FP32): Launch(rows=32, columns=32, warps=4, stages=1),
    (256, FP32): Launch(rows=32, columns=32, warps=4, stages=1),
}
# The gradients of keys and values together. Two sums [128, 256] do not fit into registers, and computing the scores
# twice is faster than smaller blocks, so with heads of 256 each has a launch.
BACKWARD_KEY_VALUE = {
    (64, BF16): Launch(rows=64, columns=32, warps=4, stages=3, tma=True),
    (128, BF16): Launch(rows=64, columns=64, warps=4, stages=2, tma=True),
    (64, FP32): Launch(rows=32, columns=32, warps=4, stages=2),
    (128, FP32): Launch(rows=32, columns=32, warps=4, stages=2),
}
BACKWARD_KEY = {
    (256, BF16): Launch(rows=128, columns=32, warps=8, stages=3, tma=True),
    (256, FP32): Launch(rows=32, columns=32, warps=4, stages=1),
}
BACKWARD_VALUE = {
    (256, BF16): Launch(rows=128, columns=64, warps=8, stages=2, tma=True),
    (256, FP32): Launch(rows=32, columns=32, warps=4, stages=1),
}


_FORWARD = Kernel(triton_kernels.forward)
_BACKWARD_QUERY = Kernel(triton_kernels.backward_query)
_BACKWARD_KEY = Kernel(triton_kernels.backward_key)


def triton_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    """Attend without padding; the arguments and the result are those of `padded_attention`.

    Args:
        query: bfloat16 or float32 [tokens, heads, head_dim] on a CUDA device, with a head_dim of 64, 128 or 256; may be
            a view with gaps between tokens and heads.
        key: like `query`.
        value: like `query`.
        sequences: where the samples are, on the same device.
        scale_length: what weights are divided by.

    Raises:
        ConfigError: the dtype or the head_dim is none of these, or a kernel needs more than the GPU has.
    """
    if query.shape[-1] not in HEAD_DIMS:
        raise ConfigError(f"head_dim must be one of {HEAD_DIMS} for Triton attention, got {query.shape[-1]}")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ConfigError(
            f"Triton attention takes bfloat16 or float32, got {query.dtype}, {key.dtype} and {value.dtype}; "
            "use autocast or padded_attention"
        )
    output: Tensor = _Attention.apply(query, key, value, sequences, scale_length)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: Sequences,
        scale_length: int,
    ) -> Tensor:
        query, key, value = (_with_dense_heads(tensor) for tensor in (query, key, value))
        ctx.save_for_backward(query, key, value)
        ctx.options = (sequences, scale_length)
        return attend(query, key, value, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        return *attend_backward(query, key, value, _with_dense_heads(gradient), *ctx.options), None, None


def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale_length: int) -> Tensor:
    """Return what `triton_attention` does, without gradients; heads must be dense."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(_FORWARD, FORWARD, [query, key, value], [output], sequences, scale_length)
    return output


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    sequences: Sequences,
    scale_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output; heads must be dense."""
    inputs = [query, key, value, gradient]
    d_query, d_key, d_value = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3])
    common = (sequences, scale_length)
    _launch(_BACKWARD_QUERY, BACKWARD_QUERY, inputs, [d_query], *common)
    outputs = [d_key, d_value]
    if (query.shape[-1], query.dtype) in BACKWARD_KEY_VALUE:
        _launch(_BACKWARD_KEY, BACKWARD_KEY_VALUE, inputs, outputs, *common, HAS_KEY=True, HAS_VALUE=True)
    else:
        _launch(_BACKWARD_KEY, BACKWARD_KEY, inputs, outputs, *common, HAS_KEY=True, HAS_VALUE=False)
        _launch(_BACKWARD_KEY, BACKWARD_VALUE, inputs, outputs, *common, HAS_KEY=False, HAS_VALUE=True)
    return d_query, d_key, d_value


def _with_dense_heads(tensor: Tensor) -> Tensor:
    """Return the tensor such that the values of a head are adjacent and aligned, as the kernels read them.

    A stride of 0, of an expanded gradient, is none that TMA is documented to take.
    """
    is_dense = tensor.stride(-1) == 1 and all(stride % 16 == 0 < stride for stride in tensor.stride()[:-1])
    return tensor if is_dense and tensor.data_ptr() % 16 == 0 else tensor.contiguous()


def _launch(
    kernel: Kernel,
    launches: dict[tuple[int, torch.dtype], Launch],
    inputs: list[Tensor],
    outputs: list[Tensor],
    sequences: Sequences,
    scale_length: int,
    **flags: bool,
) -> None:
    _, heads, head_dim = inputs[0].shape
    launch = launches[head_dim, inputs[0].dtype]
    programs = (sequences.max_length + launch.rows - 1) // launch.rows
    if sequences.num_tokens == 0 or heads == 0:
        return
    arguments: list[Tensor | float] = [
        *inputs,
        *outputs,
        sequences.offsets,
        sequences.num_contextual,
        sequences.num_candidates,
        sequences.longest_first,
        *[stride for tensor in inputs for stride in tensor.stride()[:2]],
        *outputs[0].stride()[:2],
        1 / math.sqrt(head_dim),
        1 / scale_length,
    ]
    context = copy_context()
    if launch.tma:
        context.run(triton.set_allocator, _descriptors)  # of this launch alone: the caller may have one of their own
    try:
        context.run(
            kernel.launch,
            (programs, heads, len(sequences.offsets) - 1),
            *arguments,
            HEAD_DIM=head_dim,
            ROWS=launch.rows,
            COLUMNS=launch.columns,
            EXACT=inputs[0].dtype == torch.float32,
            TMA=launch.tma,
            num_warps=launch.warps,
            num_stages=launch.stages,
            **flags,
        )
    except triton.runtime.errors.OutOfResources as error:
        raise ConfigError(
            f"Triton attention with head_dim {head_dim} and {inputs[0].dtype} needs more than this GPU has ({error}); "
            "use a smaller head_dim or padded_attention"
        ) from error


def _descriptors(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate what Triton asks for in a launch with TMA: 256 bytes per program, for its two descriptors.

    PyTorch aligns to 512 bytes, and gives the memory to others only later in the current stream, where the launch is.
    """
    return torch.empty(size, dtype=torch.uint8, device="cuda")
