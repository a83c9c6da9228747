from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenrank.core.errors import ConfigError
from hstu.attention import Sequences, padded_attention
from hstu.config import Attention
from tests.examples.hstu.exactness import Results, attended, check, check_bits
from tests.examples.hstu.samples import make_sequences

pytestmark = pytest.mark.gpu
_sequences = partial(make_sequences, device="cuda")


def _inputs(sequences: Sequences, heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw query, key, value and the gradient of the result; the first three as views of one tensor, as in a layer."""
    generator = torch.Generator("cuda").manual_seed(sequences.num_tokens)
    shape = (sequences.num_tokens, heads, 4, head_dim)
    fused = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    return list(fused.unbind(2))


def triton_attention(*arguments: Any, **settings: Any) -> Tensor:
    """Import at the first call: without a GPU there may be no Triton."""
    from hstu import triton_attention as module

    return module.triton_attention(*arguments, **settings)


def _run(attention: Attention, inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype) -> Results:
    return attended(attention, inputs, sequences, dtype, scale_length=1000)


def _compare(inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype, few_tokens: bool = False) -> None:
    runs = ((triton_attention, dtype), (padded_attention, dtype), (padded_attention, torch.float64))
    results = [_run(attention, inputs, sequences, kind) for attention, kind in runs]
    assert all(result.dtype == dtype for result in results[0].values())
    # With few tokens the reference can happen to have hardly any error, so as many roundings of the result are allowed
    # too as random roundings in the 256 products of a score add up to.
    roundings = 16 if few_tokens else 0
    output = [{"output": one.pop("output")} for one in results]
    check(output[0], output[1], output[2], dtype, 2, roundings)
    check(results[0], results[1], results[2], dtype, 5, roundings)


Samples = tuple[list[int], list[int], list[int]]  # lengths, contextual tokens, candidates
MANY = ([300, 0, 1, 129, 128, 17, 512, 64], [2, 0, 1, 0, 128, 3, 200, 1], [10, 0, 0, 129, 0, 1, 140, 63])


def _check(samples: Samples, heads: int, head_dim: int, dtype: torch.dtype, few_tokens: bool = False) -> None:
    sequences = _sequences(*samples)
    _compare(_inputs(sequences, heads, head_dim, dtype), sequences, dtype, few_tokens)


HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@HEAD_DIMS
@BOTH_DTYPES
@pytest.mark.parametrize("samples", [MANY, ([8192, 3], [5, 0], [20, 1])], ids=["many", "long"])
def test_results_are_as_exact_as_those_of_the_reference(head_dim: int, dtype: torch.dtype, samples: Samples) -> None:
    _check(samples, 3 if samples is MANY else 1, head_dim, dtype)


@st.composite
def _samples(draw: st.DrawFn) -> Samples:
    lengths = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(60, 70), st.integers(120, 400)), max_size=6))
    contextual = [draw(st.integers(0, length)) for length in lengths]
    candidates = [draw(st.integers(0, length - prefix)) for length, prefix in zip(lengths, contextual, strict=True)]
    return lengths, contextual, candidates


@HEAD_DIMS
@BOTH_DTYPES
@settings(max_examples=30, deadline=None)
@given(samples=_samples())
def test_any_lengths_prefixes_and_candidates_agree(head_dim: int, dtype: torch.dtype, samples: Samples) -> None:
    _check(samples, 2, head_dim, dtype, few_tokens=True)


@HEAD_DIMS
@BOTH_DTYPES
@pytest.mark.parametrize("shift", [-6.0, 6.0])
def test_large_scores_are_as_exact(head_dim: int, dtype: torch.dtype, shift: float) -> None:
    """A trained model has scores far from 0, where SiLU is nearly 0 or nearly linear."""
    sequences = _sequences([500, 260], [2, 0], [10, 0])
    inputs = _inputs(sequences, 2, head_dim, dtype)
    inputs[0][..., 0], inputs[1][..., 0] = 8.0, shift * head_dim**0.5 / 8
    _compare(inputs, sequences, dtype)


@HEAD_DIMS
def test_the_gradient_may_be_one_for_all_tokens(head_dim: int) -> None:
    """As that of a sum over tokens is: expanded, with a stride of 0."""
    sequences = _sequences([300, 70], [2, 0], [10, 0])
    *inputs, gradient = _inputs(sequences, 2, head_dim, torch.bfloat16)
    _compare([*inputs, gradient[:1].expand_as(gradient)], sequences, torch.bfloat16)


def test_a_sample_has_the_same_bits_again_and_alone() -> None:
    together = _sequences([90, 333, 4000], [1, 2, 0], [5, 0, 7])
    inputs = _inputs(together, 2, 128, torch.bfloat16)
    whole, again = (_run(triton_attention, inputs, together, torch.bfloat16) for _ in range(2))
    alone = _sequences([333], [2], [0])
    part = _run(triton_attention, [tensor[90:423] for tensor in inputs], alone, torch.bfloat16)
    check_bits(again, whole)
    check_bits({name: result[90:423] for name, result in whole.items()}, part)


def test_a_nan_stays_in_its_sample() -> None:
    sequences = _sequences([100, 100, 100], [0, 0, 0], [0, 0, 0])
    inputs = _inputs(sequences, 2, 64, torch.bfloat16)
    for tensor in inputs:
        tensor[100:200] = float("nan")
    for result in _run(triton_attention, inputs, sequences, torch.bfloat16).values():
        assert result[:100].isfinite().all()
        assert result[200:].isfinite().all()
        assert result[100:200].isnan().all()


def test_a_callers_allocator_of_kernels_stays() -> None:
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        raise AssertionError("kernels allocate by PyTorch")

    sequences = _sequences([100], [0], [0])
    inputs = _inputs(sequences, 1, 256, torch.bfloat16)  # of which some kernels load by TMA, on Hopper
    context = copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(_run, triton_attention, inputs, sequences, torch.bfloat16)
    assert allocate in context.values()


def test_another_head_dim_or_dtype_is_an_error_that_names_those_that_work() -> None:
    sequences = _sequences([4], [0], [0])
    with pytest.raises(ConfigError, match=r"head_dim must be one of.*64, 128, 256.*got 32"):
        triton_attention(*_inputs(sequences, 1, 32, torch.float32)[:3], sequences, scale_length=1)
    with pytest.raises(ConfigError, match=r"bfloat16 or float32, got torch.float16"):
        triton_attention(*_inputs(sequences, 1, 64, torch.float16)[:3], sequences, scale_length=1)
