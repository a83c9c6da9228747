"""Fused kernels beside torch's operations and float64: on GPUs, and as a program in Triton's interpreter on the CPU."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu import Attention, HSTULayer, Sequences, padded_attention
from tests.examples.hstu.samples import CONFIG, make_sequences

MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.bfloat16}  # what matrix products take
Results = dict[str, Tensor]
LAUNCHES = ("FORWARD", "BACKWARD_QUERY", "BACKWARD_KEY_VALUE", "BACKWARD_KEY", "BACKWARD_VALUE")
SAMPLES = (
    ([0, 5, 70, 33], [0, 1, 3, 0], [0, 2, 10, 1]),
    ([65, 64, 100], [64, 0, 70], [1, 64, 30]),
    ([0, 0], [0, 0], [0, 0]),
)  # lengths, contextual tokens, candidates


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


def attended(attention: Attention, inputs: Sequence[Tensor], sequences: Sequences, dtype: torch.dtype) -> Results:
    """Run attention on query, key and value, with the gradient of the output; return it and all gradients."""
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs[:3]]
    query, key, value = leaves
    output = attention(query, key, value, sequences, scale_length=1000)
    output.backward(inputs[3].to(dtype))
    return {"output": output.detach(), **{f"d_{index}": _gradient(leaf) for index, leaf in enumerate(leaves)}}


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def layer(
    apply: Callable[..., Any], *, mode: str | None, lengths: Sequence[int] = (4, 0, 34), **options: Any
) -> Results:
    """Apply a layer of a config with these options; return its results and all gradients. `mode` None: in float64."""
    torch.manual_seed(0)
    device = options.pop("device", "cpu")
    config = dataclasses.replace(CONFIG, hidden=48, **{"heads": 2, "head_dim": 64, "attention": "triton", **options})
    module = HSTULayer(config)
    draws = torch.randn(sum(lengths), 4, 48).bfloat16().float().unbind(1)  # with gaps between rows
    # The dtype of parameters and the residual stream, and that of products.
    wide = torch.float64 if mode is None else torch.bfloat16 if mode == "bf16" else torch.float32
    narrow = torch.float64 if mode is None else MODES[mode]
    for parameter in module.parameters():
        parameter.data = parameter.bfloat16().float()
    module.to(device, wide)
    tokens, update, d_tokens, d_update = (
        draw.to(device, dtype) for draw, dtype in zip(draws, (wide, narrow, wide, narrow), strict=True)
    )
    contextual, candidates = (list(map(min, counts, lengths)) for counts in ([2, 0, 1], [2, 0, 20]))
    sequences = make_sequences(lengths, contextual, candidates, device=device)
    tokens.requires_grad_(), update.requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
        results = apply(module, tokens, update, sequences)
    torch.autograd.backward(results, [d_tokens, d_update])
    leaves = {"tokens": tokens, "update": update, **dict(module.named_parameters())}
    gradients = {f"d_{name}": _gradient(leaf) for name, leaf in leaves.items()}
    return {"next_tokens": results[0].detach(), "next_update": results[1].detach(), **gradients}


def by_parts(module: HSTULayer, tokens: Tensor, update: Tensor, sequences: Sequences) -> Any:
    module.attention.name = "padded"
    return module.by_parts(tokens, update, sequences)


def check_layers(mode: str, tolerance: int, **options: Any) -> None:
    """Check that fused layers are as exact as torch's operations, with recompute to the same bits."""
    from hstu.fused import fused_layer

    mine, again = (layer(fused_layer, mode=mode, recompute=recompute, **options) for recompute in (False, True))
    reference, exact = (layer(by_parts, mode=one, **options) for one in (mode, None))
    check(mine, reference, exact, MODES[mode], tolerance, 1)
    check_bits(again, mine)


def check_interpreted_attention(*, head_dim: int, tma: bool) -> None:
    """Check attention in float32, with blocks loaded by TMA or not, whatever is fastest."""
    from hstu import fused

    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHES:
            launches = getattr(fused, name)
            changed = {key: dataclasses.replace(launch, tma=tma) for key, launch in launches.items()}
            patch.setattr(fused, name, changed)
        for lengths, contextual, candidates in SAMPLES:
            sequences = make_sequences(lengths, contextual, candidates)
            generator = torch.Generator().manual_seed(0)
            inputs = list(torch.randn(sum(lengths), 1, 4, head_dim, generator=generator).unbind(2))
            mine, expected = (
                attended(attention, inputs, sequences, torch.float32)
                for attention in (fused.triton_attention, padded_attention)
            )
            for name, best in expected.items():
                assert (mine[name] - best).norm() <= 1e-6 * best.norm().clamp_min(1e-9), name


if __name__ == "__main__":
    check_interpreted_attention(head_dim=64, tma=True)  # computes the gradients of keys and values together
    check_interpreted_attention(head_dim=256, tma=False)
    for lengths in ((4, 0, 34), (0, 0, 0), (1, 0, 0)):
        check_layers("fp32", 5, lengths=lengths)
