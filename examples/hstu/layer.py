"""`HSTULayer`: one layer of the encoder (Zhai et al., 2024, equations 1 to 3).

U, V, Q, K = SiLU(linear(LayerNorm(X)))
X + linear(dropout(LayerNorm(attention(Q, K, V)) * U))

To save memory, the backward pass can compute activations again, by the same operations, to the same bits:

    LayerNorm -> linear     `torch.utils.checkpoint`, which keeps the output of the linear alone
    SiLU -> attention       `recompute_saved`: whatever implements attention keeps views of the SiLU's output, and
                            must not run twice, so only what it keeps is replaced

`tensor_parallel` divides the heads among ranks that have the same batches; see `divided`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from evenrank.core.errors import ConfigError
from evenrank.training import Flops, ModelFlops, hstu_work
from hstu import unfused
from hstu.attention import Sequences
from hstu.config import ATTENTIONS, HSTUConfig
from hstu.divided import ColumnParallelLinear, ParallelLayerNorm, RowParallelLinear


class Pointwise(Protocol):
    """The functions that the modules `unfused` and `fused` have in common; `unfused` says what they do."""

    def norm(self, tokens: Tensor, update: Tensor | None, module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Return the residual stream after an update, and LayerNorm of it."""
        ...

    def activate(self, projected: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return U, V, Q and K."""
        ...

    def gate(self, attended: Tensor, u: Tensor, module: nn.LayerNorm) -> Tensor:
        """Return LayerNorm(attended), gated by U."""
        ...


def pointwise_for(tokens: Tensor, *, fused: bool) -> Pointwise:
    """Return the module `fused` if it is asked for and has kernels for these tokens, else `unfused`."""
    if not (fused and tokens.is_cuda and tokens.dtype in (torch.bfloat16, torch.float16, torch.float32)):
        return unfused
    from hstu import fused as kernels  # Triton comes with PyTorch for CUDA alone

    return kernels


Output = TypeVar("Output")


_LINEAR = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def keep_linear_alone(function: Callable[[Tensor], Output], values: Tensor) -> Output:
    """Return function(values), keeping for the backward pass only its argument and what its linear layers return."""
    contexts = partial(create_selective_checkpoint_contexts, _LINEAR)
    result: Output = checkpoint(function, values, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return result


def recompute_saved(output: Tensor, function: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Within it, what is kept of `output` or of its views for the backward pass is computed again there.

    Args:
        output: what `function` has returned; may itself be a view.
        function: computes it from values that are kept in any case.
    """
    storage = output.untyped_storage().data_ptr()

    @cache  # all views share one tensor, which lives until the backward pass has used the last of them
    def again() -> Tensor:
        with torch.no_grad():
            return function()

    def pack(saved: Tensor) -> "Tensor | _View":
        if not saved.numel() or saved.untyped_storage().data_ptr() != storage:  # all empty tensors have the same one
            return saved
        return _View(saved.size(), saved.stride(), saved.storage_offset(), again)

    def unpack(packed: "Tensor | _View") -> Tensor:
        return packed.make() if isinstance(packed, _View) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a tensor that is computed when it is needed."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    compute: Callable[[], Tensor]

    def make(self) -> Tensor:
        return self.compute().as_strided(self.size, self.stride, self.offset)


NORM_EPS = 1e-6  # attention divides by max_length, so short samples give LayerNorm small values


class HSTUAttention(nn.Module):
    """The attention of a layer; a module, so that hooks can find it.

    Args:
        name: of the implementation in `ATTENTIONS`.
        scale_length: what attention weights are divided by.
    """

    def __init__(self, name: str, scale_length: int) -> None:
        super().__init__()
        self.name = name
        self.scale_length = scale_length

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return what each token receives: [tokens, heads, head_dim], as all three arguments are."""
        return ATTENTIONS[self.name](query, key, value, sequences, scale_length=self.scale_length)


_PARTS = [nn.LayerNorm, nn.Linear, HSTUAttention, nn.LayerNorm, nn.Dropout, nn.Linear]
_DIVIDED_PARTS = [
    nn.LayerNorm, ColumnParallelLinear, HSTUAttention, ParallelLayerNorm, nn.Dropout, RowParallelLinear
]  # fmt: skip


class HSTULayer(nn.Module):
    """One layer. The outputs of its first linear are ordered by head, so that a shard of them has whole heads."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.head_dim
        self.fused_norms = config.fused_norms
        self.recompute = config.recompute
        width = config.heads * config.head_dim
        self.input_norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.uvqk = nn.Linear(config.hidden, 4 * width)  # [heads, (U, V, Q, K), head_dim]
        self.attention = HSTUAttention(config.attention, config.max_length)
        self.output_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(width, config.hidden)

    def forward(self, tokens: Tensor, update: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Apply the layer to the residual stream, which is `tokens` + `update`.

        The sum is computed together with the norm that follows it, so the layer does not return it but its parts.

        Args:
            tokens: [tokens, hidden].
            update: like `tokens`.
            sequences: where the samples are.

        Returns:
            The next `tokens` and `update`.
        """
        pointwise = pointwise_for(tokens, fused=self.fused_norms)
        if pointwise is not unfused and self.is_plain():
            from hstu.fused import options_for, whole_layer  # Triton comes with PyTorch for CUDA alone

            if (options := options_for(self, tokens, update, sequences)) is not None:
                return whole_layer(self, tokens, update, options)
        return self.by_parts(pointwise, tokens, update, sequences)

    def is_plain(self) -> bool:
        """Return whether the layer is what `whole_layer` computes: no dropout, no part replaced, no hooks on any."""
        parts = list(self.children())
        return (
            not (self.training and self.dropout.p)
            and [type(part) for part in parts] in (_PARTS, _DIVIDED_PARTS)
            and not any(_has_hooks(part) for part in parts)  # with them, someone watches it
        )

    def by_parts(
        self, pointwise: Pointwise, tokens: Tensor, update: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Apply the layer module by module; see `forward`."""
        project = partial(self._project, pointwise)
        if self.recompute:  # keeps the argument: the sum, not its parts
            tokens, projected = keep_linear_alone(project, tokens + update)
        else:
            tokens, projected = project(tokens, update)
        activate = partial(pointwise.activate, projected, self.head_dim)
        u, v, q, k = activate()
        with recompute_saved(k, lambda: activate()[-1]) if self.recompute else nullcontext():
            attended = self.attention(q, k, v, sequences)
            gated = pointwise.gate(attended, u, self.output_norm)
        return tokens, self.output(self.dropout(gated))

    def _project(self, pointwise: Pointwise, tokens: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and what the first linear returns."""
        stream, normed = pointwise.norm(tokens, update, self.input_norm)
        return stream, self.uvqk(normed)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def attention_flops(layer: nn.Module, arguments: Mapping[str, Any]) -> Flops:
    """Return the FLOPs of a call of an HSTUAttention, as kernels are quoted: the backward has 2.5 times the forward's.

    Args:
        layer: the HSTUAttention.
        arguments: of its `forward`, by name.
    """
    sequences = arguments["sequences"]
    history = sequences.lengths - sequences.num_candidates
    work = hstu_work(history, sequences.num_contextual, sequences.num_candidates, predictions=0)
    heads, head_dim = arguments["query"].shape[1:]
    return ModelFlops(per_token=0, per_pair=4 * heads * head_dim).of(work).with_recomputed_scores()


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the heads of all HSTU layers of a model among the ranks of a mesh, in place.

    All parameters are set to those of the mesh's first rank, then each rank keeps those of its own heads; see
    `divided_parameters`. The others have the same gradients on all its ranks, as long as the batches are the same. For
    that, balance samples along the other dimension of the device mesh: `build_loader(..., balance=...,
    group=mesh["dp"])` and `tensor_parallel(model, mesh["tp"])`. Give its ranks different seeds after that, so that they
    do not drop the same units of their heads.

    Collective: every rank of the mesh must call this.

    Args:
        model: with HSTULayers, on the device of the mesh.
        mesh: of one dimension.

    Raises:
        ConfigError: a layer's heads cannot be divided equally.
    """
    group = mesh.get_group()
    layers = [module for module in model.modules() if isinstance(module, HSTULayer)]
    for layer in layers:
        if layer.heads % group.size():
            raise ConfigError(f"{layer.heads} heads cannot be divided among {group.size()} ranks; use a divisor")
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)
    for layer in layers:
        layer.uvqk = ColumnParallelLinear(layer.uvqk, group)
        layer.output_norm = ParallelLayerNorm(layer.output_norm, group)
        layer.output = RowParallelLinear(layer.output, group)
