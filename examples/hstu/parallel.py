"""Tensor parallelism: the heads of every layer are divided among ranks that have the same batches.

    every rank        LayerNorm(X)                                  a copy of all tokens, at full width
    its own heads     linear -> SiLU -> attention -> norm -> gate   `uvqk` by columns, `output_norm` by columns
    its own heads     linear                                        `output` by rows; the sum over ranks is X's update

Everything else is replicated: every rank computes it.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from evenrank.core.errors import ConfigError
from hstu.layer import HSTULayer


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the heads of all HSTU layers of a model among the ranks of a mesh, in place.

    The parameters that are divided become DTensors. All others are set to those of the mesh's first rank; they have the
    same gradients on all its ranks, as long as the batches are the same. For that, let a Balancer work on the other
    dimension of the device mesh: `Balancer(..., group=mesh["dp"])` and `tensor_parallel(model, mesh["tp"])`. Give its
    ranks different seeds after that, so that they do not drop the same units of their heads.

    Collective: every rank of the mesh must call this.

    Args:
        model: with HSTULayers, on the device of the mesh.
        mesh: of one dimension.

    Raises:
        ConfigError: a layer's heads cannot be divided equally.

    """
    layers = [module for module in model.modules() if isinstance(module, HSTULayer)]
    for layer in layers:
        if layer.heads % mesh.size():
            raise ConfigError(f"{layer.heads} heads cannot be divided among {mesh.size()} ranks; use a divisor")
    for layer in layers:
        parallelize_module(layer, mesh, {"uvqk": ColwiseParallel(), "output": RowwiseParallel()})
        assert isinstance(layer.output_norm, nn.LayerNorm)
        layer.output_norm = ShardedLayerNorm(layer.output_norm, mesh)
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.detach(), group=mesh.get_group(), group_src=0)


class ShardedLayerNorm(nn.Module):
    """A LayerNorm of rows whose columns are on several ranks; its statistics are those of whole rows.

    Args:
        norm: with the same parameters, at full width.
        mesh: the ranks among which columns are divided.

    """

    def __init__(self, norm: nn.LayerNorm, mesh: DeviceMesh) -> None:
        super().__init__()
        self.eps = norm.eps
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(norm.bias.detach(), mesh, [Shard(0)]))

    def forward(self, values: Tensor) -> Tensor:
        """Return the normalized values: like `values`, this rank's columns [tokens, width / ranks]."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        centered = wide - self._row_means(wide)
        normed = centered * (self._row_means(centered.square()) + self.eps).rsqrt()
        weight, bias = (cast(DTensor, parameter).to_local() for parameter in (self.weight, self.bias))
        return (normed * weight + bias).to(values.dtype)

    def _row_means(self, columns: Tensor) -> Tensor:
        """Return the mean of each row over all ranks: [tokens, 1]."""
        # Of DTensors, the backward pass would exchange whole rows where it adds the gradients of the mean to theirs.
        sums: Tensor = _SumOverRanks.apply(columns.sum(1, keepdim=True), self.mesh.get_group())  # type: ignore[no-untyped-call]
        return sums / (columns.shape[1] * self.mesh.size())


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group; each rank goes on with it differently, so gradients add up too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
