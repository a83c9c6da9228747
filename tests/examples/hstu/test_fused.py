"""Triton kernels are as exact as torch's operations, beside float64: on GPUs, and in Triton's interpreter.

The interpreter runs this file as a program, since it is chosen before kernels are loaded.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hstu import HSTULayer, Sequences, padded_attention
from tests.examples.hstu.samples import CONFIG, make_sequences, needs_triton

MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.bfloat16}  # what matrix products take
Results = dict[str, Tensor]


def check(
    mine: Results, reference: Results, exact: Results, dtype: torch.dtype, tolerance: int, roundings: int
) -> None:
    """Check that no result is much further from the exact one, in float64, than that of torch's operations."""
    assert mine.keys() == reference.keys() == exact.keys()
    for name, best in exact.items():
        assert mine[name].dtype == reference[name].dtype, name
        error, of_torch = (float((result[name].double() - best).norm()) for result in (mine, reference))
        limit = tolerance * of_torch + roundings * torch.finfo(dtype).eps / 2 * best.norm().item()
        assert error <= limit, f"{name}: {error:.3e} > {limit:.3e}"


def check_bits(mine: Results, reference: Results) -> None:
    different = [name for name in reference if not torch.equal(mine[name], reference[name])]
    assert not different, f"{different} differ"


def triton_attention(*arguments: Any, **options: Any) -> Tensor:
    """Import at the first call: without a GPU there may be no Triton."""
    from hstu.fused import triton_attention

    return triton_attention(*arguments, **options)


def _attended(attention: Any, inputs: Sequence[Tensor], sequences: Sequences, dtype: torch.dtype) -> Results:
    """Run attention on query, key and value, with the gradient of the output; return it and all gradients."""
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs[:3]]
    query, key, value = leaves
    output = attention(query, key, value, sequences, scale_length=1000)
    gradients = torch.autograd.grad(output, leaves, inputs[3].to(dtype))
    return {"output": output.detach(), **dict(zip(("d_query", "d_key", "d_value"), gradients, strict=True))}


def _layer(
    apply: Callable[..., Any], *, mode: str | None, lengths: Sequence[int] = (4, 0, 34), **options: Any
) -> Results:
    """Apply a layer of a config with these options; return its results and all gradients. `mode` None: in float64."""
    torch.manual_seed(0)
    device = options.pop("device", "cpu")
    module = HSTULayer(replace(CONFIG, hidden=48, **{"heads": 2, "head_dim": 64, "attention": "triton", **options}))
    draws = torch.randn(sum(lengths), 4, 48).bfloat16().float().unbind(1)  # with gaps between rows
    # The dtype of parameters and the residual stream, and that of products.
    wide = torch.float64 if mode is None else torch.bfloat16 if mode == "bf16" else torch.float32
    narrow = torch.float64 if mode is None else MODES[mode]
    for parameter in module.parameters():
        parameter.data = parameter.bfloat16().float()
    module.to(device, wide)
    tokens, update, *gradients = (
        draw.to(device, dtype) for draw, dtype in zip(draws, (wide, narrow, wide, narrow), strict=True)
    )
    contextual, candidates = (list(map(min, counts, lengths)) for counts in ([2, 0, 1], [2, 0, 20]))
    sequences = make_sequences(lengths, contextual, candidates, device=device)
    leaves = {"tokens": tokens.requires_grad_(), "update": update.requires_grad_(), **dict(module.named_parameters())}
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
        results = apply(module, tokens, update, sequences)
    found = torch.autograd.grad(results, [*leaves.values()], gradients)
    return dict(zip(("next_tokens", "next_update", *leaves), (*(one.detach() for one in results), *found), strict=True))


def _by_parts(module: HSTULayer, tokens: Tensor, update: Tensor, sequences: Sequences) -> Any:
    module.attention.name = "padded"
    return module.by_parts(tokens, update, sequences)


def _check_layers(mode: str, **options: Any) -> None:
    """Check that fused layers are as exact as torch's operations, with recompute to the same bits."""
    from hstu.fused import fused_layer

    mine, again = (_layer(fused_layer, mode=mode, recompute=recompute, **options) for recompute in (False, True))
    reference, exact = (_layer(_by_parts, mode=one, **options) for one in (mode, None))
    check(mine, reference, exact, MODES[mode], 5, 1)
    check_bits(again, mine)


