"""Ranges of bytes, copied from tensors to tensors: on the CPU by one compiled loop."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.datasets.compiled import compiled


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Ranges of one tensor that go to ranges of another; sizes are int64 [n], in bytes, as starts are."""

    source: Tensor  # uint8 [bytes]
    target: Tensor  # uint8 [bytes], another memory
    source_starts: NDArray[np.int64]
    target_starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


def copy_on_cpu(moves: Sequence[Moves]) -> None:
    """Carry out moves between tensors on the CPU."""
    for one in moves:
        copy_ranges(one.source.numpy(), one.target.numpy(), one.source_starts, one.target_starts, one.sizes)


@compiled
def copy_ranges(
    source: NDArray[np.uint8],
    target: NDArray[np.uint8],
    source_starts: NDArray[np.int64],
    target_starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> None:
    """Copy source[source_starts[i] : + sizes[i]] to target[target_starts[i] : + sizes[i]] for all i.

    Args:
        source, target: uint8, not overlapping.
        source_starts, target_starts, sizes: int64 [n], in bytes.

    """
    for i in range(len(sizes)):
        start, to = source_starts[i], target_starts[i]
        for offset in range(sizes[i]):
            target[to + offset] = source[start + offset]


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype and shape as uint8 [bytes]."""
    if tensor.numel() == 0:  # empty tensors may have strides that cannot be viewed
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)
