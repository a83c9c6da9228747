"""HSTU by Triton kernels, on CUDA: attention without padding, and whole layers as one autograd.Function.

**Attention.** A sample's work is spread over as many programs as it has blocks of tokens, in both directions: if one
program had a whole sample, the longest sample would set the time of all, however well ranks are balanced. Programs
start in the order of their samples' lengths, longest first, so that short work comes last and fills the gaps. The
backward computes the scores again.

**Layers.** Each value is read and written once, in the dtype that the products take: bfloat16 under autocast, where
torch's LayerNorm returns float32. Statistics, sums and SiLU are computed in float32. A layer launches about 20 kernels,
each of which takes a GPU 10 to 300 us. Built from modules, the host needs as long to launch them: a node of the graph
for each, casts of weights, hooks. Then the step takes as long as the host, and a rank with less work is no faster.
"""

import math
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenrank.core.errors import ConfigError
from hstu import attention_kernels, row_kernels
from hstu.layers import HSTULayer, Sequences

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)


class Kernel:
    """A Triton kernel that keeps its compiled forms, because Triton takes long to find the one to launch.

    On some hosts this takes 40 us, longer than a GPU needs for a small kernel. Triton compiles for the dtype of a
    tensor and for the type of a number, and for what is special about either: `specialize_impl` of triton.runtime.jit.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def launch(self, grid: tuple[int, int, int], *arguments: Tensor | float | None, **constants: Any) -> None:
        """Launch programs on the current device and stream; the first argument is a tensor, constants come last."""
        first = arguments[0]
        assert isinstance(first, Tensor)
        key: list[Any] = [first.get_device(), *constants.items()]
        values: list[Any] = []
        for argument in arguments:  # about 20, dozens of times a step: each test counts
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                values.append(address)  # which Triton takes as it is; of a tensor, it asks the driver what it is
                key.append((argument.dtype,) if address % 16 else argument.dtype)
            else:
                values.append(argument)
                key.append(_kind(argument) if type(argument) is int else type(argument))
        known = tuple(key)
        if (found := self._compiled.get(known)) is not None:
            compiled, constant_values = found
            compiled[grid](*values, *constant_values)
            return
        compiled = self._function[grid](*arguments, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            names = self._function.arg_names[len(arguments) :]
            self._compiled[known] = compiled, tuple(constants[name] for name in names)


def _kind(number: int) -> int:
    """Return what is special about a number: 1 is a constant in the compiled form, multiples of 16 are known to be."""
    if number == 1:
        return 1
    is_multiple = number % 16 == 0
    return 2 + is_multiple if -(1 << 31) <= number < 1 << 31 else 4 + is_multiple


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel of attention is launched."""

    rows: int  # tokens of a program's own block
    columns: int  # tokens of a block that it reads at a time
    warps: int
    stages: int  # blocks that are loaded ahead
    tma: bool = False  # whether they are loaded by the tensor memory accelerator


BF16, FP32 = torch.bfloat16, torch.float32
# The fastest with equal lengths of 2,048, of those with 32 to 128 rows and columns, 4 or 8 warps and 1 to 4 stages: in
# bfloat16 with and without TMA on an H100, in float32 without on an H200.
FORWARD = {
    (64, BF16): Launch(64, 64, 4, 3),
    (128, BF16): Launch(64, 32, 4, 3, tma=True),
    (256, BF16): Launch(128, 32, 8, 3),
    (64, FP32): Launch(32, 32, 4, 2),
    (128, FP32): Launch(32, 32, 4, 2),
    (256, FP32): Launch(32, 32, 4, 1),
}
BACKWARD_QUERY = {
    (64, BF16): Launch(64, 64, 4, 2, tma=True),
    (128, BF16): Launch(128, 64, 8, 3),
    (256, BF16): Launch(128, 32, 8, 3, tma=True),
    (64, FP32): Launch(64, 64, 4, 1),
    (128, FP32): Launch(32, 32, 4, 1),
    (256, FP32): Launch(32, 32, 4, 1),
}
# The gradients of keys and values together. Two sums [128, 256] do not fit into registers, and computing the scores
# twice is faster than smaller blocks, so with heads of 256 each has a launch.
BACKWARD_KEY_VALUE = {
    (64, BF16): Launch(64, 32, 4, 3, tma=True),
    (128, BF16): Launch(64, 64, 4, 2, tma=True),
    (64, FP32): Launch(32, 32, 4, 2),
    (128, FP32): Launch(32, 32, 4, 2),
}
BACKWARD_KEY = {(256, BF16): Launch(128, 32, 8, 3, tma=True), (256, FP32): Launch(32, 32, 4, 1)}
BACKWARD_VALUE = {(256, BF16): Launch(128, 64, 8, 2, tma=True), (256, FP32): Launch(32, 32, 4, 1)}

