"""Which rank owns a key, by mode.

    continuous        ranges: rank k // ceil(N / W) has key k of a table of N rows, as in TorchRec's row-wise sharding;
                      keys past the last range go to rank k % W
    roundrobin        rank k % W
    hash_roundrobin   rank hash(k) % W, where `hash` is the finalizer of MurmurHash3

Keys are words of 64 bits and compared as unsigned: key -1 is 2^64 - 1.
"""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError

Mode = Literal["continuous", "roundrobin", "hash_roundrobin"]
MODES: tuple[Mode, ...] = get_args(Mode)

# The 64-bit finalizer of MurmurHash3 (Austin Appleby, MurmurHash3.cpp, `fmix64`).
HASH_MULTIPLIERS = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
HASH_SHIFT = 33


def hash_keys(keys: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return the hash of each key: uint64 of the same shape. A bijection on 64-bit words."""
    hashed = _words(keys).copy()
    shift = np.uint64(HASH_SHIFT)
    hashed ^= hashed >> shift
    for multiplier in HASH_MULTIPLIERS:
        hashed *= np.uint64(multiplier)
        hashed ^= hashed >> shift
    return hashed


def owner_rank(
    keys: NDArray[np.integer[Any]], world_size: int, mode: Mode, num_embeddings: int | None = None
) -> NDArray[np.int64]:
    """Return the rank that owns each key.

    Args:
        keys: integers of any shape.
        world_size: number of ranks.
        mode: one of MODES.
        num_embeddings: rows of the table; `continuous` needs it.

    Returns:
        int64 of the same shape, in 0..world_size-1.

    Raises:
        ConfigError: the mode is unknown, or an argument is missing or out of range.

    """
    check_routing(world_size, mode, num_embeddings)
    size = np.uint64(world_size)
    if mode == "hash_roundrobin":
        return (hash_keys(keys) % size).astype(np.int64)
    words = _words(keys)
    owners = words % size
    if num_embeddings is not None and mode == "continuous":
        ranges = words // np.uint64(rows_per_rank(num_embeddings, world_size))
        owners = np.where(ranges < size, ranges, owners)
    return owners.astype(np.int64)


def rows_per_rank(num_embeddings: int, world_size: int) -> int:
    """Return the rows of a rank's range in TorchRec's row-wise sharding; the last ranks may have fewer, or none."""
    return -(-num_embeddings // world_size)


def check_routing(world_size: int, mode: Mode, num_embeddings: int | None) -> None:
    """Check the arguments of a routing.

    Raises:
        ConfigError: the mode is unknown, or an argument is missing or out of range.

    """
    if mode not in MODES:
        raise ConfigError(f"the routing mode must be one of {', '.join(MODES)}, got {mode!r}")
    if type(world_size) is not int or world_size < 1:
        raise ConfigError(f"world_size must be an integer of at least 1, got {world_size!r}")
    if num_embeddings is not None:
        check_num_embeddings(num_embeddings)
    elif mode == "continuous":
        raise ConfigError("mode 'continuous' assigns ranges of rows, so it needs num_embeddings, the table's rows")


def check_num_embeddings(num_embeddings: object) -> None:
    """Raise a ConfigError unless this is a number of rows."""
    if type(num_embeddings) is not int or num_embeddings < 1:
        raise ConfigError(f"num_embeddings must be an integer of at least 1, got {num_embeddings!r}")


def _words(keys: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return keys as words of 64 bits, of which negative ones are the largest."""
    if keys.dtype.kind not in "iu":
        raise ConfigError(f"keys must be integers, got {keys.dtype}")
    return keys.astype(np.int64).view(np.uint64) if keys.dtype.kind == "i" else keys.astype(np.uint64)