def _check_interpreted_attention(*, head_dim: int, tma: bool) -> None:
    """Check attention in float32, with blocks loaded by TMA or not, whatever is fastest."""
    from hstu import fused

    for name in ("FORWARD", "BACKWARD_QUERY", "BACKWARD_KEY_VALUE", "BACKWARD_KEY", "BACKWARD_VALUE"):
        setattr(fused, name, {key: replace(launch, tma=tma) for key, launch in getattr(fused, name).items()})
    for lengths, *others in (([0, 65, 100, 5], [0, 64, 70, 1], [0, 1, 30, 2]), ([0, 0], [0, 0], [0, 0])):
        sequences, generator = make_sequences(lengths, *others), torch.Generator().manual_seed(0)
        inputs = list(torch.randn(sum(lengths), 1, 4, head_dim, generator=generator).unbind(2))
        mine = _attended(triton_attention, inputs, sequences, torch.float32)
        for name, best in _attended(padded_attention, inputs, sequences, torch.float32).items():
            assert (mine[name] - best).norm() <= 1e-6 * best.norm().clamp_min(1e-9), name


@needs_triton
def test_interpreted_kernels_and_layers_are_as_exact_as_torchs_operations() -> None:
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 0, 0), (4, 0, 34), (3000, 0, 700)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_fused_layer_is_as_exact_as_torch_and_recomputes_bits(
    mode: str, lengths: tuple[int, ...], head_dim: int
) -> None:
    _check_layers(mode, head_dim=head_dim, lengths=lengths, device="cuda")


