"""Layers as a whole beside layers by parts, for GPUs and Triton's interpreter."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hstu import fused, unfused
from hstu.attention import Sequences, padded_attention
from hstu.config import Attention
from hstu.fused import options_for, whole_layer
from hstu.layer import HSTUAttention, HSTULayer, Pointwise
from hstu.triton_attention import triton_attention
from tests.examples.hstu.pointwise_errors import MODES, Results, check
from tests.examples.hstu.samples import CONFIG

LENGTHS = [4, 0, 34]
NO_TOKENS = [0, 0, 0]
ATTENTIONS: dict[str, Attention] = {"triton": triton_attention}


def check_layers(*, mode: str, device: str) -> None:
    """Check that whole layers give the bits of fused parts, and are as exact as torch's operations.

    Args:
        mode: of `MODES`.
        device: `cpu` in Triton's interpreter.

    """
    exact = run(by_parts(unfused, padded_attention), mode=None, device=device)
    reference = run(by_parts(unfused, padded_attention), mode=mode, device=device)
    for name, attention in ATTENTIONS.items():
        parts = run(by_parts(fused, attention), mode=mode, device=device)
        whole = run(as_a_whole, mode=mode, device=device, attention=name)
        check(whole, reference, exact, MODES[mode], tolerance=5)
        _check_bits(whole, parts)
    again = run(as_a_whole, mode=mode, device=device, attention=name, recompute=True)
    _check_bits(again, parts)
    nothing = run(as_a_whole, mode=mode, device=device, attention=name, lengths=NO_TOKENS)
    _check_bits(nothing, run(by_parts(fused, attention), mode=mode, device=device, lengths=NO_TOKENS))


def _check_bits(whole: Results, parts: Results) -> None:
    different = [name for name in parts if not torch.equal(whole[name], parts[name])]
    assert not different, f"{different} differ from those by parts"


def as_a_whole(layer: HSTULayer, tokens: torch.Tensor, update: torch.Tensor, sequences: Sequences) -> Any:
    """Apply a layer as a whole."""
    options = options_for(layer, tokens, update, sequences)
    assert options is not None
    return whole_layer(layer, tokens, update, options)


class _Attention(HSTUAttention):
    """An attention on any device."""

    def __init__(self, function: Attention, scale_length: int) -> None:
        super().__init__("padded", scale_length)
        self.function = function

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        return self.function(query, key, value, sequences, scale_length=self.scale_length)


def by_parts(pointwise: Pointwise, attention: Attention) -> Callable[..., Any]:
    """Return what applies a layer by parts."""

    def apply(layer: HSTULayer, tokens: torch.Tensor, update: torch.Tensor, sequences: Sequences) -> Any:
        layer.attention = _Attention(attention, layer.attention.scale_length)
        return layer.by_parts(pointwise, tokens, update, sequences)

    return apply


def run(
    apply: Callable[..., Any],
    *,
    mode: str | None,
    device: str,
    attention: str = "padded",
    recompute: bool = False,
    lengths: Sequence[int] = LENGTHS,
) -> Results:
    """Return a layer's results and all gradients; mode None: in float64."""
    torch.manual_seed(0)
    shape = replace(
        CONFIG, hidden=48, heads=1 if device == "cpu" else 4, head_dim=64, attention=attention, recompute=recompute
    )
    layer = HSTULayer(shape)
    num_tokens = sum(lengths)
    draws = torch.randn(num_tokens, 4, 48).bfloat16().float().unbind(1)  # with gaps between rows
    wide = torch.float64 if mode is None else torch.bfloat16 if mode == "bf16" else torch.float32
    narrow = torch.float64 if mode is None else MODES[mode]
    for parameter in layer.parameters():
        parameter.data = parameter.bfloat16().float()
    layer.to(device, wide)
    tokens, update, d_tokens, d_update = (
        draw.to(device, dtype) for draw, dtype in zip(draws, (wide, narrow, wide, narrow), strict=True)
    )
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    contextual, candidates = (
        torch.minimum(torch.tensor(counts, device=device), offsets.diff()) for counts in ([2, 0, 1], [2, 0, 20])
    )
    sequences = Sequences(
        offsets=offsets,
        num_contextual=contextual,
        num_candidates=candidates,
        num_tokens=num_tokens,
        max_length=max(lengths),
    )
    tokens.requires_grad_(), update.requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
        results = apply(layer, tokens, update, sequences)
    torch.autograd.backward(results, [d_tokens, d_update])
    leaves = {"tokens": tokens, "update": update, **dict(layer.named_parameters())}
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype
        gradients[f"d_{name}"] = leaf.grad
    return {"next_tokens": results[0].detach(), "next_update": results[1].detach(), **gradients}
