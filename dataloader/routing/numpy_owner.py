"""Owners of keys in NumPy arrays, and the rows of keys in the shards of their owners."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing.modes import HASH_MULTIPLIERS, HASH_SHIFT, Routing, rows_per_rank

Integer = TypeVar("Integer", bound=np.integer[Any])


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
    """Return the rank that owns each key, and its row in the shard of that rank.

    Args:
        keys: integers of any shape.
        world_size: number of ranks.
        routing: of their table.

    Returns:
        Owners, int64 of the same shape; rows, of the same shape and dtype. In `hash_roundrobin` a row is the key.

    Raises:
        ConfigError: keys are no integers.

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
