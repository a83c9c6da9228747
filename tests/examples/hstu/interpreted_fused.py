"""Runs fused norms, SiLU and gate in Triton's interpreter, on the CPU, beside torch's operations."""

import pytest
import torch

from hstu import fused, unfused
from tests.examples.hstu.pointwise_errors import MODES, check, kernels_on_the_cpu, layer, parts


def main() -> None:
    """Compare the parts and whole layers; an AssertionError says what is too far from float64."""
    for mode, tolerance in (("fp32", 2), ("autocast", 4)):  # the interpreter truncates to bfloat16, where GPUs round
        dtype = MODES[mode]
        for tokens, head_dim in ((0, 8), (1, 8), (19, 12)):  # two programs sum 19 rows, and 12 is no power of 2
            mine, reference = (parts(module, mode, tokens, head_dim) for module in (fused, unfused))
            check(mine, reference, parts(unfused, None, tokens, head_dim), dtype, tolerance)
        with kernels_on_the_cpu():
            mine, again, reference = (
                layer(mode=mode, fused=is_fused, recompute=recompute)
                for is_fused, recompute in ((True, False), (True, True), (False, False))
            )
        check(mine, reference, layer(mode=None, fused=False), dtype, tolerance)
        # With recompute, torch adds the update, so it casts that gradient, with rounding.
        assert all(torch.equal(again[name], mine[name]) for name in mine.keys() - {"d_update"})
    _check_second_derivatives()


def _check_second_derivatives() -> None:
    """Check that those are refused, since the kernels have none."""
    values = torch.randn(3, 8, requires_grad=True)
    _, normed = fused.norm(values, None, torch.nn.LayerNorm(8))
    (gradient,) = torch.autograd.grad(normed.square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


if __name__ == "__main__":
    main()
