"""Items with the same codes: numbered by a further level, or moved to the nearest free tuple of codes.

    codes    0 1     0 1     0 1     2 2      of four items
    level    0 1 0   0 1 1   0 1 2   2 2 0
    nearest  0 1     0 3     0 0     2 2      if 3 is the nearest other code to the second item, and 0 to the third

In both, items that had codes before keep them, and other items come after them, in the order of ids.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from evenrank.codebooks.kmeans import Codebooks, OnStage, Rows

_ITEMS_AT_ONCE = 4096


def tuple_keys(codes: NDArray[np.int32], size: int) -> NDArray[np.int64]:
    """Return codes [n, levels] below `size` as one number each: int64 [n], in lexicographic order."""
    keys = np.zeros(len(codes), dtype=np.int64)
    for level in range(codes.shape[1]):
        keys = keys * size + codes[:, level]
    return keys


def number_items(before: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many items with the same key come before each, those of `before` counted: int64 [n]."""
    every = np.concatenate([before, keys])
    order = np.argsort(every, kind="stable")
    firsts = np.flatnonzero(np.diff(every[order], prepend=-1))
    numbers = np.empty_like(every)
    numbers[order] = np.arange(len(every)) - np.repeat(firsts, np.diff(firsts, append=len(every)))
    return numbers[len(before) :]


def move_to_free(
    vectors: Rows, codes: NDArray[np.int32], before: NDArray[np.int64], books: Codebooks, on_stage: OnStage
) -> None:
    """Change codes [n, levels] of vectors [n, d] in place, so that none have the same, or a key of `before`.

    The first item with a tuple keeps it. Each other one takes, level by level, the nearest code below which a tuple is
    free, so only its last code changes while its prefix has a free one. There must be enough. 100 bytes per item.
    """
    size, levels = books.centroids.shape[1], codes.shape[1]
    keys = tuple_keys(codes, size)
    is_first = number_items(before, keys) == 0
    kept, moved = np.concatenate([before, keys[is_first]]), np.flatnonzero(~is_first)
    taken = [Counter((kept // size ** (levels - 1 - level)).tolist()) for level in range(levels)]  # below each prefix
    norms = np.square(books.centroids).sum(axis=2) + books.prices
    for number, item in enumerate(moved):
        if number % _ITEMS_AT_ONCE == 0:
            on_stage(f"free codes of items: {number:,} of {len(moved):,}")
        residual, prefix, is_own = vectors[item], 0, True
        for level, centroids in enumerate(books.centroids):
            code, room = int(codes[item, level]), size ** (levels - 1 - level)
            if not (is_own and taken[level][prefix * size + code] < room):  # its own is the nearest
                nearest = np.argsort(norms[level] - 2 * (centroids @ residual), kind="stable").tolist()
                code = next(code for code in nearest if taken[level][prefix * size + code] < room)
                is_own = False
            codes[item, level], prefix = code, prefix * size + code
            taken[level][prefix] += 1
            residual -= centroids[code]
