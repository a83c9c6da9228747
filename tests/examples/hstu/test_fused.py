"""Triton kernels: as exact as torch's operations, on GPUs and in Triton's interpreter."""

import os
import subprocess
import sys
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hstu import HSTULayer, Sequences, padded_attention
from tests.examples.hstu.exactness import MODES, Results, attended, check, check_bits, check_layers
from tests.examples.hstu.samples import CONFIG, make_sequences, needs_triton


@needs_triton
def test_interpreted_kernels_and_layers_are_as_exact_as_torchs_operations() -> None:
    """In another process, since Triton's interpreter is chosen before kernels are loaded."""
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("exactness.py"))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 0, 0), (4, 0, 34), (3000, 0, 700)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_fused_layer_is_as_exact_as_torch_and_recomputes_bits(
    mode: str, lengths: tuple[int, ...], head_dim: int
) -> None:
    check_layers(mode, 5, head_dim=head_dim, lengths=lengths, device="cuda")


def triton_attention(*arguments: Any, **options: Any) -> Tensor:
    """Import at the first call: without a GPU there may be no Triton."""
    from hstu.fused import triton_attention

    return triton_attention(*arguments, **options)


def _inputs(sequences: Sequences, heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw query, key, value and the gradient of the result; the first three as views of one tensor, as in a layer."""
    generator = torch.Generator("cuda").manual_seed(sequences.num_tokens)
    shape = (sequences.num_tokens, heads, 4, head_dim)
    return list(torch.randn(shape, generator=generator, device="cuda").to(dtype).unbind(2))


def _compare(inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype, roundings: int = 0) -> None:
    runs = ((triton_attention, dtype), (padded_attention, dtype), (padded_attention, torch.float64))
    mine, reference, exact = (attended(attention, inputs, sequences, kind) for attention, kind in runs)
    outputs: list[Results] = [{"output": one.pop("output")} for one in (mine, reference, exact)]
    check(outputs[0], outputs[1], outputs[2], dtype, 2, roundings)
    check(mine, reference, exact, dtype, 5, roundings)


Samples = tuple[list[int], list[int], list[int]]  # lengths, contextual tokens, candidates
MANY = ([300, 0, 1, 129, 128, 17, 512, 64], [2, 0, 1, 0, 128, 3, 200, 1], [10, 0, 0, 129, 0, 1, 140, 63])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.mark.gpu
@HEAD_DIMS
@BOTH_DTYPES
@pytest.mark.parametrize(
    ("samples", "shift"), [(MANY, 0), (MANY, 6.0), (MANY, -6.0), (([8192, 3], [5, 0], [20, 1]), 0)]
)
def test_attention_is_as_exact_as_the_reference_and_so_it_is_at_large_scores(
    head_dim: int, dtype: torch.dtype, samples: Samples, shift: float
) -> None:
    sequences = make_sequences(*samples, device="cuda")
    query, *others = _inputs(sequences, 3 if samples is MANY else 1, head_dim, dtype)
    _compare([query + shift / head_dim**0.5, *others], sequences, dtype)


@st.composite
def _samples(draw: st.DrawFn) -> Samples:
    lengths = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(60, 70), st.integers(120, 400)), max_size=6))
    contextual = [draw(st.integers(0, length)) for length in lengths]
    candidates = [draw(st.integers(0, length - prefix)) for length, prefix in zip(lengths, contextual, strict=True)]
    return lengths, contextual, candidates


@pytest.mark.gpu
@HEAD_DIMS
@BOTH_DTYPES
@settings(max_examples=30, deadline=None)
@given(samples=_samples())
def test_any_lengths_prefixes_and_candidates_agree(head_dim: int, dtype: torch.dtype, samples: Samples) -> None:
    sequences = make_sequences(*samples, device="cuda")
    # With few tokens the reference can happen to have hardly any error, so as many roundings of the result are allowed
    # too as random roundings in the 256 products of a score add up to.
    _compare(_inputs(sequences, 2, head_dim, dtype), sequences, dtype, 16)


@pytest.mark.gpu
def test_a_sample_has_the_same_bits_again_and_alone_and_keeps_its_nan() -> None:
    together, bf16 = make_sequences([90, 333, 4000], [1, 2, 0], [5, 0, 7], device="cuda"), torch.bfloat16
    inputs = _inputs(together, 2, 128, bf16)
    whole, again = (attended(triton_attention, inputs, together, bf16) for _ in range(2))
    alone = make_sequences([333], [2], [0], device="cuda")
    check_bits(again, whole)
    part = attended(triton_attention, [tensor[90:423] for tensor in inputs], alone, bf16)
    check_bits({name: result[90:423] for name, result in whole.items()}, part)
    for tensor in inputs:
        tensor[90:423] = float("nan")
    for name, result in attended(triton_attention, inputs, together, bf16).items():
        assert torch.equal(result[:90], whole[name][:90])
        assert torch.equal(result[423:], whole[name][423:])
        assert result[90:423].isnan().all()


@pytest.mark.gpu
def test_a_gradient_may_be_expanded_and_a_callers_allocator_of_kernels_stays() -> None:
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        raise AssertionError("kernels allocate by PyTorch")

    sequences = make_sequences([300, 70], [2, 0], [10, 0], device="cuda")
    *inputs, gradient = _inputs(sequences, 2, 256, torch.bfloat16)  # of which some kernels load by TMA, on Hopper
    context = copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(_compare, [*inputs, gradient[:1].expand_as(gradient)], sequences, torch.bfloat16)
    assert allocate in context.values()


def _change(layer: HSTULayer, change: str) -> None:
    match change:
        case "watched":
            layer.attention.register_forward_hook(lambda *_: None)
        case "gradients watched":
            layer.output.register_full_backward_hook(lambda *_: None)
        case "padded":
            layer.attention.name = "padded"
        case "unfused":
            layer.fused = False
        case "dropout" | "dropout that is off":
            layer.dropout.p = 0.1
            layer.train(change == "dropout")


@pytest.mark.parametrize("other", ["dropout", "watched", "gradients watched"])
def test_a_layer_that_drops_units_or_is_watched_is_not_plain(other: str) -> None:
    layer = HSTULayer(CONFIG)
    for change, is_plain in (("nothing", True), ("dropout that is off", True), (other, False)):
        _change(layer, change)
        assert layer.is_plain() == is_plain


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["nothing", "watched", "dropout", "padded", "unfused", "float64"])
def test_plain_layers_are_fused_if_there_are_kernels(change: str) -> None:
    layer = HSTULayer(replace(CONFIG, hidden=64, heads=1, head_dim=64)).cuda()
    _change(layer, change)
    tokens = torch.randn(5, 64, device="cuda")
    if change == "float64":
        layer, tokens = layer.double(), tokens.double()
    _, update = layer(tokens, tokens, make_sequences([5], [0], [0], device="cuda"))
    assert (type(update.grad_fn).__name__ == "_LayerBackward") == (change == "nothing")


class _Function:
    """Stands in for what `triton.jit` returns, and for the compiled forms of it."""

    arg_names = ("values", "count", "WIDTH", "ROWS")

    def __init__(self, calls: list[tuple[Any, ...]], event: str = "compiled") -> None:
        self.calls, self.event = calls, event

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.calls.append((self.event, grid, *arguments, *sorted(constants.items())))
            return _Function(self.calls, "launched")

        return launch


@needs_triton
def test_the_compiled_form_gets_arguments_and_constants_in_the_kernels_order() -> None:
    from hstu.fused import Kernel

    function, values = _Function([]), torch.zeros(40)
    kernel = Kernel(function)
    for grid, number in (((2, 1, 1), 3), ((5, 1, 1), 7)):
        kernel.launch(grid, values, number, ROWS=8, WIDTH=4, num_warps=2)
    first, second = function.calls
    assert first == ("compiled", (2, 1, 1), values, 3, ("ROWS", 8), ("WIDTH", 4), ("num_warps", 2))
    assert second == ("launched", (5, 1, 1), values.data_ptr(), 7, 4, 8)
    for other, width, event in (
        *((values.bfloat16(), 4, "compiled"), (values[1:], 4, "compiled"), (values[4:], 4, "launched")),
        (values, 8, "compiled"),
    ):
        kernel.launch((5, 1, 1), other, 7, ROWS=8, WIDTH=width, num_warps=2)
        assert function.calls[-1][0] == event


@needs_triton
def test_numbers_are_told_apart_as_triton_does() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import create_function_from_signature

    from hstu.fused import Kernel

    def kernel(values, count):  # type: ignore[no-untyped-def]
        pass

    function, values = triton.jit(kernel), torch.zeros(4)
    backend = triton.compiler.make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    numbers = (1, 2, 5, 16, 32, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 0.5, 1.0)
    for one in numbers:
        for other in numbers:
            stand_in = _Function([])
            mine = Kernel(stand_in)
            for number in (one, other):
                mine.launch((1, 1, 1), values, number, WIDTH=4, ROWS=8)
            is_same = bind(values, one)[1] == bind(values, other)[1]
            assert is_same == (stand_in.calls[1][0] == "launched"), (one, other)
