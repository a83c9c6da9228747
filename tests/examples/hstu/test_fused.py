"""Fused kernels are as close to float64 as torch's operations, and are chosen where they can run."""

import pytest
import torch
from torch import nn

from hstu import unfused
from hstu.attention import Sequences
from hstu.config import HSTUConfig
from hstu.layer import HSTULayer, pointwise_for
from tests.examples.hstu.interpreter import interpret, needs_triton
from tests.examples.hstu.pointwise_errors import MODES, Results, check, layer, parts

EACH_MODE = pytest.mark.parametrize("mode", MODES)


@needs_triton
def test_interpreted_kernels_and_layers_are_as_exact_as_torchs_operations() -> None:
    interpret("interpreted_fused.py")


@needs_triton
def test_a_norm_that_is_divided_among_ranks_is_applied_as_it_is() -> None:
    from hstu import fused

    attended, u = torch.randn(2, 3, 4, 5).unbind(0)
    expected = (2 * attended * nn.functional.silu(u)).flatten(-2)
    torch.testing.assert_close(fused.gate(attended, u, _Double()), expected)


class _Double(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values


def test_on_the_cpu_operations_are_torchs() -> None:
    assert pointwise_for(torch.zeros(1, 8), fused=True) is unfused


@pytest.mark.gpu
def test_on_cuda_kernels_are_chosen_unless_they_are_switched_off_or_the_dtype_is_float64() -> None:
    from hstu import fused

    tokens = torch.zeros(1, 8, device="cuda")
    assert pointwise_for(tokens, fused=True) is fused
    assert pointwise_for(tokens.bfloat16(), fused=True) is fused
    assert pointwise_for(tokens, fused=False) is unfused
    assert pointwise_for(tokens.double(), fused=True) is unfused


def _parts(mode: str | None, tokens: int, head_dim: int, *, fused: bool) -> Results:
    from hstu import fused as kernels

    return parts(kernels if fused else unfused, mode, tokens, head_dim, device="cuda")


@pytest.mark.gpu
@EACH_MODE
@pytest.mark.parametrize(("tokens", "head_dim"), [(0, 64), (1, 64), (37, 24), (1000, 256), (33_000, 64)])
def test_results_and_gradients_are_as_exact_as_those_of_torch(mode: str, tokens: int, head_dim: int) -> None:
    mine, reference = (_parts(mode, tokens, head_dim, fused=fused) for fused in (True, False))
    check(mine, reference, _parts(None, tokens, head_dim, fused=False), MODES[mode])


@pytest.mark.gpu
def test_equal_inputs_give_equal_bits() -> None:
    first, second = (_parts("autocast", 3000, 256, fused=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@EACH_MODE
@pytest.mark.parametrize("head_dim", [8, 64])
def test_a_layer_is_as_exact_as_by_torch_and_recomputes_equal_bits(mode: str, head_dim: int) -> None:
    mine, again, reference = (
        layer(mode=mode, fused=fused, recompute=recompute, head_dim=head_dim, device="cuda")
        for fused, recompute in ((True, False), (True, True), (False, False))
    )
    exact = layer(mode=None, fused=False, head_dim=head_dim, device="cuda")
    check(mine, reference, exact, MODES[mode])
    assert all(torch.equal(again[name], mine[name]) for name in mine)


def _kept_bytes(dropout: float, *, recompute: bool) -> int:
    """Return what a layer of 2 heads of 64 keeps of 1,000 tokens for the backward pass."""
    shape = HSTUConfig(max_length=1000, hidden=128, heads=2, head_dim=64, dropout=dropout, recompute=recompute)
    module = HSTULayer(shape).cuda()
    counts = torch.zeros(1, dtype=torch.int64, device="cuda")
    sequences = Sequences(
        offsets=torch.tensor([0, 1000], device="cuda"),
        num_contextual=counts,
        num_candidates=counts,
        num_tokens=1000,
        max_length=1000,
    )
    tokens, update = torch.randn(2, 1000, 128, device="cuda", requires_grad=True).unbind()
    module(tokens, update, sequences)  # allocates workspaces
    before = torch.cuda.memory_allocated()
    results = module(tokens, update, sequences)
    kept = torch.cuda.memory_allocated() - before
    del results
    return kept


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["as a whole", "by parts"])
def test_with_recompute_norm_and_activations_are_not_kept(dropout: float) -> None:
    saved = _kept_bytes(dropout, recompute=False) - _kept_bytes(dropout, recompute=True)
    # float32 of LayerNorm's output and of V, Q and K; the gate keeps U as it was, which is kept in any case.
    assert saved >= 1000 * (128 + 3 * 128) * 4


@pytest.mark.gpu
@pytest.mark.parametrize("value", [0.0, 100.0])
def test_a_constant_row_is_normalized_to_zeros_and_passes_on_the_gradient_of_the_stream(value: float) -> None:
    from hstu import fused

    tokens = torch.full((5, 64), value, device="cuda", requires_grad=True)
    stream, normed = fused.norm(tokens, None, nn.LayerNorm(64, eps=1e-6, device="cuda"))
    torch.autograd.backward([stream, normed], [torch.ones_like(stream), torch.ones_like(normed)])
    assert torch.equal(normed, torch.zeros_like(normed))
    assert tokens.grad is not None
    assert torch.equal(tokens.grad, torch.ones_like(tokens))
