"""How far fused kernels are from float64, beside torch's operations; used on GPUs and in Triton's interpreter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hstu import unfused
from hstu.attention import Sequences, padded_attention
from hstu.config import Attention
from hstu.layer import HSTUAttention, HSTULayer, Pointwise
from tests.examples.hstu.samples import CONFIG, make_sequences

MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.bfloat16}  # what matrix products take
TOLERANCE = 3  # errors of torch's operations in the same dtype; sums in another order have up to twice as large ones
Results = dict[str, Tensor]


def check(mine: Results, reference: Results, exact: Results, dtype: torch.dtype, tolerance: int = TOLERANCE) -> None:
    """Check that no result is much further from the exact one, in float64, than that of torch's operations."""
    assert mine.keys() == reference.keys() == exact.keys()
    for name, best in exact.items():
        limit = tolerance * _error(reference[name], best) + torch.finfo(dtype).eps / 2 * best.norm().item()
        assert _error(mine[name], best) <= limit, f"{name}: {_error(mine[name], best):.3e} > {limit:.3e}"


def check_bits(mine: Results, reference: Results) -> None:
    """Check that all results are equal, bit for bit."""
    different = [name for name in reference if not torch.equal(mine[name], reference[name])]
    assert not different, f"{different} differ"


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm())


def _dtypes(mode: str | None) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of parameters and the residual stream, and that of products."""
    if mode is None:
        return torch.float64, torch.float64
    return torch.bfloat16 if mode == "bf16" else torch.float32, MODES[mode]


def _gradients(leaves: dict[str, Tensor]) -> Results:
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype
        gradients[f"d_{name}"] = leaf.grad
    return gradients


def parts(module: Pointwise, mode: str | None, tokens: int, head_dim: int, *, device: str = "cpu") -> Results:
    """Run each of the functions of a module on inputs of its own, some of them views with gaps.

    With mode None in float64, on the values that all modes have in common.
    """
    generator = torch.Generator(device).manual_seed(0)
    wide, narrow = _dtypes(mode)
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


def layer(
    apply: Callable[..., Any] | None = None,
    *,
    mode: str | None,
    device: str = "cpu",
    lengths: Sequence[int] = (4, 0, 34),
    **options: Any,
) -> Results:
    """Run a layer of a config with these options, by itself or by `apply`; return its results and all gradients."""
    torch.manual_seed(0)
    module = HSTULayer(replace(CONFIG, hidden=48, **{"heads": 2, "attention": "padded", **options}))
    draws = torch.randn(sum(lengths), 4, 48).bfloat16().float().unbind(1)  # with gaps between rows
    wide, narrow = _dtypes(mode)
    for parameter in module.parameters():
        parameter.data = parameter.bfloat16().float()
    module.to(device, wide)
    tokens, update, d_tokens, d_update = (
        draw.to(device, dtype) for draw, dtype in zip(draws, (wide, narrow, wide, narrow), strict=True)
    )
    contextual, candidates = (
        [min(pair) for pair in zip(counts, lengths, strict=True)] for counts in ([2, 0, 1], [2, 0, 20])
    )
    sequences = make_sequences(lengths, contextual, candidates, device=device)
    tokens.requires_grad_(), update.requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
        results = module(tokens, update, sequences) if apply is None else apply(module, tokens, update, sequences)
    torch.autograd.backward(results, [d_tokens, d_update])
    leaves = {"tokens": tokens, "update": update, **dict(module.named_parameters())}
    return {"next_tokens": results[0].detach(), "next_update": results[1].detach()} | _gradients(leaves)


def check_whole_layers(*, mode: str, device: str, heads: int) -> None:
    """Check that layers as one function have the bits of fused parts, and are as exact as torch's operations."""
    from hstu import fused  # there may be no Triton
    from hstu.triton_attention import triton_attention

    def run(apply: Callable[..., Any], mode: str | None = mode, **options: Any) -> Results:
        return layer(apply, mode=mode, device=device, **{"heads": heads, "head_dim": 64, **options})

    by_torch, by_kernels = by_parts(unfused, padded_attention), by_parts(fused, triton_attention)
    expected = run(by_kernels)
    whole = run(as_a_whole, attention="triton")
    check(whole, run(by_torch), run(by_torch, mode=None), MODES[mode], tolerance=5)
    check_bits(whole, expected)
    check_bits(run(as_a_whole, attention="triton", recompute=True), expected)
    nothing: dict[str, Any] = {"lengths": [0, 0, 0]}
    check_bits(run(as_a_whole, attention="triton", **nothing), run(by_kernels, **nothing))


def as_a_whole(module: HSTULayer, tokens: Tensor, update: Tensor, sequences: Sequences) -> Any:
    """Apply a layer as one function."""
    from hstu.fused import options_for, whole_layer

    options = options_for(module, tokens, update, sequences)
    assert options is not None
    return whole_layer(module, tokens, update, options)


class _Attention(HSTUAttention):
    """An attention on any device."""

    def __init__(self, function: Attention, scale_length: int) -> None:
        super().__init__("padded", scale_length)
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        return self.function(query, key, value, sequences, scale_length=self.scale_length)


def by_parts(pointwise: Pointwise, attention: Attention) -> Callable[..., Any]:
    """Return what applies a layer by parts."""

    def apply(module: HSTULayer, tokens: Tensor, update: Tensor, sequences: Sequences) -> Any:
        module.attention = _Attention(attention, module.attention.scale_length)
        return module.by_parts(pointwise, tokens, update, sequences)

    return apply


@contextmanager
def kernels_on_the_cpu() -> Iterator[None]:
    """Choose fused kernels for layers that ask for them, also on the CPU."""
    from hstu import fused as kernels

    def choose(tokens: Tensor, *, fused: bool) -> Pointwise:
        return kernels if fused else unfused

    with mock.patch("hstu.layer.pointwise_for", choose):
        yield
