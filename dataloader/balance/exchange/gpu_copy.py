"""Copies of byte ranges on a GPU: one Triton kernel for all of them, or PyTorch operators where Triton is missing."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # CPU builds of PyTorch come without Triton
    triton = None

HAS_TRITON = triton is not None
TILE_BYTES = 8192  # copied by one program
_BYTES_OF_TILE = 4 * 8  # of its description
_NUM_WARPS = 4


def copy_with_kernel(tiles: Tensor, sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy tiles in one kernel launch, given their bytes (`memory.write_tiles`) and one or two sources; on a GPU."""
    if num_tiles := tiles.numel() // _BYTES_OF_TILE:
        buffers = (tiles, sources[0], sources[-1], target)
        _compiled_kernel(target.device.index)[(num_tiles, 1, 1)](*[buffer.data_ptr() for buffer in buffers])


def copy_with_operators(copies: NDArray[np.int64], sources: Sequence[Tensor], target: Tensor) -> None:
    """Run copies with one gather per source buffer; on any device."""
    device = target.device
    for number, source in enumerate(sources):
        _, source_starts, target_starts, num_bytes = copies[copies[:, 0] == number].T
        total = int(num_bytes.sum())
        first_byte = np.cumsum(num_bytes) - num_bytes
        shifts = np.stack([source_starts - first_byte, target_starts - first_byte])
        # Passing the size of the result avoids a synchronization to read it from the device.
        repeated = torch.repeat_interleave(
            torch.from_numpy(shifts).to(device), torch.from_numpy(num_bytes.copy()).to(device), dim=1, output_size=total
        )
        indices = repeated + torch.arange(total, device=device)
        target.index_copy_(0, indices[1], source.index_select(0, indices[0]))


if triton is not None:
    _TILE_WORDS = tl.constexpr(TILE_BYTES // 8)

    @functools.cache
    def _compiled_kernel(device: int) -> Any:
        # Launching the result with addresses takes half the host time that Triton needs to look it up by its tensors.
        with torch.cuda.device(device):
            address = 1 << 40  # any value beyond 32 bits, so that Triton types it as int64
            return _copy_tile.warmup(address, address, address, address, grid=(1,), num_warps=_NUM_WARPS)

    @triton.jit
    def _copy_words(source, target, count, dtype: tl.constexpr):
        source = source.to(tl.pointer_type(dtype))
        target = target.to(tl.pointer_type(dtype))
        for begin in range(0, count, _TILE_WORDS):
            offsets = begin + tl.arange(0, _TILE_WORDS)
            mask = offsets < count
            tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)

    @triton.jit(do_not_specialize=["tiles", "first", "second", "target"])
    def _copy_tile(tiles, first, second, target):
        """Copy one tile, in the widest words to which its addresses and its size are aligned."""
        tile = tiles.to(tl.pointer_type(tl.int64)) + 4 * tl.program_id(0)
        source = tl.load(tile + 1) + tl.where(tl.load(tile) == 0, first, second)
        target = tl.load(tile + 2) + target
        size = tl.load(tile + 3)
        combined = source | target | size
        if combined % 16 == 0:
            # The hints let the compiler load and store two words at a time.
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            _copy_words(source, target, tl.multiple_of(size // 8, 2), tl.int64)
        elif combined % 8 == 0:
            _copy_words(source, target, size // 8, tl.int64)
        elif combined % 4 == 0:
            _copy_words(source, target, size // 4, tl.int32)
        else:
            _copy_words(source, target, size, tl.uint8)
