"""Ranges of bytes, copied from memories to a memory: on the CPU by one compiled loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.compiled import compiled


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Ranges of some memories that go to ranges of another one; all int64 [n], in bytes."""

    which: NDArray[np.int64]  # the memory that each is of, by its number
    starts: NDArray[np.int64]  # there
    targets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, which: int, starts: NDArray[np.int64], targets: NDArray[np.int64], sizes: NDArray[np.int64]) -> Self:
        """Make copies from one memory, given arrays of one shape; empty ranges are left out."""
        flat = sizes.reshape(-1)
        kept = np.flatnonzero(flat)
        return cls(
            which=np.full(len(kept), which),
            starts=starts.reshape(-1)[kept],
            targets=targets.reshape(-1)[kept],
            sizes=flat[kept],
        )

    @classmethod
    def joined(cls, some: Sequence["Copies"]) -> Self:
        """Put copies one behind the other."""
        return cls(**{name: np.concatenate([getattr(one, name) for one in some]) for name in cls.__slots__})


def copy_on_cpu(copies: Copies, sources: Sequence[Tensor], target: Tensor) -> None:
    """Carry copies out between uint8 tensors on the CPU."""
    for number, source in enumerate(sources):
        chosen = copies.which == number
        copy_ranges(source.numpy(), target.numpy(), copies.starts[chosen], copies.targets[chosen], copies.sizes[chosen])


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
        size = sizes[i]
        # Indices that cannot be negative let the compiler copy many bytes at once.
        chunk = source[source_starts[i] : source_starts[i] + size]
        place = target[target_starts[i] : target_starts[i] + size]
        for offset in range(size):
            place[offset] = chunk[offset]


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype and shape as uint8 [bytes]."""
    if tensor.numel() == 0:  # empty tensors may have strides that cannot be viewed
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)
