"""Copies of byte ranges between buffers given by their addresses, in compiled loops, and as tiles for a GPU's kernel.

Copies are int64 [n, 4]: the number of the source buffer, where the range begins in it, where it goes in the target, and
its bytes. The buffers of a batch have any number and dtypes, so compiled code gets their addresses.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled

if TYPE_CHECKING:
    from torch import Tensor


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes from an address to another one, in compiled code; the ranges do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, of = (builder.inttoptr(argument, pointer) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def addresses_of(tensors: "Sequence[Tensor]") -> NDArray[np.int64]:
    """Return the addresses of the first elements of tensors, which must be kept meanwhile: int64 [n]."""
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


@compiled
def copy_ranges(copies: NDArray[np.int64], sources: NDArray[np.int64], target: int) -> None:
    """Run copies, given the addresses of their source buffers and of their target."""
    for i in range(len(copies)):
        copy_bytes(target + copies[i, 2], sources[copies[i, 0]] + copies[i, 1], copies[i, 3])


@compiled
def count_tiles(copies: NDArray[np.int64], tile_bytes: int) -> int:
    """Return how many tiles of at most `tile_bytes` copies consist of."""
    count = 0
    for i in range(len(copies)):
        count += -(-copies[i, 3] // tile_bytes)
    return count


@compiled
def write_tiles(copies: NDArray[np.int64], tile_bytes: int, tiles: NDArray[np.int64]) -> None:
    """Split copies into tiles, int64 [num_tiles, 4], which are copies themselves."""
    tile = 0
    for i in range(len(copies)):
        for start in range(0, copies[i, 3], tile_bytes):
            tiles[tile, 0] = copies[i, 0]
            tiles[tile, 1] = copies[i, 1] + start
            tiles[tile, 2] = copies[i, 2] + start
            tiles[tile, 3] = min(tile_bytes, copies[i, 3] - start)
            tile += 1
