"""The modes of routing and their arguments.

    continuous        ranges: rank k // ceil(N / W) has key k of a table of N rows, as in TorchRec's row-wise sharding;
                      keys past the last range go to rank k % W
    roundrobin        rank k % W
    hash_roundrobin   rank hash(k) % W, where `hash` is the finalizer of MurmurHash3

Keys are words of 64 bits and compared as unsigned: key -1 is 2^64 - 1, also if its dtype is int32. Only `continuous`
takes int32 keys as unsigned words of 32 bits, because fbgemm does.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError

Mode = Literal["continuous", "roundrobin", "hash_roundrobin"]
MODES: tuple[Mode, ...] = get_args(Mode)

# The 64-bit finalizer of MurmurHash3 (Austin Appleby, MurmurHash3.cpp, `fmix64`).
HASH_MULTIPLIERS = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
HASH_SHIFT = 33

_LIMIT = 1 << 63  # so that every rank and row is an int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the rows of one table are distributed over ranks.

    Raises:
        ConfigError: the mode is unknown, or `num_embeddings` is missing or out of range.

    """

    mode: Mode
    """One of MODES."""
    num_embeddings: int | None = None
    """Rows of the table; `continuous` needs it, and the other modes ignore it."""

    def __post_init__(self) -> None:
        check_routing(1, self.mode, self.num_embeddings)


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
    if type(world_size) is not int or not 1 <= world_size < _LIMIT:
        raise ConfigError(f"world_size must be an integer of at least 1 and below 2^63, got {world_size!r}")
    if num_embeddings is not None:
        check_num_embeddings(num_embeddings)
    elif mode == "continuous":
        raise ConfigError("mode 'continuous' assigns ranges of rows, so it needs num_embeddings, the table's rows")


def check_num_embeddings(num_embeddings: object) -> None:
    """Raise a ConfigError unless this is a number of rows."""
    if type(num_embeddings) is not int or not 1 <= num_embeddings < _LIMIT:
        raise ConfigError(f"num_embeddings must be an integer of at least 1 and below 2^63, got {num_embeddings!r}")


# Owners of keys in NumPy arrays, and the rows of keys in the shards of their owners.


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
