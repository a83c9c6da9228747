"""Histories that are made of the newest events of some kinds: `Pools`, found in the rows of stores by compiled loops.

action     1 0 2 1 1 4 1 | ?      values = (1, 2, 4), max_history_length = 3, within = 6
each              2   4 1         the newest event of each value
together            1 4 1         the newest three of all values
"""

import weakref
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.collate.gather import DrawKey, HistorySpans, Ints
from evenrank.dataloader.collate.selection import FindPlaces
from evenrank.dataloader.config import Pools
from evenrank.datasets.store import SequenceStore

_BLOCK = 128  # events; at most so many are counted one by one at each end of a range
_MAX_KINDS = 1 << 10  # values of a table of kinds
_SLICE = 1 << 20  # events that are counted at once, per value


class EventPools:
    """Finds the events of histories. Any thread may use it."""

    def __init__(self, pools: Pools, max_history_length: int) -> None:
        self._pools, self._limit, self.within = pools, max_history_length, pools.within
        self._values = np.array(pools.values, dtype=np.int64)
        share = max(1, max_history_length // len(pools.values)) if pools.each else max_history_length
        self._shares = np.full(len(pools.values), min(share, max_history_length))
        self._counts: dict[int, tuple[weakref.ref[Any], Ints]] = {}  # by the identity of columns

    def __reduce__(self) -> tuple[Any, ...]:
        return EventPools, (self._pools, self._limit)  # what was counted is counted again

    def choose(self, store: SequenceStore, spans: HistorySpans, key: DrawKey) -> tuple[Ints, FindPlaces]:
        """Return how many events of each of m histories are of the kinds, [m], and what finds them."""
        column, sizes = store.columns[self._pools.column], np.empty_like(spans.begins)
        begins, ends, blocks = spans.begins, spans.history_ends, self._blocks(column)
        _count(column, self._values, blocks, begins, ends, self._shares, self._limit, sizes)
        return sizes, partial(_find_places, column, self._values, ends, spans.ends, sizes, self._shares)

    def _blocks(self, column: NDArray[Any]) -> Ints:
        """Return how often each value is in the column before each block: int64 [blocks + 1, values]."""
        key, counts = id(column), self._counts
        if (known := counts.get(key)) is None or known[0]() is not column:
            blocks = np.zeros((len(column) // _BLOCK + 1, len(self._values)), dtype=np.int64)
            for first in range(0, len(blocks) - 1, _SLICE // _BLOCK):  # so that columns need not be in memory
                _count_blocks(column, self._values, first, min(first + _SLICE // _BLOCK, len(blocks) - 1), blocks)
            known = counts[key] = weakref.ref(column, lambda _: counts.pop(key, None)), blocks
        return known[1]


@compiled
def _count_blocks(column: NDArray[Any], values: Ints, first: int, end: int, blocks: Ints) -> None:
    for block in range(first, end):
        blocks[block + 1] = blocks[block]
        for kind in range(len(values)):
            count = 0
            for index in range(block * _BLOCK, (block + 1) * _BLOCK):
                count += column[index] == values[kind]
            blocks[block + 1, kind] += count


@compiled
def _count(
    column: NDArray[Any], values: Ints, blocks: Ints, begins: Ints, ends: Ints, shares: Ints, limit: int, out: Ints
) -> None:
    found = np.empty(len(values), dtype=np.int64)
    for sample in range(len(begins)):
        found[:] = 0
        for sign, place in ((1, ends[sample]), (-1, begins[sample])):
            block = place // _BLOCK
            for kind in range(len(values)):
                count = blocks[block, kind]
                for index in range(block * _BLOCK, place):  # which compiles to vector instructions
                    count += column[index] == values[kind]
                found[kind] += sign * count
        out[sample] = min(np.minimum(found, shares).sum(), limit)


@compiled
def _find_places(
    column: NDArray[Any],
    values: Ints,
    history_ends: Ints,
    ends: Ints,
    sizes: Ints,
    shares: Ints,
    out_begins: Ints,
    out: Ints,
) -> None:
    # The kind of each value from -1 to the largest and one more, which stand for all below and above.
    highest = values.max() + 1
    kinds = np.full(highest + 2 if highest < _MAX_KINDS else 0, len(values), dtype=np.int64)
    for kind in range(len(values)):
        if len(kinds) and values[kind] >= 0:
            kinds[values[kind] + 1] = kind
    left = np.zeros(len(values) + 1, dtype=np.int64)
    for sample in range(len(sizes)):
        left[:-1] = shares
        index, begin = history_ends[sample], out_begins[sample]
        place = begin + sizes[sample]
        for candidate in range(ends[sample] - index):
            out[place + candidate] = index + candidate
        while place > begin:
            index -= 1
            value = np.int64(column[index])
            if len(kinds):
                kind = kinds[min(max(value, -1), highest) + 1]
            else:
                kind = len(values)
                for other in range(len(values)):
                    kind = other if values[other] == value else kind
            is_taken = left[kind] > 0  # no branch, which processors would mispredict
            out[place - 1] = index if is_taken else out[place - 1]
            place -= is_taken
            left[kind] -= is_taken
