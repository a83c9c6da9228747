"""Which rank owns a key, by mode (see `modes.py`): for NumPy arrays here, for tensors in `torch_owner.py`."""

from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing.modes import HASH_MULTIPLIERS, HASH_SHIFT, Mode, check_routing, rows_per_rank

if TYPE_CHECKING:
    from torch import Tensor


def hash_keys(keys: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return the hash of each key: uint64 of the same shape. A bijection on 64-bit words."""
    hashed = _words(keys).copy()
    shift = np.uint64(HASH_SHIFT)
    hashed ^= hashed >> shift
    for multiplier in HASH_MULTIPLIERS:
        hashed *= np.uint64(multiplier)
        hashed ^= hashed >> shift
    return hashed


@overload
def owner_rank(
    keys: NDArray[np.integer[Any]], world_size: int, mode: Mode, num_embeddings: int | None = None
) -> NDArray[np.int64]: ...


@overload
def owner_rank(keys: "Tensor", world_size: int, mode: Mode, num_embeddings: int | None = None) -> "Tensor": ...


def owner_rank(
    keys: "NDArray[np.integer[Any]] | Tensor", world_size: int, mode: Mode, num_embeddings: int | None = None
) -> "NDArray[np.int64] | Tensor":
    """Return the rank that owns each key.

    Args:
        keys: integers of any shape: a NumPy array, or a tensor of int32 or int64 on any device.
        world_size: number of ranks.
        mode: one of MODES.
        num_embeddings: rows of the table; `continuous` needs it.

    Returns:
        int64 of the same shape, in 0..world_size-1; for a tensor a tensor on the same device.

    Raises:
        ConfigError: the mode is unknown, an argument is missing or out of range, or keys are no integers.

    """
    check_routing(world_size, mode, num_embeddings)
    if not isinstance(keys, np.ndarray):
        # Imported here, because torch takes seconds to import and those who have NumPy arrays may not have it.
        from evenrank.dataloader.routing.torch_owner import owner_of_tensor

        return owner_of_tensor(keys, world_size, mode, num_embeddings)
    size = np.uint64(world_size)
    if mode == "hash_roundrobin":
        return (hash_keys(keys) % size).astype(np.int64)
    words = _words(keys)
    if mode == "continuous" and keys.dtype == np.int32:
        words &= np.uint64(0xFFFFFFFF)
    owners = words % size
    if num_embeddings is not None and mode == "continuous":
        ranges = words // np.uint64(rows_per_rank(num_embeddings, world_size))
        owners = np.where(ranges < size, ranges, owners)
    return owners.astype(np.int64)


def _words(keys: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return keys as words of 64 bits, of which negative ones are the largest."""
    if keys.dtype.kind not in "iu":
        raise ConfigError(f"keys must be integers, got {keys.dtype}")
    return keys.astype(np.int64).view(np.uint64) if keys.dtype.kind == "i" else keys.astype(np.uint64)
