"""Which rank owns a key, by mode (see `key_map.py`), and the row of the key in the shard of its owner."""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing.key_map import (
    HASH_MULTIPLIERS,
    HASH_SHIFT,
    Mode,
    Routing,
    check_routing,
    rows_per_rank,
)

if TYPE_CHECKING:
    from torch import Tensor

Integer = TypeVar("Integer", bound=np.integer[Any])
Keys = TypeVar("Keys", "NDArray[Any]", "Tensor")


def owner_rank(keys: Keys, world_size: int, mode: Mode, num_embeddings: int | None = None) -> Keys:
    """Return the rank that owns each key.

    Args:
        keys: integers of any shape: a NumPy array, or a tensor of int32 or int64 on any device.
        world_size: number of ranks.
        mode: one of MODES.
        num_embeddings: rows of the table; `continuous` needs it.

    Returns:
        int64 of the same shape, in 0..world_size-1; of a tensor, on the same device.

    Raises:
        ConfigError: the mode is unknown, an argument is missing or out of range, or keys are no integers.
    """
    check_routing(world_size, mode, num_embeddings)
    routing = Routing(mode=mode, num_embeddings=num_embeddings)
    if isinstance(keys, np.ndarray):
        return owners_and_rows(keys, world_size, routing)[0]
    # Imported here, because torch takes seconds to import and is not installed where arrays alone are routed.
    import torch

    from evenrank.dataloader.routing.gpu_bucketize import HAS_TRITON, check_keys, owners_with_kernel

    check_keys(keys)
    if keys.is_cuda and HAS_TRITON:
        return owners_with_kernel(keys, world_size, routing)
    owners, _ = owners_and_rows(keys.cpu().numpy(), world_size, routing)
    return torch.from_numpy(owners).to(keys.device)


def hash_keys(keys: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return the hash of each key: uint64 of the same shape. A bijection on 64-bit words."""
    hashed = _words(keys).copy()
    shift = np.uint64(HASH_SHIFT)
    hashed ^= hashed >> shift
    for multiplier in HASH_MULTIPLIERS:
        hashed *= np.uint64(multiplier)
        hashed ^= hashed >> shift
    return hashed


def owners_and_rows(
    keys: NDArray[Integer], world_size: int, routing: Routing
) -> tuple[NDArray[np.int64], NDArray[Integer]]:
    """Return each key's owner, int64 of the same shape, and its row there, of the keys' dtype.

    In `hash_roundrobin` a row is the key.
    """
    size = np.uint64(world_size)
    if routing.mode == "hash_roundrobin":
        return np.asarray(hash_keys(keys) % size, dtype=np.int64), keys
    words = _words(keys)
    if routing.mode == "continuous" and keys.dtype == np.int32:
        words = words & np.uint64(0xFFFFFFFF)
    rows = words // size
    owners = words - rows * size
    if routing.num_embeddings is not None and routing.mode == "continuous":
        range_size = np.uint64(rows_per_rank(routing.num_embeddings, world_size))
        ranges = words // range_size
        is_in_range = ranges < size
        owners = np.where(is_in_range, ranges, owners)
        rows = np.where(is_in_range, words - ranges * range_size, rows)
    return np.asarray(owners).astype(np.int64), np.asarray(rows).astype(keys.dtype)


def _words(keys: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return keys as words of 64 bits, of which negative ones are the largest."""
    if keys.dtype.kind not in "iu":
        raise ConfigError(f"keys must be integers, got {keys.dtype}")
    return keys.astype(np.int64).view(np.uint64) if keys.dtype.kind == "i" else keys.astype(np.uint64)
