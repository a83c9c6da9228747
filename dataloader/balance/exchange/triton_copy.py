"""Ranges of bytes, copied on a GPU: by one Triton kernel for all, or by PyTorch's operators where Triton is missing."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenrank.dataloader.balance.exchange.byte_copy import Copies

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of PyTorch for the CPU come without
    triton = None

HAS_TRITON = triton is not None
_TILE = 8192  # bytes that one program copies
_DESCRIPTION = 4 * 8  # bytes that describe a tile
_WARPS = 4


def tiles_of(copies: Copies) -> NDArray[np.int64]:
    """Cut ranges into tiles: int64 [n, 4] of which memory, start there, start in the target, and bytes."""
    counts = -(-copies.sizes // _TILE)
    which = np.repeat(np.arange(len(counts)), counts)
    begins = _TILE * (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts))
    tiles = np.empty((len(which), 4), dtype=np.int64)
    tiles[:, 0] = copies.which[which]
    tiles[:, 1] = copies.starts[which] + begins
    tiles[:, 2] = copies.targets[which] + begins
    tiles[:, 3] = np.minimum(copies.sizes[which] - begins, _TILE)
    return tiles


def copy_by_kernel(tiles: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy tiles in one launch.

    Args:
        tiles: as `tiles_of` gives them, as bytes: uint8 [32 n], on the GPU, aligned to 8 bytes.
        sources: one or two memories: uint8, on the GPU.
        target: uint8, on the GPU.

    """
    if count := tiles.numel() // _DESCRIPTION:
        memories = (tiles, sources[0], sources[-1], target)
        _compiled(target.device.index)[(count, 1, 1)](*[memory.data_ptr() for memory in memories])


def copy_by_operators(copies: Copies, sources: Sequence[Tensor], target: Tensor) -> None:
    """Carry copies out with a gather for each source; on any device."""
    device = target.device
    for number, source in enumerate(sources):
        chosen = copies.which == number
        sizes = copies.sizes[chosen]
        total = int(sizes.sum())
        before = np.cumsum(sizes) - sizes
        shifts = np.stack([copies.starts[chosen] - before, copies.targets[chosen] - before])
        # The size of the result is known here, so that it is not read back from the device.
        repeated = torch.repeat_interleave(
            torch.from_numpy(shifts).to(device), torch.from_numpy(sizes).to(device), dim=1, output_size=total
        )
        places = repeated + torch.arange(total, device=device)
        target.index_copy_(0, places[1], source.index_select(0, places[0]))


if triton is not None:
    _WORDS = tl.constexpr(_TILE // 8)

    @functools.cache
    def _compiled(device: int) -> Any:
        """Compile for a CUDA device.

        To launch the result, given addresses, takes half of the time that Triton needs to look it up for tensors.
        """
        with torch.cuda.device(device):
            address = 1 << 40  # what an address looks like: it does not fit into 32 bits
            return _copy_tiles.warmup(address, address, address, address, grid=(1,), num_warps=_WARPS)

    @triton.jit
    def _copy_words(source, target, count, dtype: tl.constexpr):
        source = source.to(tl.pointer_type(dtype))
        target = target.to(tl.pointer_type(dtype))
        for begin in range(0, count, _WORDS):
            offsets = begin + tl.arange(0, _WORDS)
            inside = offsets < count
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)

    @triton.jit(do_not_specialize=["tiles", "first", "second", "target"])
    def _copy_tiles(tiles, first, second, target):
        """Copy one tile, in the widest words that its addresses and its size are multiples of."""
        tile = tiles.to(tl.pointer_type(tl.int64)) + 4 * tl.program_id(0)
        source = tl.load(tile + 1) + tl.where(tl.load(tile) == 0, first, second)
        target = tl.load(tile + 2) + target
        size = tl.load(tile + 3)
        together = source | target | size
        if together % 16 == 0:
            # What is known of the numbers is told, so that two words are read and written at once.
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            _copy_words(source, target, tl.multiple_of(size // 8, 2), tl.int64)
        elif together % 8 == 0:
            _copy_words(source, target, size // 8, tl.int64)
        elif together % 4 == 0:
            _copy_words(source, target, size // 4, tl.int32)
        else:
            _copy_words(source, target, size, tl.uint8)
