"""A tournament tree: finds the lightest of W ranks, and updates one rank's load in O(log W).

A complete binary tree in an array (Knuth, The Art of Computer Programming, volume 3, section 5.4.1): node 1 is the
overall winner, nodes 2k and 2k + 1 play for node k, and rank r is leaf W' + r, where W' is W rounded up to a power of
two. Compared with a heap, any rank's entry can be changed without searching for it.

An entry is one int64 with the load in its high bits and the rank in its low bits, so comparing two words compares loads
first and ranks second. Where both do not fit, loads lose low bits.

Cost: O(W) to build, one comparison a level to update. Trade-off: very large loads are compared approximately.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled

_ENTRY_BITS = 62
NO_ENTRY = 1 << _ENTRY_BITS  # loses against every entry


@compiled
def rank_bits(world_size: int) -> int:
    """Return the number of low bits of an entry that hold the rank."""
    bits = 0
    while (1 << bits) < world_size:
        bits += 1
    return bits


@compiled
def load_shift(max_load: int, bits: int) -> int:
    """Return the number of low bits that loads up to `max_load` lose to fit next to a rank of `bits` bits."""
    shift = 0
    while max_load >> shift >= 1 << (_ENTRY_BITS - bits):
        shift += 1
    return shift


@compiled
def make_entry(load: int, rank: int, bits: int, shift: int) -> int:
    """Return the entry of a rank; `bits` and `shift` as returned by `rank_bits` and `load_shift`."""
    return (load >> shift) << bits | rank


@compiled
def empty_tree(bits: int) -> NDArray[np.int64]:
    """Return a tree without entries: int64 [2 W']. Write entries to tree[W' + rank], then call `build`."""
    return np.full(2 << bits, NO_ENTRY)


@compiled
def build(tree: NDArray[np.int64]) -> None:
    """Play all games, given the leaves of `tree`, int64 [2 W']; changed in place."""
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


@compiled
def update(tree: NDArray[np.int64], rank: int, entry: int) -> None:
    """Replace a rank's entry and replay the games on its path to the root; `tree`, int64 [2 W'], changes in place."""
    node = len(tree) // 2 + rank
    tree[node] = entry
    while node > 1:
        entry = min(entry, tree[node ^ 1])
        node >>= 1
        tree[node] = entry
