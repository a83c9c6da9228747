"""Runs kernels and layers in Triton's interpreter, on the CPU, beside torch's operations; see `test_fused.py`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hstu import fused, unfused
from hstu.attention import Sequences, padded_attention
from hstu.triton_attention import triton_attention
from tests.examples.hstu.exactness import MODES, check, check_bits, check_whole_layers, kernels_on_the_cpu, layer, parts
from tests.examples.hstu.samples import make_sequences


def check_attention() -> None:
    """Check results and gradients of attention beside the padded reference."""
    for lengths, contextual, candidates in (
        ([0, 5, 70, 33], [0, 1, 3, 0], [0, 2, 10, 1]),
        ([65, 64, 100], [64, 0, 70], [1, 64, 30]),
        ([0, 0], [0, 0], [0, 0]),
    ):
        sequences = make_sequences(lengths, contextual, candidates)
        generator = torch.Generator().manual_seed(0)
        inputs = list(torch.randn(sum(lengths), 1, 4, 64, generator=generator).unbind(2))
        mine, expected = (_run(attention, inputs, sequences) for attention in (triton_attention, padded_attention))
        for one, other in zip(mine, expected, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm().clamp_min(1e-9)


def _run(attention: Callable[..., Tensor], inputs: list[Tensor], sequences: Sequences) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    output = attention(*leaves, sequences, scale_length=100)
    output.backward(inputs[3])
    return [output.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]


def check_parts() -> None:
    """Check norms, SiLU and gate, alone and in layers."""
    for mode, tolerance in (("fp32", 2), ("autocast", 4)):  # the interpreter truncates to bfloat16, where GPUs round
        for tokens, head_dim in ((0, 8), (1, 8), (19, 12)):  # two programs sum 19 rows, and 12 is no power of 2
            mine, reference = (parts(module, mode, tokens, head_dim) for module in (fused, unfused))
            check(mine, reference, parts(unfused, None, tokens, head_dim), MODES[mode], tolerance)
        with kernels_on_the_cpu():
            mine, again, reference = (
                layer(mode=mode, fused_norms=is_fused, recompute=recompute)
                for is_fused, recompute in ((True, False), (True, True), (False, False))
            )
        check(mine, reference, layer(mode=None, fused_norms=False), MODES[mode], tolerance)
        # With recompute, torch adds the update, so it casts that gradient, with rounding.
        again["d_update"] = mine["d_update"]
        check_bits(again, mine)


def check_second_derivatives() -> None:
    """Check that those are refused, since the kernels have none."""
    values = torch.randn(3, 8, requires_grad=True)
    _, normed = fused.norm(values, None, torch.nn.LayerNorm(8))
    (gradient,) = torch.autograd.grad(normed.square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


if __name__ == "__main__":
    check_attention()
    check_parts()
    check_second_derivatives()
    check_whole_layers(mode="fp32", device="cpu", heads=1)
