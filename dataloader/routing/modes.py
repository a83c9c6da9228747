"""The modes of routing and their arguments.

    continuous        ranges: rank k // ceil(N / W) has key k of a table of N rows, as in TorchRec's row-wise sharding;
                      keys past the last range go to rank k % W
    roundrobin        rank k % W
    hash_roundrobin   rank hash(k) % W, where `hash` is the finalizer of MurmurHash3

Keys are words of 64 bits and compared as unsigned: key -1 is 2^64 - 1, also if its dtype is int32. Only `continuous`
takes int32 keys as unsigned words of 32 bits, because fbgemm does.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from evenrank.core.errors import ConfigError

Mode = Literal["continuous", "roundrobin", "hash_roundrobin"]
MODES: tuple[Mode, ...] = get_args(Mode)

# The 64-bit finalizer of MurmurHash3 (Austin Appleby, MurmurHash3.cpp, `fmix64`).
HASH_MULTIPLIERS = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
HASH_SHIFT = 33

_LIMIT = 1 << 63  # so that every rank and row is an int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the rows of one table are distributed over ranks; raises a ConfigError if a field is out of range."""

    mode: Mode
    num_embeddings: int | None = None
    """Rows of the table; `continuous` needs it, and the other modes ignore it."""

    def __post_init__(self) -> None:
        check_routing(1, self.mode, self.num_embeddings)


def rows_per_rank(num_embeddings: int, world_size: int) -> int:
    """Return the rows of a rank's range in TorchRec's row-wise sharding; the last ranks may have fewer, or none."""
    return -(-num_embeddings // world_size)


def check_routing(world_size: int, mode: Mode, num_embeddings: int | None) -> None:
    """Raise a ConfigError if the mode is unknown, or an argument is missing or out of range."""
    if mode not in MODES:
        raise ConfigError(f"the routing mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "continuous" and num_embeddings is None:
        raise ConfigError("mode 'continuous' assigns ranges of rows, so it needs num_embeddings, the table's rows")
    for name, value in (
        ("world_size", world_size),
        ("num_embeddings", 1 if num_embeddings is None else num_embeddings),
    ):
        if type(value) is not int or not 1 <= value < _LIMIT:
            raise ConfigError(f"{name} must be an integer of at least 1 and below 2^63, got {value!r}")
