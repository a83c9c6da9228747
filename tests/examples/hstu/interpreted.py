"""Runs kernels and layers in Triton's interpreter, on the CPU, beside torch's operations; see `test_fused.py`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hstu import fused, triton_attention, unfused
from hstu.attention import padded_attention
from tests.examples.hstu.exactness import MODES, attended, by_parts, check, check_bits, check_whole_layers, layer
from tests.examples.hstu.samples import make_sequences

LAUNCHES = ("FORWARD", "BACKWARD_QUERY", "BACKWARD_KEY_VALUE", "BACKWARD_KEY", "BACKWARD_VALUE")
SAMPLES = (
    ([0, 5, 70, 33], [0, 1, 3, 0], [0, 2, 10, 1]),
    ([65, 64, 100], [64, 0, 70], [1, 64, 30]),
    ([0, 0], [0, 0], [0, 0]),
)  # lengths, contextual tokens, candidates


def check_attention(*, head_dim: int, tma: bool) -> None:
    """Check attention in float32, with blocks loaded by TMA or not, whatever is fastest."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHES:
            launches = getattr(triton_attention, name)
            changed = {key: replace(launch, tma=tma) for key, launch in launches.items()}
            patch.setattr(triton_attention, name, changed)
        for lengths, contextual, candidates in SAMPLES:
            sequences = make_sequences(lengths, contextual, candidates)
            generator = torch.Generator().manual_seed(0)
            inputs = list(torch.randn(sum(lengths), 1, 4, head_dim, generator=generator).unbind(2))
            mine, expected = (
                attended(attention, inputs, sequences, torch.float32, scale_length=100)
                for attention in (triton_attention.triton_attention, padded_attention)
            )
            for name, best in expected.items():
                assert (mine[name] - best).norm() <= 1e-6 * best.norm().clamp_min(1e-9), name


def check_layers() -> None:
    kernels, operations = by_parts(fused, padded_attention), by_parts(unfused, padded_attention)
    for mode, tolerance in (("fp32", 2), ("autocast", 4)):  # the interpreter truncates to bfloat16, where GPUs round
        options: dict[str, Any]
        for options in ({}, {"lengths": (0, 0, 0)}, {"lengths": (1, 0, 0), "head_dim": 12}):  # no power of 2
            mine, again = (layer(kernels, mode=mode, recompute=recompute, **options) for recompute in (False, True))
            reference, exact = (layer(operations, mode=one, **options) for one in (mode, None))
            check(mine, reference, exact, MODES[mode], tolerance)
            # With recompute, torch adds the update, so it casts that gradient, with rounding.
            again["d_update"] = mine["d_update"]
            check_bits(again, mine)


def check_norm_alone() -> None:
    """Check a norm without an update, and that second derivatives, which kernels have not, are refused."""
    values, module = torch.randn(19, 8, requires_grad=True), torch.nn.LayerNorm(8)
    weights = torch.randn(19, 8)
    results = []
    for norm in (fused.norm, unfused.norm):
        stream, normed = norm(values, None, module)
        gradients = torch.autograd.grad((weights * (stream + normed)).sum(), [values, *module.parameters()])
        results.append([stream, normed, *gradients])
    torch.testing.assert_close(*results)
    stream, _ = fused.norm(values, None, module)
    (gradient,) = torch.autograd.grad((weights * stream).sum(), values)
    assert torch.equal(gradient, weights)  # without one of the norm
    stream, normed = fused.norm(torch.full((5, 8), 100.0, requires_grad=True), None, module)
    assert not normed.any()  # of constant rows
    _, normed = fused.norm(values, None, module)
    (gradient,) = torch.autograd.grad(normed.square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


if __name__ == "__main__":
    for head_dim in (64, 256):  # of which one computes the gradients of keys and values together
        for tma in (False, True):
            check_attention(head_dim=head_dim, tma=tma)
    check_layers()
    check_norm_alone()
    check_whole_layers(mode="fp32", device="cpu", heads=1)
