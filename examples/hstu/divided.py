"""Parts of a layer whose heads are divided among ranks that have the same batches; everything else is replicated.

    every rank        LayerNorm(X)                                  a copy of all tokens, at full width
    its own heads     linear -> SiLU -> attention -> norm -> gate   `uvqk` by columns, `output_norm` by columns
    its own heads     linear                                        `output` by rows; the sum over ranks is X's update

Each rank has the parameters of its heads as ordinary ones, and exchanges three sums of the tokens with its peers: of
what the second linear returns, [tokens, hidden]; in the backward pass, of the gradient of what the first one takes, as
large; and what the norm needs to know of whole rows, two numbers of each in either pass.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which each rank computes some outputs, from the inputs that all have.

    Args:
        whole: the layer, the same on all ranks.
        group: the ranks, of which each takes an equal part.
    """

    divided: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__(whole.in_features, whole.out_features // group.size(), device="meta")
        self.group = group
        _take_part(self, whole)

    def forward(self, values: Tensor) -> Tensor:
        """Return this rank's outputs: [..., out_features / ranks]."""
        return linear(_all_reduce(values, self.group, forward=False, backward=True), self.weight, self.bias)


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank has some inputs; all get the same outputs. See `ColumnParallelLinear`."""

    divided: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__(whole.in_features // group.size(), whole.out_features, device="meta")
        self.group = group
        _take_part(self, whole)

    def forward(self, values: Tensor) -> Tensor:
        """Return the outputs [..., out_features], given this rank's inputs."""
        # Once in the sum, but with a gradient on all ranks.
        bias = self.bias if self.group.rank() == 0 else self.bias - self.bias.detach()
        return _all_reduce(linear(values, self.weight, bias), self.group, forward=True, backward=False)


class ParallelLayerNorm(nn.LayerNorm):
    """A LayerNorm of rows whose columns are on several ranks; its statistics are those of whole rows.

    Args:
        whole: the LayerNorm, the same on all ranks.
        group: the ranks, of which each has an equal part of the columns.
    """

    divided: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, whole: nn.LayerNorm, group: dist.ProcessGroup) -> None:
        super().__init__(whole.weight.shape[0] // group.size(), eps=whole.eps, device="meta")
        self.group = group
        _take_part(self, whole)

    def forward(self, values: Tensor) -> Tensor:
        """Return the normalized values: like `values`, this rank's columns [tokens, width / ranks]."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        centered = wide - self._row_means(wide)
        normed = centered * (self._row_means(centered.square()) + self.eps).rsqrt()
        return (normed * self.weight + self.bias).to(values.dtype)

    def _row_means(self, columns: Tensor) -> Tensor:
        """Return the mean of each row over all ranks: [tokens, 1]."""
        # Each rank goes on with the mean differently, so its gradients add up too.
        return _all_reduce(columns.mean(1, keepdim=True), self.group, forward=True, backward=True) / self.group.size()


def divided_parameters(model: nn.Module) -> dict[str, int]:
    """Return the parameters of which each rank has a part, by name: the dimension along which they are divided."""
    return {
        f"{path}.{name}".lstrip("."): dim
        for path, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | ParallelLayerNorm)
        for name, dim in module.divided.items()
    }


def _take_part(part: ColumnParallelLinear | RowParallelLinear | ParallelLayerNorm, whole: nn.Module) -> None:
    """Set the parameters of a module to this rank's part of those of the whole."""
    rank, size = part.group.rank(), part.group.size()
    for name, parameter in whole.named_parameters():
        values = parameter.detach()
        if (dim := part.divided.get(name)) is not None:
            values = values.chunk(size, dim)[rank]
        setattr(part, name, nn.Parameter(values.clone(memory_format=torch.contiguous_format)))


def _all_reduce(values: Tensor, group: dist.ProcessGroup, *, forward: bool, backward: bool) -> Tensor:
    """Return the sum of values over the ranks, or the values; and so with the gradient in the backward pass."""
    result: Tensor = _AllReduce.apply(values, group, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, forward: bool, backward: bool) -> Tensor:
        ctx.group = group if backward else None
        return _sum(values, group) if forward else values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient if ctx.group is None else _sum(gradient, ctx.group), None, None, None


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
