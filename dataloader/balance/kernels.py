"""Ranges of bytes, copied on a GPU: by one Triton kernel for all, or by PyTorch's operators where Triton is missing."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.dataloader.balance.copying import Moves

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of PyTorch for the CPU come without
    triton = None

_TILE = 8192  # bytes that one program copies
_WARPS = 4


def copy_on_gpu(moves: Sequence[Moves]) -> None:
    """Carry out moves between tensors on one GPU, on the current stream."""
    if triton is None:
        copy_by_operators(moves)
    else:
        copy_by_kernel(moves)


def copy_by_kernel(moves: Sequence[Moves]) -> None:
    """Carry out moves in one launch: ranges are cut into tiles, and their addresses go to the GPU in one copy."""
    tiles = np.concatenate([_tiles(one) for one in moves])
    if len(tiles) == 0:
        return
    device = moves[0].target.device
    there = torch.from_numpy(tiles).pin_memory().to(device, non_blocking=True)
    _copy_tiles[(len(tiles),)](there, WORDS=_TILE // 8, num_warps=_WARPS)


def _tiles(one: Moves) -> NDArray[np.int64]:
    """Cut ranges into tiles: int64 [n, 3] of source address, target address, and bytes."""
    counts = -(-one.sizes // _TILE)
    which = np.repeat(np.arange(len(counts)), counts)
    begins = _TILE * (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts))
    return np.stack(
        [
            one.source.data_ptr() + one.source_starts[which] + begins,
            one.target.data_ptr() + one.target_starts[which] + begins,
            np.minimum(one.sizes[which] - begins, _TILE),
        ],
        axis=1,
    )


def copy_by_operators(moves: Sequence[Moves]) -> None:
    """Carry out moves with one gather for each; on any device."""
    for one in moves:
        total = int(one.sizes.sum())
        if total == 0:
            continue
        device = one.target.device
        before = np.cumsum(one.sizes) - one.sizes
        shifts = torch.from_numpy(np.stack([one.source_starts - before, one.target_starts - before])).to(device)
        sizes = torch.from_numpy(one.sizes).to(device)
        # The size of the result is known here, so that it is not read back from the device.
        places = torch.repeat_interleave(shifts, sizes, dim=1, output_size=total) + torch.arange(total, device=device)
        one.target.index_copy_(0, places[1], one.source.index_select(0, places[0]))


if triton is not None:

    @triton.jit
    def _copy_words(source, target, count, dtype: tl.constexpr, WORDS: tl.constexpr):  # noqa: N803
        source = source.to(tl.pointer_type(dtype))
        target = target.to(tl.pointer_type(dtype))
        for begin in range(0, count, WORDS):
            offsets = begin + tl.arange(0, WORDS)
            inside = offsets < count
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)

    @triton.jit
    def _copy_tiles(tiles, WORDS: tl.constexpr):  # noqa: N803
        """Copy one tile, in the widest words that its addresses and its size are multiples of."""
        tile = tiles + 3 * tl.program_id(0)
        source, target, size = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        together = source | target | size
        if together % 16 == 0:
            # What is known of the numbers is told, so that two words are read and written at once.
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            _copy_words(source, target, tl.multiple_of(size // 8, 2), tl.int64, WORDS)
        elif together % 8 == 0:
            _copy_words(source, target, size // 8, tl.int64, WORDS)
        elif together % 4 == 0:
            _copy_words(source, target, size // 4, tl.int32, WORDS)
        else:
            _copy_words(source, target, size, tl.uint8, WORDS)
