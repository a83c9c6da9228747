"""How far fused kernels are from float64, beside torch's operations; used on GPUs and in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn

from hstu import unfused
from hstu.attention import Sequences
from hstu.layer import HSTULayer, Pointwise
from tests.examples.hstu.samples import CONFIG

MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.bfloat16}  # what matrix products take
TOLERANCE = 3  # errors of torch's operations in the same dtype; sums in another order have up to twice as large ones
Results = dict[str, Tensor]


def check(mine: Results, reference: Results, exact: Results, dtype: torch.dtype, tolerance: int = TOLERANCE) -> None:
    """Check that no result is much further from the exact one than that of the reference.

    Args:
        mine: results and gradients by name.
        reference: by torch's operations, in the same dtypes.
        exact: in float64.
        dtype: that of the roundings.
        tolerance: how many errors of the reference are allowed, besides one rounding.

    """
    assert mine.keys() == reference.keys() == exact.keys()
    for name, best in exact.items():
        limit = tolerance * _error(reference[name], best) + torch.finfo(dtype).eps / 2 * best.norm().item()
        assert _error(mine[name], best) <= limit, f"{name}: {_error(mine[name], best):.3e} > {limit:.3e}"


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm())


def parts(module: Pointwise, mode: str | None, tokens: int, head_dim: int, *, device: str = "cpu") -> Results:
    """Run each of the functions on inputs of its own, some of them views with gaps.

    Args:
        module: with the functions.
        mode: of `MODES`; None: in float64, on the values that all modes have in common.
        tokens: number of rows.
        head_dim: width of each of 3 heads.
        device: to run on.

    """
    generator = torch.Generator(device).manual_seed(0)
    wide = torch.float64 if mode is None else torch.bfloat16 if mode == "bf16" else torch.float32
    narrow = torch.float64 if mode is None else MODES[mode]
    heads, hidden = 3, 40

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16().to(dtype)

    def leaf(values: Tensor) -> Tensor:
        return values.detach().requires_grad_()

    stream, other_stream = (leaf(draw(tokens, 2 * hidden, dtype=wide)[:, hidden:]) for _ in range(2))
    update = leaf(draw(tokens, hidden, dtype=narrow))
    projected = leaf(draw(tokens, heads * 4 * head_dim, dtype=narrow))
    attended = leaf(draw(tokens, heads, 2, head_dim, dtype=narrow)[:, :, 0] / 8)
    input_norm, output_norm = nn.LayerNorm(hidden), nn.LayerNorm(heads * head_dim, eps=1e-6)
    for norm in (input_norm, output_norm):
        norm.to(device, wide)
        for parameter in norm.parameters():
            parameter.data = draw(len(parameter), dtype=wide)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
        total, normed = module.norm(stream, update, input_norm)
        same_stream, other_normed = module.norm(other_stream, None, input_norm)
        u, v, q, k = module.activate(projected, head_dim)
        gated = module.gate(attended, u, output_norm)
    if module is not unfused:
        assert normed.dtype == gated.dtype == narrow
        assert total.dtype == same_stream.dtype == wide
        assert torch.equal(same_stream, other_stream)
    # The products cast what torch's LayerNorm returns under autocast.
    results = {"same_stream": same_stream, "total": total, "v": v, "q": q, "k": k}
    results |= {"normed": normed.to(narrow), "other_normed": other_normed.to(narrow), "gated": gated.to(narrow)}
    gradients = [draw(2, *result.shape, dtype=result.dtype)[1] for result in results.values()]
    gradients[0] = gradients[0][:, :1].expand_as(same_stream)
    torch.autograd.backward(list(results.values()), gradients)
    leaves = {"stream": stream, "other_stream": other_stream, "update": update}
    leaves |= {"projected": projected, "attended": attended}
    for name, norm in (("input", input_norm), ("output", output_norm)):
        leaves |= {f"{name}_weight": norm.weight, f"{name}_bias": norm.bias}
    return {name: result.detach() for name, result in results.items()} | _gradients(leaves)


def layer(*, mode: str | None, fused: bool, recompute: bool = False, head_dim: int = 8, device: str = "cpu") -> Results:
    """Run a layer, and return its results and all gradients.

    Args:
        mode: of `MODES`; None: in float64.
        fused: whether by fused kernels, also on the CPU.
        recompute: as in the config.
        head_dim: width of a head.
        device: to run on.

    """
    torch.manual_seed(0)
    shape = replace(CONFIG, hidden=32, heads=2, head_dim=head_dim)
    module = HSTULayer(replace(shape, attention="padded", recompute=recompute, fused_norms=fused))
    tokens, update, d_tokens, d_update = torch.randn(4, 20, 32).bfloat16().float().unbind()
    wide = torch.float64 if mode is None else torch.bfloat16 if mode == "bf16" else torch.float32
    for parameter in module.parameters():
        parameter.data = parameter.bfloat16().float()
    module.to(device, wide)
    counts = torch.tensor([2, 0, 0], device=device)
    sequences = Sequences(
        offsets=torch.tensor([0, 12, 12, 20], device=device),
        num_contextual=counts,
        num_candidates=counts,
        num_tokens=20,
        max_length=12,
    )
    narrow = torch.float64 if mode is None else MODES[mode]
    tokens = tokens.to(device, wide).requires_grad_()
    update = update.to(device, narrow).requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
        results = module(tokens, update, sequences)
    torch.autograd.backward(results, [d_tokens.to(device, wide), d_update.to(device, narrow)])
    leaves = {"tokens": tokens, "update": update, **dict(module.named_parameters())}
    names = ("next_tokens", "next_update")
    return {name: result.detach() for name, result in zip(names, results, strict=True)} | _gradients(leaves)


@contextmanager
def kernels_on_the_cpu() -> Iterator[None]:
    """Choose fused kernels for layers that ask for them, also on the CPU."""
    from hstu import fused as kernels

    def choose(tokens: Tensor, *, fused: bool) -> Pointwise:
        return kernels if fused else unfused

    with mock.patch("hstu.layer.pointwise_for", choose):
        yield


def _gradients(leaves: dict[str, Tensor]) -> Results:
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype
        gradients[f"d_{name}"] = leaf.grad
    return gradients
