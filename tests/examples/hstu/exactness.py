"""How far fused kernels are from float64, beside torch's operations; used on GPUs and in Triton's interpreter."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hstu import unfused
from hstu.attention import Sequences, padded_attention
from hstu.config import Attention
from hstu.divided import divided_parameters
from hstu.layer import HSTUAttention, HSTULayer, Pointwise, tensor_parallel
from tests.examples.hstu.samples import CONFIG, make_sequences

MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.bfloat16}  # what matrix products take
Results = dict[str, Tensor]
OF_LINEARS = [f"d_{module}.{name}" for module in ("uvqk", "output") for name in ("weight", "bias")]


def check(
    mine: Results, reference: Results, exact: Results, dtype: torch.dtype, tolerance: int = 3, roundings: int = 1
) -> None:
    """Check that no result is much further from the exact one, in float64, than that of torch's operations."""
    assert mine.keys() == reference.keys() == exact.keys()
    for name, best in exact.items():
        limit = tolerance * _error(reference[name], best) + roundings * torch.finfo(dtype).eps / 2 * best.norm().item()
        assert _error(mine[name], best) <= limit, f"{name}: {_error(mine[name], best):.3e} > {limit:.3e}"


def check_bits(mine: Results, reference: Results, *, excluded: Collection[str] = ()) -> None:
    different = [name for name in reference if name not in excluded and not torch.equal(mine[name], reference[name])]
    assert not different, f"{different} differ"


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters, and set them to none."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    model.zero_grad()
    return gradients


def joined(model: nn.Module, gradients: Results, group: dist.ProcessGroup | None) -> Results:
    """Return the gradients of a model's parameters, as d_NAME, in one piece where each rank of a group has a part."""
    results = dict(gradients)
    for name, dim in divided_parameters(model).items():
        assert group is not None
        parts = [torch.empty_like(gradients[f"d_{name}"]) for _ in range(group.size())]
        dist.all_gather(parts, gradients[f"d_{name}"].contiguous(), group=group)
        results[f"d_{name}"] = torch.cat(parts, dim)
    return results


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm())


def gradients_by_name(leaves: dict[str, Tensor]) -> Results:
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype
        gradients[f"d_{name}"] = leaf.grad
    return gradients


def attended(
    attention: Attention, inputs: Sequence[Tensor], sequences: Sequences, dtype: torch.dtype, *, scale_length: int
) -> Results:
    """Run attention on query, key and value, with the gradient of the output; return it and all gradients."""
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs[:3]]
    output = attention(leaves[0], leaves[1], leaves[2], sequences, scale_length=scale_length)
    output.backward(inputs[3].to(dtype))
    return {"output": output.detach()} | gradients_by_name(dict(zip(("query", "key", "value"), leaves, strict=True)))


def layer(
    apply: Callable[..., Any] | None = None,
    *,
    mode: str | None,
    device: str = "cpu",
    lengths: Sequence[int] = (4, 0, 34),
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Results:
    """Run a layer of a config with these options, by itself or by `apply`; return its results and all gradients.

    Its heads are divided among the ranks of a mesh, if there is one.
    """
    torch.manual_seed(0)
    module = HSTULayer(replace(CONFIG, hidden=48, **{"heads": 2, "attention": "padded", **options}))
    draws = torch.randn(sum(lengths), 4, 48).bfloat16().float().unbind(1)  # with gaps between rows
    # The dtype of parameters and the residual stream, and that of products.
    wide = torch.float64 if mode is None else torch.bfloat16 if mode == "bf16" else torch.float32
    narrow = torch.float64 if mode is None else MODES[mode]
    for parameter in module.parameters():
        parameter.data = parameter.bfloat16().float()
    module.to(device, wide)
    if mesh is not None:
        tensor_parallel(module, mesh)
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
    gradients = joined(module, gradients_by_name(leaves), None if mesh is None else mesh.get_group())
    return {"next_tokens": results[0].detach(), "next_update": results[1].detach()} | gradients


def check_divided_layers(*, mode: str, mesh: DeviceMesh) -> None:
    """Check that fused layers whose heads are divided are as exact as torch's operations, as a whole and by parts."""
    from hstu import fused  # there may be no Triton
    from hstu.triton_attention import triton_attention

    shape: dict[str, Any] = {"heads": 4, "head_dim": 64, "device": mesh.device_type}
    by_torch, by_kernels = by_parts(unfused, padded_attention), by_parts(fused, triton_attention)
    reference, exact = (layer(by_torch, mode=one, **shape) for one in (mode, None))
    parts = layer(by_kernels, mode=mode, mesh=mesh, **shape)
    whole, again = (
        layer(as_a_whole, mode=mode, mesh=mesh, recompute=recompute, attention="triton", **shape)
        for recompute in (False, True)
    )
    for mine in (parts, whole):
        check(mine, reference, exact, MODES[mode], tolerance=5, roundings=2)  # sums of parts are rounded, too
    check_bits(whole, parts, excluded=OF_LINEARS)
    check_bits(again, whole)
    nothing = layer(as_a_whole, mode=mode, mesh=mesh, lengths=(0, 0, 0), attention="triton", **shape)
    assert not nothing["d_output.weight"].any()


def check_whole_layers(*, mode: str, device: str, heads: int) -> None:
    """Check that layers as one function have the bits of fused parts, and are as exact as torch's operations.

    Parts sum the gradients of the linears in another order, or round them on the way.
    """
    from hstu import fused  # there may be no Triton
    from hstu.triton_attention import triton_attention

    def run(apply: Callable[..., Any], mode: str | None = mode, **options: Any) -> Results:
        return layer(apply, mode=mode, device=device, **{"heads": heads, "head_dim": 64, **options})

    by_torch, by_kernels = by_parts(unfused, padded_attention), by_parts(fused, triton_attention)
    expected = run(by_kernels)
    whole = run(as_a_whole, attention="triton")
    check(whole, run(by_torch), run(by_torch, mode=None), MODES[mode], tolerance=5)
    check_bits(whole, expected, excluded=OF_LINEARS)
    check_bits(run(as_a_whole, attention="triton", recompute=True), whole)
    nothing: dict[str, Any] = {"lengths": [0, 0, 0]}
    check_bits(run(as_a_whole, attention="triton", **nothing), run(by_kernels, **nothing))


def as_a_whole(module: HSTULayer, tokens: Tensor, update: Tensor, sequences: Sequences) -> Any:
    from hstu.fused import options_for, whole_layer

    options = options_for(module, tokens, update, sequences)
    assert options is not None
    return whole_layer(module, tokens, update, options)


class _Attention(HSTUAttention):
    def __init__(self, function: Attention, scale_length: int) -> None:
        super().__init__("padded", scale_length)
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        return self.function(query, key, value, sequences, scale_length=self.scale_length)


def by_parts(pointwise: Pointwise, attention: Attention) -> Callable[..., Any]:
    def apply(module: HSTULayer, tokens: Tensor, update: Tensor, sequences: Sequences) -> Any:
        module.attention = _Attention(attention, module.attention.scale_length)
        return module.by_parts(pointwise, tokens, update, sequences)

    return apply
