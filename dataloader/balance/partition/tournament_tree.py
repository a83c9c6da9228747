"""Which rank is lightest, kept up to date at one comparison a level: a tournament of ranks.

An entry is one word, the load in its high bits and the rank in its low ones, so that the smaller word is the lighter
rank, and among equals the lower one. Where loads and ranks do not fit into a word together, loads lose low bits. Node 1
is the winner of all, nodes 2k and 2k + 1 play for node k, and rank r enters at leaf W' + r, W' being W rounded up to a
power of two.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled

_ENTRY_BITS = 62
ABSENT = 1 << _ENTRY_BITS  # loses against everybody


@compiled
def rank_bits(world_size: int) -> int:
    """Return how many low bits of an entry are the rank."""
    bits = 0
    while (1 << bits) < world_size:
        bits += 1
    return bits


@compiled
def load_shift(total: int, bits: int) -> int:
    """Return how many low bits loads up to `total` lose so that they fit beside `bits` bits of a rank."""
    shift = 0
    while total >> shift >= 1 << (_ENTRY_BITS - bits):
        shift += 1
    return shift


@compiled
def play_all(tree: NDArray[np.int64]) -> None:
    """Let all leaves play: int64 [2 W']."""
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


@compiled
def enter(tree: NDArray[np.int64], rank: int, entry: int) -> None:
    """Replace a rank's entry and play its games again."""
    node = len(tree) // 2 + rank
    tree[node] = entry
    while node > 1:
        entry = min(entry, tree[node ^ 1])
        node >>= 1
        tree[node] = entry