def _inputs(sequences: Sequences, heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw query, key, value and the gradient of the result; the first three as views of one tensor, as in a layer."""
    generator = torch.Generator("cuda").manual_seed(sequences.num_tokens)
    shape = (sequences.num_tokens, heads, 4, head_dim)
    return list(torch.randn(shape, generator=generator, device="cuda").to(dtype).unbind(2))


def _compare(inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype, roundings: int = 0) -> None:
    runs = ((triton_attention, dtype), (padded_attention, dtype), (padded_attention, torch.float64))
    mine, reference, exact = (_attended(attention, inputs, sequences, kind) for attention, kind in runs)
    outputs: list[Results] = [{"output": one.pop("output")} for one in (mine, reference, exact)]
    check(outputs[0], outputs[1], outputs[2], dtype, 2, roundings)
    check(mine, reference, exact, dtype, 5, roundings)


Samples = tuple[list[int], list[int], list[int]]  # lengths, contextual tokens, candidates
MANY = ([300, 0, 1, 129, 128, 17, 512, 64], [2, 0, 1, 0, 128, 3, 200, 1], [10, 0, 0, 129, 0, 1, 140, 63])
LONG = ([8192, 3], [5, 0], [20, 1])


@st.composite
def _samples(draw: st.DrawFn) -> Samples:
    lengths = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(60, 70), st.integers(120, 400)), max_size=6))
    contextual = [draw(st.integers(0, length)) for length in lengths]
    candidates = [draw(st.integers(0, length - prefix)) for length, prefix in zip(lengths, contextual, strict=True)]
    return lengths, contextual, candidates


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_is_as_exact_as_the_reference_also_at_large_scores(head_dim: int, dtype: torch.dtype) -> None:
    for samples, heads, shift in ((MANY, 3, 0.0), (MANY, 3, 6.0), (MANY, 3, -6.0), (LONG, 1, 0.0)):
        sequences = make_sequences(*samples, device="cuda")
        query, *others = _inputs(sequences, heads, head_dim, dtype)
        _compare([query + shift / head_dim**0.5, *others], sequences, dtype)

    # With few tokens the reference can happen to have hardly any error, so as many roundings of the result are allowed
    # too as random roundings in the 256 products of a score add up to.
    @settings(max_examples=30, deadline=None)
    @given(samples=_samples())
    def any_samples(samples: Samples) -> None:
        sequences = make_sequences(*samples, device="cuda")
        _compare(_inputs(sequences, 2, head_dim, dtype), sequences, dtype, 16)

    any_samples()


@pytest.mark.gpu
def test_a_sample_has_the_same_bits_again_and_alone_and_keeps_its_nan() -> None:
    together, bf16 = make_sequences([90, 333, 4000], [1, 2, 0], [5, 0, 7], device="cuda"), torch.bfloat16
    inputs = _inputs(together, 2, 128, bf16)
    whole, again = (_attended(triton_attention, inputs, together, bf16) for _ in range(2))
    alone = make_sequences([333], [2], [0], device="cuda")
    check_bits(again, whole)
    part = _attended(triton_attention, [tensor[90:423] for tensor in inputs], alone, bf16)
    check_bits({name: result[90:423] for name, result in whole.items()}, part)
    for tensor in inputs:
        tensor[90:423] = float("nan")
    for name, result in _attended(triton_attention, inputs, together, bf16).items():
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


def _drop_out(layer: HSTULayer, *, training: bool = True) -> None:
    layer.dropout.p = 0.1
    layer.train(training)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("change", "is_plain", "is_fused"),
    [
        (lambda layer: None, True, True),
        (lambda layer: _drop_out(layer, training=False), True, True),
        (_drop_out, False, False),
        (lambda layer: layer.attention.register_forward_hook(lambda *_: None), False, False),
        (lambda layer: layer.output.register_full_backward_hook(lambda *_: None), False, False),
        (lambda layer: setattr(layer.attention, "name", "padded"), True, False),
        (lambda layer: setattr(layer, "fused", False), True, False),
        (lambda layer: layer.double(), True, False),
    ],
)
def test_plain_layers_are_fused_if_there_are_kernels(device: str, change: Any, is_plain: bool, is_fused: bool) -> None:
    layer = HSTULayer(replace(CONFIG, hidden=64, heads=1, head_dim=64)).to(device)
    change(layer)
    assert layer.is_plain() == is_plain
    tokens = torch.randn(5, 64, device=device, dtype=layer.uvqk.weight.dtype)
    _, update = layer(tokens, tokens, make_sequences([5], [0], [0], device=device))
    assert (type(update.grad_fn).__name__ == "_LayerBackward") == (is_fused and device == "cuda")


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
def test_a_compiled_form_gets_arguments_in_the_kernels_order_and_those_that_triton_compiles_it_for() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import create_function_from_signature

    from hstu.fused import Kernel

    def launched(*calls: tuple[Tensor, Any, int]) -> list[tuple[Any, ...]]:
        function = _Function([])
        kernel = Kernel(function)
        for values, number, width in calls:
            kernel.launch((number, 1, 1), values, number, ROWS=8, WIDTH=width, num_warps=2)
        return function.calls

    values = torch.zeros(40)
    first, second = launched((values, 3, 4), (values, 7, 4))
    assert first == ("compiled", (3, 1, 1), values, 3, ("ROWS", 8), ("WIDTH", 4), ("num_warps", 2))
    assert second == ("launched", (7, 1, 1), values.data_ptr(), 7, 4, 8)
    others = [((values.bfloat16(), 7, 4), False), ((values[1:], 7, 4), False), ((values[4:], 7, 4), True)]
    for other, is_same in (*others, ((values, 7, 8), False)):
        assert launched((values, 7, 4), other)[1][0] == ("launched" if is_same else "compiled")

    def kernel(values, count):  # type: ignore[no-untyped-def]
        pass

    function = triton.jit(kernel)
    backend = triton.compiler.make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    numbers = (1, 2, 5, 16, 32, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 0.5, 1.0)
    for first_number, number in product(numbers, numbers):
        is_same = bind(values, first_number)[1] == bind(values, number)[1]
        event, *_ = launched((values, first_number, 4), (values, number, 4))[1]
        assert event == ("launched" if is_same else "compiled"), (first_number, number)


if __name__ == "__main__":
    _check_interpreted_attention(head_dim=64, tma=True)  # computes the gradients of keys and values together
    _check_interpreted_attention(head_dim=256, tma=False)
    for lengths in ((4, 0, 34), (0, 0, 0), (1, 0, 0)):
        _check_layers("fp32", lengths=lengths)
