"""How often each value occurs in any number of integers, in memory for the values that occur."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled

_TABLE_VALUES = 1 << 25
_PIECE = 1 << 22  # of the table
_SPARSE = 4  # times as many integers as values, in which those that occur are found by sorting


def count_values(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct values of an array [n], ascending, and how often each occurs: int64 [distinct] twice."""
    least = int(values.min(initial=np.iinfo(np.int64).max))
    if int(values.max(initial=least)) - least >= _SPARSE * len(values):
        return np.unique(values, return_counts=True)
    counts = _count_dense(values, least, int(values.max(initial=least)) - least + 1)  # several times as fast
    found = np.flatnonzero(counts)
    return found + least, counts[found]


@compiled
def _count_dense(values: NDArray[np.int64], least: int, size: int) -> NDArray[np.int64]:
    """Return how often each of `size` integers from the least one on occurs, without the GIL, unlike `bincount`."""
    counts = np.zeros(size, dtype=np.int64)
    for i in range(len(values)):
        counts[values[i] - least] += 1
    return counts


class ValueCounts:
    """Counts the values of arrays of integers.

    Those from 0 to below `num_values` are counted in a table, whose unused pages take no memory; others, such as
    hashes, by sorting.
    """

    def __init__(self, num_values: int | None = None) -> None:
        self._table: NDArray[np.integer] = np.zeros(num_values or _TABLE_VALUES, dtype=np.uint32)
        self._used = self._total = 0  # values of the table up to the largest one that occurred; all that were added
        self._others: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # ascending
        self._other_counts = self._others

    def add(self, values: NDArray[np.integer], counts: NDArray[np.int64] | None = None) -> None:
        """Count the values of an array [n], or add so many of each."""
        counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
        self._total += int(counts.sum())
        if self._total >= 1 << 32:
            self._table = self._table.astype(np.int64, copy=False)
        if values.min(initial=0) < 0 or values.max(initial=0) >= len(self._table):
            is_other: NDArray[np.bool_] = (values < 0) | (values >= len(self._table))
            others, indices = np.unique(values.compress(is_other), return_inverse=True)
            places, is_known = self._find(others)
            new, added = places[~is_known], np.zeros(len(others), dtype=np.int64)
            np.add.at(added, indices, counts.compress(is_other))
            self._other_counts[places[is_known]] += added[is_known]
            self._other_counts = np.insert(self._other_counts, new, added[~is_known])
            self._others = np.insert(self._others, new, others[~is_known])
            values, counts = values.compress(~is_other), counts.compress(~is_other)
        self._used = max(self._used, int(values.max(initial=-1)) + 1)
        _add_into(self._table, values, counts)

    def pieces(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.integer]]]:
        """Yield the values that occurred, ascending, and how often each did, in pieces: integers [n] twice."""
        first_large = np.searchsorted(self._others, 0)
        yield self._others[:first_large], self._other_counts[:first_large]
        for first in range(0, self._used, _PIECE):
            counts = self._table[first : min(first + _PIECE, self._used)]
            yield first + np.flatnonzero(counts), counts[counts > 0]
        yield self._others[first_large:], self._other_counts[first_large:]

    def result(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the values that occurred, ascending, and how often each did: int64 [values] twice."""
        values, counts = zip(*self.pieces(), strict=True)
        return np.concatenate(values), np.concatenate(counts, dtype=np.int64)

    def count(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how often each of some values [n] occurred: int64 [n]."""
        counts = np.zeros(len(values), dtype=np.int64)
        in_table = (values >= 0) & (values < len(self._table))
        counts[in_table] = self._table[values[in_table]]
        places, is_other = self._find(values)
        counts[is_other] = self._other_counts[places[is_other]]
        return counts

    def _find(self, values: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where each value [n] is or would be among those that are not in the table, and which are there."""
        places = np.searchsorted(self._others, values)
        is_known = places < len(self._others)
        is_known[is_known] = self._others[places[is_known]] == values.compress(is_known)
        return places, is_known


@compiled
def _add_into(table: NDArray[np.integer], values: NDArray[np.integer], counts: NDArray[np.int64]) -> None:
    for i in range(len(values)):
        table[values[i]] += counts[i]