_FORWARD = Kernel(attention_kernels.attention_forward)
_BACKWARD_QUERY = Kernel(attention_kernels.attention_backward_query)
_BACKWARD_KEY = Kernel(attention_kernels.attention_backward_key)


def triton_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    """Attend without padding; the arguments and the result are those of `padded_attention`.

    Queries, keys and values are bfloat16 or float32 on a CUDA device, with a head_dim of 64, 128 or 256; they may be
    views with gaps between tokens and heads.
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
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale_length: int) -> Tensor:
        query, key, value = (_with_dense_heads(tensor) for tensor in (query, key, value))
        ctx.save_for_backward(query, key, value)
        ctx.options = (sequences, scale_length)
        return _attend(query, key, value, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        return *_attend_backward(query, key, value, _with_dense_heads(gradient), *ctx.options), None, None


def _attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale_length: int) -> Tensor:
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(_FORWARD, FORWARD, [query, key, value], [output], sequences, scale_length)
    return output


def _attend_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, sequences: Sequences, scale_length: int
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
    if sequences.num_tokens == 0 or heads == 0:
        return
    launch = launches[head_dim, inputs[0].dtype]
    arguments: list[Tensor | float] = [
        *inputs,
        *outputs,
        sequences.offsets,
        sequences.num_contextual,
        sequences.num_candidates,
        sequences.longest_first,
        *[stride for tensor in (*inputs, outputs[0]) for stride in tensor.stride()[:2]],
        1 / math.sqrt(head_dim),
        1 / scale_length,
    ]
    context = copy_context()
    if launch.tma:
        context.run(triton.set_allocator, _descriptors)  # of this launch alone: the caller may have one of their own
    context.run(
        kernel.launch,
        (_blocks(sequences.max_length, launch.rows), heads, len(sequences.offsets) - 1),
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


def _descriptors(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate what Triton asks for in a launch with TMA: 256 bytes per program, for its two descriptors.

    PyTorch aligns to 512 bytes, and gives the memory to others only later in the current stream, where the launch is.
    """
    return torch.empty(size, dtype=torch.uint8, device="cuda")


_NORM_FORWARD, _NORM_BACKWARD = Kernel(row_kernels.norm_forward), Kernel(row_kernels.norm_backward)
_SILU_FORWARD, _SILU_BACKWARD = Kernel(row_kernels.silu_forward), Kernel(row_kernels.silu_backward)
_SILU_VALUES = 1024  # of each of V, Q and K that a program computes at a time
_MAX_PROGRAMS = 528  # that sum gradients: 4 for each multiprocessor of an H100 or H200, which has room for all at once


def _norm(
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
    """Write LayerNorm of `values` + `update` to `output`, and the sum to `total`; times SiLU(u), if there is one.

    Values are [tokens, width] or [tokens, heads, head_dim], weight and bias [width], u is [tokens, heads, head_dim].
    Returns what the backward pass needs of each row: float32 [tokens, 2], its mean and 1 / standard deviation.
    """
    statistics = torch.empty(len(values), 2, dtype=torch.float32, device=values.device)
    if len(values):
        _NORM_FORWARD.launch(
            (len(values), 1, 1), values, update, total, u, weight, bias, output, statistics,
            len(weight), *_strides(u), eps, **_norm_constants(len(weight), values.shape[-1]),
        )  # fmt: skip
    return statistics


def _norm_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    *,
    d_values: Tensor,
    sums: Tensor,
    u: Tensor | None = None,
    d_u: Tensor | None = None,
    u_sums: Tensor | None = None,
    d_total: Tensor | None = None,
    d_update: Tensor | None = None,
    also_summed: Tensor | None = None,
) -> None:
    """Write the gradients of rows, given that of the output, and their sums over tokens.

    `values` are what was normalized. Their gradient, to which `d_total` from elsewhere is added, goes to `d_values`
    and, in another dtype, to `d_update`; that of `u` to `d_u`, whose heads may be apart differently. The first columns
    of `sums`, from `_partial_sums`, are for weight, bias and `also_summed`; `u_sums` are other columns, for `d_u`.
    """
    if len(values):
        _NORM_BACKWARD.launch(
            (len(sums), 1, 1),
            values, u, weight, bias, statistics, gradient.contiguous(), d_total, also_summed, d_values, d_update, d_u,
            sums, u_sums,
            len(values), len(weight), *_strides(u), *_strides(d_u), sums.stride(0), _blocks(len(values), len(sums)),
            **_norm_constants(len(weight), values.shape[-1]),
        )  # fmt: skip


