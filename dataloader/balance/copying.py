"""The one loop that moves bytes on the CPU: ranges of one buffer to ranges of another."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.datasets.compiled import compiled


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


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """View a contiguous CPU tensor of any dtype and shape as uint8 [bytes]."""
    if tensor.numel() == 0:  # empty tensors may have strides that cannot be viewed
        return np.empty(0, dtype=np.uint8)
    view: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return view
