"""Items with the same codes: numbered by a further level, or moved to the nearest free tuple of codes.

    codes    0 1   0 1   0 1   2 2       codes of four items
    level    0 1 0 0 1 1 0 1 2 2 2 0
    nearest  0 1   0 3   0 0   2 2       if code 3 is the nearest but 1 to the second item, and code 0 to the third

In both, items that had codes before keep them, and other items come after them, in the order of ids.
"""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.semantic_ids.kmeans import Codebooks, OnStage

_ITEMS_AT_ONCE = 4096


def tuple_keys(codes: NDArray[np.int32], size: int) -> NDArray[np.int64]:
    """Return codes [n, levels] as one number each: int64 [n], in lexicographic order."""
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
    vectors: NDArray[Any],
    items: NDArray[np.int64],
    codes: NDArray[np.int32],
    before: NDArray[np.int64],
    books: Codebooks,
    on_stage: OnStage,
) -> None:
    """Change codes [n, levels] in place so that no two items have the same, nor one of the keys `before`.

    The first item with a tuple keeps it. Each other one takes, level by level, the nearest code below which a tuple is
    free, so that no more than its last code changes while there is a free tuple in its prefix. There must be enough.
    """
    size, levels = books.centroids.shape[1], codes.shape[1]
    keys = tuple_keys(codes, size)
    is_kept = number_items(before, keys) == 0
    taken = _Taken(np.concatenate([before, keys[is_kept]]), size, levels)
    norms = np.square(books.centroids).sum(axis=2) + books.prices
    moved = np.flatnonzero(~is_kept)
    for number, item in enumerate(moved):
        if number % _ITEMS_AT_ONCE == 0:
            on_stage(f"free codes of items: {number:,} of {len(moved):,}")
        residual, key = vectors[items[item]].astype(np.float32), 0
        for level in range(levels):
            scores = norms[level] - 2 * (books.centroids[level] @ residual)
            code = int(np.where(taken.has_room(key, level), scores, np.inf).argmin())
            codes[item, level], key = code, key * size + code
            residual -= books.centroids[level, code]
        taken.add(key)


class _Taken:
    """How many tuples below each prefix are taken: arrays of those at the begin, and what was added since."""

    def __init__(self, keys: NDArray[np.int64], size: int, levels: int) -> None:
        self._size, self._levels = size, levels
        self._begin = [np.unique(keys // size**below, return_counts=True) for below in reversed(range(levels))]
        self._added: list[defaultdict[int, Counter[int]]] = [defaultdict(Counter) for _ in range(levels)]

    def has_room(self, prefix: int, level: int) -> NDArray[np.bool_]:
        """Return whether a tuple is free below each code after a prefix: bool [codes]."""
        keys, counts = self._begin[level]
        first, last = np.searchsorted(keys, [prefix * self._size, (prefix + 1) * self._size])
        used = np.zeros(self._size, dtype=np.int64)
        used[keys[first:last] - prefix * self._size] = counts[first:last]
        for code, count in self._added[level].get(prefix, {}).items():
            used[code] += count
        has_room: NDArray[np.bool_] = used < self._size ** (self._levels - 1 - level)
        return has_room

    def add(self, key: int) -> None:
        """Count a tuple."""
        for level in reversed(range(self._levels)):
            key, code = divmod(key, self._size)
            self._added[level][key][code] += 1
