"""How often each value occurs in any number of integers, in memory for the values that occur."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled

# Values from 0 to below this are counted in a table, whose unused pages take no memory; others, as hashes, by sorting.
_TABLE_VALUES = 1 << 25


class ValueCounts:
    """Counts the values of arrays of integers."""

    def __init__(self) -> None:
        self._table = np.zeros(_TABLE_VALUES, dtype=np.uint32)
        self._used = self._total = 0  # values of the table up to the largest one that occurred; all that were added
        self._others: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # ascending
        self._other_counts = self._others

    def add(self, values: NDArray[np.integer]) -> None:
        """Count the values of an array."""
        self._total += len(values)
        if self._total >= 1 << 32:
            self._table = self._table.astype(np.int64, copy=False)
        if values.min(initial=0) < 0 or values.max(initial=0) >= _TABLE_VALUES:
            is_other = (values < 0) | (values >= _TABLE_VALUES)
            others, counts = np.unique(values[is_other], return_counts=True)
            places, is_known = np.searchsorted(self._others, others), np.isin(others, self._others)
            self._other_counts[places[is_known]] += counts[is_known]
            self._others, self._other_counts = (
                np.insert(old, places[~is_known], new[~is_known])
                for old, new in ((self._others, others), (self._other_counts, counts))
            )
            values = values[~is_other]
        self._used = max(self._used, int(values.max(initial=-1)) + 1)
        _count_into(self._table, values)

    def result(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the values that occurred, ascending, and how often each did: int64 [values] twice."""
        values = np.flatnonzero(self._table[: self._used])
        first_large = np.searchsorted(self._others, 0)
        negative, large = np.split(self._others, [first_large])
        of_negative, of_large = np.split(self._other_counts, [first_large])
        counts = np.concatenate([of_negative, self._table[values], of_large], dtype=np.int64)
        return np.concatenate([negative, values, large]), counts


@compiled
def _count_into(table: NDArray[np.integer], values: NDArray[np.integer]) -> None:
    for value in values:
        table[value] += 1
