"""The jagged kernels against the padded reference, both compared with the reference in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenrank.core.errors import ConfigError
from hstu.attention import Sequences, padded_attention
from tests.examples.hstu.samples import make_sequences

pytestmark = pytest.mark.gpu
SCALE_LENGTH = 1000
FORWARD_TOLERANCE, GRADIENT_TOLERANCE = 2, 5  # times the error of the padded reference in the same dtype
# With few tokens the reference can happen to have hardly any error, so this many roundings of the result are allowed
# too: as many as random roundings in the 256 products of a score add up to.
ROUNDINGS = 16
Attention = Callable[..., Tensor]


def _sequences(lengths: list[int], contextual: list[int], candidates: list[int]) -> Sequences:
    return make_sequences(lengths, contextual, candidates, device="cuda")


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


def _run(attention: Attention, inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype) -> list[Tensor]:
    """Return the result and the gradients of query, key and value."""
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs[:3]]
    output = attention(*leaves, sequences, scale_length=SCALE_LENGTH)
    output.backward(inputs[3].to(dtype))
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [output.detach(), *gradients]


def _error(result: Tensor, exact: Tensor) -> float:
    error: float = (result.double() - exact).norm().item()
    return error


def _check(sequences: Sequences, heads: int, head_dim: int, dtype: torch.dtype, few_tokens: bool = False) -> None:
    _compare(_inputs(sequences, heads, head_dim, dtype), sequences, dtype, few_tokens)


def _compare(inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype, few_tokens: bool = False) -> None:
    exact = _run(padded_attention, inputs, sequences, torch.float64)
    padded = _run(padded_attention, inputs, sequences, dtype)
    jagged = _run(triton_attention, inputs, sequences, dtype)
    tolerances = [FORWARD_TOLERANCE, *[GRADIENT_TOLERANCE] * 3]
    for name, mine, reference, best, tolerance in zip(
        ("output", "query", "key", "value"), jagged, padded, exact, tolerances, strict=True
    ):
        assert mine.dtype == dtype
        limit = tolerance * _error(reference, best)
        if few_tokens:
            limit += ROUNDINGS * torch.finfo(dtype).eps / 2 * best.norm().item()
        assert _error(mine, best) <= limit, f"{name}: {_error(mine, best):.3e} > {limit:.3e}"


HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@HEAD_DIMS
@BOTH_DTYPES
@pytest.mark.parametrize(
    ("lengths", "contextual", "candidates", "heads"),
    [
        ([300, 0, 1, 129, 128, 17, 512, 64], [2, 0, 1, 0, 128, 3, 200, 1], [10, 0, 0, 129, 0, 1, 140, 63], 3),
        ([8192, 3], [5, 0], [20, 1], 1),
    ],
)
def test_results_and_gradients_are_as_exact_as_those_of_the_reference(
    head_dim: int, dtype: torch.dtype, lengths: list[int], contextual: list[int], candidates: list[int], heads: int
) -> None:
    _check(_sequences(lengths, contextual, candidates), heads, head_dim, dtype)


@st.composite
def _samples(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    lengths = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(60, 70), st.integers(120, 400)), max_size=6))
    contextual = [draw(st.integers(0, length)) for length in lengths]
    candidates = [draw(st.integers(0, length - prefix)) for length, prefix in zip(lengths, contextual, strict=True)]
    return lengths, contextual, candidates


@HEAD_DIMS
@BOTH_DTYPES
@settings(max_examples=30, deadline=None)
@given(samples=_samples())
def test_any_lengths_prefixes_and_candidates_agree(
    head_dim: int, dtype: torch.dtype, samples: tuple[list[int], list[int], list[int]]
) -> None:
    _check(_sequences(*samples), 2, head_dim, dtype, few_tokens=True)


@HEAD_DIMS
@BOTH_DTYPES
@pytest.mark.parametrize("shift", [-6.0, 6.0])
def test_large_scores_are_as_exact(head_dim: int, dtype: torch.dtype, shift: float) -> None:
    """A trained model has scores far from 0, where SiLU is nearly 0 or nearly linear."""
    sequences = _sequences([500, 260], [2, 0], [10, 0])
    inputs = _inputs(sequences, 2, head_dim, dtype)
    inputs[0][..., 0], inputs[1][..., 0] = 8.0, shift * head_dim**0.5 / 8
    _compare(inputs, sequences, dtype)


def test_a_sample_has_the_same_bits_again_and_alone() -> None:
    together = _sequences([90, 333, 4000], [1, 2, 0], [5, 0, 7])
    inputs = _inputs(together, 2, 128, torch.bfloat16)
    whole, again = (_run(triton_attention, inputs, together, torch.bfloat16) for _ in range(2))
    alone = _sequences([333], [2], [0])
    part = _run(triton_attention, [tensor[90:423] for tensor in inputs], alone, torch.bfloat16)
    for one, other, of_part in zip(whole, again, part, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[90:423], of_part)


def test_a_nan_stays_in_its_sample() -> None:
    sequences = _sequences([100, 100, 100], [0, 0, 0], [0, 0, 0])
    inputs = _inputs(sequences, 2, 64, torch.bfloat16)
    for tensor in inputs:
        tensor[100:200] = float("nan")
    for result in _run(triton_attention, inputs, sequences, torch.bfloat16):
        assert result[:100].isfinite().all()
        assert result[200:].isfinite().all()
        assert result[100:200].isnan().all()


def test_nothing_waits_for_the_device() -> None:
    sequences = _sequences([500, 20], [1, 1], [3, 0])
    inputs = _inputs(sequences, 2, 64, torch.bfloat16)
    _run(triton_attention, inputs, sequences, torch.bfloat16)  # compiles
    fresh = Sequences(**{name: getattr(sequences, name) for name in sequences.__dataclass_fields__})
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(triton_attention, inputs, fresh, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_head_dim_or_dtype_is_an_error_that_names_those_that_work() -> None:
    sequences = _sequences([4], [0], [0])
    with pytest.raises(ConfigError, match=r"head_dim must be one of.*64, 128, 256.*got 32"):
        triton_attention(*_inputs(sequences, 1, 32, torch.float32)[:3], sequences, scale_length=1)
    with pytest.raises(ConfigError, match=r"bfloat16 or float32, got torch.float16"):
        triton_attention(*_inputs(sequences, 1, 64, torch.float16)[:3], sequences, scale_length=1)