def _partial_sums(tokens: Tensor, columns: int) -> Tensor:
    """Return where programs write sums over equally many tokens each: float32 [programs, columns], uninitialized."""
    tokens_each = max(_blocks(len(tokens), _MAX_PROGRAMS), 8)
    return torch.empty(_blocks(len(tokens), tokens_each), columns, dtype=torch.float32, device=tokens.device)


def _u_of(projected: Tensor, head_dim: int) -> Tensor:
    """Return U as a view of what the first linear returns: [tokens, heads, head_dim]."""
    return projected.view(len(projected), projected.shape[1] // (4 * head_dim), 4, head_dim).select(2, 0)


def _silu(projected: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    """Return SiLU of V, Q and K: [tokens, heads, head_dim] each."""
    tokens, heads = len(projected), projected.shape[1] // (4 * head_dim)
    activated = projected.new_empty(tokens, heads, 3, head_dim)
    if tokens:
        constants = _silu_constants(head_dim)
        grid = (_blocks(tokens * heads, constants["ROWS"]), 1, 1)
        _SILU_FORWARD.launch(grid, projected, activated, tokens * heads, **constants)
    return activated.unbind(2)


def _silu_backward(projected: Tensor, gradients: tuple[Tensor, ...], *, d_projected: Tensor, sums: Tensor) -> None:
    """Write the gradient of what the first linear has returned, and its sums over tokens, except for those of U.

    `gradients` are those of SiLU of V, Q and K: [tokens, heads, head_dim] each, contiguous.
    """
    tokens, heads, head_dim = gradients[0].shape
    if tokens:
        _SILU_BACKWARD.launch(
            (len(sums), heads, 1), projected, *gradients, d_projected, sums,
            tokens, heads, sums.stride(0), _blocks(tokens, len(sums)), **_silu_constants(head_dim),
        )  # fmt: skip


def _blocks(length: int, block: int) -> int:
    return -(-length // block)  # as triton.cdiv, which takes the host 3 us


def _power_of_2(width: int) -> int:
    """Return the first that is not less."""
    return 1 << (width - 1).bit_length()


@cache
def _silu_constants(head_dim: int) -> dict[str, int]:
    block = _power_of_2(head_dim)
    return {"HEAD_DIM": head_dim, "BLOCK": block, "ROWS": max(_SILU_VALUES // block, 1), "num_warps": 4}


def _strides(u: Tensor | None) -> tuple[int, int]:
    """Return those of tokens and heads."""
    return (0, 0) if u is None else (u.stride(0), u.stride(1))


@cache
def _norm_constants(width: int, head_dim: int) -> dict[str, int]:
    block = _power_of_2(width)
    return {"HEAD_DIM": head_dim, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _product_dtype(tokens: Tensor, update: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: that of autocast, or else of the residual stream."""
    device = tokens.device.type
    is_cast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else torch.promote_types(tokens.dtype, update.dtype)


def has_kernels(layer: HSTULayer, tokens: Tensor, update: Tensor) -> bool:
    """Return whether `fused_layer` can compute a layer of these dtypes."""
    is_triton = layer.attention.name in ("auto", "triton")
    return is_triton and layer.head_dim in HEAD_DIMS and _product_dtype(tokens, update) in DTYPES


def fused_layer(layer: HSTULayer, tokens: Tensor, update: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Apply a layer, of which `is_plain` and `has_kernels` are true; see `HSTULayer.forward`."""
    modules = (layer.input_norm, layer.uvqk, layer.output_norm, layer.output)
    parameters = [parameter for module in modules for parameter in (module.weight, module.bias)]
    stream, next_update = _Layer.apply(tokens, update, *parameters, layer, sequences)  # type: ignore[no-untyped-call]
    return stream, next_update


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, update: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        input_weight, input_bias, uvqk_weight, uvqk_bias, norm_weight, norm_bias, output_weight, output_bias = (
            arguments[:8]
        )
        layer, sequences = arguments[8:]
        dtype, scale_length = _product_dtype(tokens, update), layer.attention.scale_length
        tokens, update = tokens.contiguous(), update.contiguous()
        stream = torch.empty_like(tokens, dtype=torch.promote_types(tokens.dtype, update.dtype))
        normed = torch.empty_like(tokens, dtype=dtype)
        statistics = _norm(
            tokens, input_weight, input_bias, layer.input_norm.eps, output=normed, update=update, total=stream
        )
        uvqk, output = uvqk_weight.to(dtype), output_weight.to(dtype)
        projected = torch.addmm(uvqk_bias.to(dtype), normed, uvqk.t())
        v, q, k = activated = _silu(projected, layer.head_dim)
        attended = _attend(q, k, v, sequences, scale_length)
        gated = torch.empty_like(attended)
        u = _u_of(projected, layer.head_dim)  # the kernel applies SiLU
        norm_statistics = _norm(attended, norm_weight, norm_bias, layer.output_norm.eps, output=gated, u=u)
        next_update = torch.addmm(output_bias.to(dtype), gated.flatten(1), output.t())
        kept = (None,) * 4 if layer.recompute else (normed, *activated)
        ctx.save_for_backward(
            stream, statistics, input_weight, input_bias, uvqk, projected, attended, norm_statistics, norm_weight,
            norm_bias, output, gated, *kept,
        )  # fmt: skip
        ctx.options = layer.head_dim, layer.input_norm.eps, sequences, scale_length
        ctx.dtypes = tokens.dtype, update.dtype, uvqk_weight.dtype, output_weight.dtype
        return stream, next_update

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: Tensor, d_next_update: Tensor) -> tuple[Tensor | None, ...]:
        (
            stream, statistics, input_weight, input_bias, uvqk, projected, attended, norm_statistics, norm_weight,
            norm_bias, output, gated, normed, *activated,
        ) = ctx.saved_tensors  # fmt: skip
        head_dim, input_eps, sequences, scale_length = ctx.options
        tokens_dtype, update_dtype, uvqk_dtype, output_dtype = ctx.dtypes
        hidden, width = len(input_weight), len(norm_weight)
        sums = _partial_sums(stream, 6 * width + 3 * hidden)
        uvqk_sums = sums[:, 2 * width :]

        d_next_update = d_next_update.contiguous()
        d_output = _summed_products(d_next_update, gated.flatten(1), output_dtype)
        d_attended, d_projected = torch.empty_like(attended), torch.empty_like(projected)
        _norm_backward(
            d_next_update @ output, attended, norm_weight, norm_bias, norm_statistics, d_values=d_attended, sums=sums,
            u=_u_of(projected, head_dim), d_u=_u_of(d_projected, head_dim), u_sums=uvqk_sums,
        )  # fmt: skip

        v, q, k = _silu(projected, head_dim) if normed is None else activated
        d_q, d_k, d_v = _attend_backward(q, k, v, d_attended, sequences, scale_length)
        _silu_backward(projected, (d_v, d_q, d_k), d_projected=d_projected, sums=uvqk_sums)

        if normed is None:
            normed = torch.empty_like(stream, dtype=uvqk.dtype)
            _norm(stream, input_weight, input_bias, input_eps, output=normed)
        d_uvqk = _summed_products(d_projected, normed, uvqk_dtype)
        d_tokens = torch.empty_like(stream)
        d_update = None if update_dtype == stream.dtype else torch.empty_like(stream, dtype=update_dtype)
        _norm_backward(
            d_projected @ uvqk, stream, input_weight, input_bias, statistics, d_values=d_tokens,
            sums=sums[:, 6 * width :], d_total=d_stream.contiguous(), d_update=d_update, also_summed=d_next_update,
        )  # fmt: skip
        dtypes = [
            norm_weight.dtype,
            norm_weight.dtype,
            uvqk_dtype,
            input_weight.dtype,
            input_weight.dtype,
            output_dtype,
        ]
        totals = sums.sum(0).split([width, width, 4 * width, hidden, hidden, hidden])
        d_norm_weight, d_norm_bias, d_uvqk_bias, d_input_weight, d_input_bias, d_output_bias = (
            total.to(dtype) for total, dtype in zip(totals, dtypes, strict=True)
        )
        return (
            d_tokens.to(tokens_dtype), d_tokens if d_update is None else d_update, d_input_weight, d_input_bias,
            d_uvqk, d_uvqk_bias, d_norm_weight, d_norm_bias, d_output, d_output_bias, None, None,
        )  # fmt: skip


def _summed_products(d_output: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a linear's weight in the weight's dtype: the sum over tokens of gradient times input."""
    if d_output.dtype == torch.bfloat16 and dtype == torch.float32:
        return torch.mm(d_output.t(), inputs, out_dtype=dtype)  # without rounding on the way
    return (d_output.t() @ inputs).to(dtype)
