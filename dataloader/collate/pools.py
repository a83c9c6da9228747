"""Histories that are made of the newest events of some kinds: `Pools`, found in the rows of stores by compiled loops.

action     1 0 2 1 1 4 1 | ?      values = (1, 2, 4), max_history_length = 3, within = 6
each              2   4 1         the newest event of each value
together            1 4 1         the newest three of all values
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.collate.gather import Ints, StoreRows
from evenrank.dataloader.config import Pools
from evenrank.datasets.store import SequenceStore, Slices

_BLOCK = 128  # events; at most so many are counted one by one at each end of a range
_MAX_KINDS = 1 << 10  # values of a table of kinds
_SLICE = 1 << 20  # events that are counted at once, per value


class EventPools:
    """Finds the events of histories. Any thread may use it."""

    def __init__(self, pools: Pools, max_history_length: int) -> None:
        self._pools, self._limit = pools, max_history_length
        self._values = np.array(pools.values, dtype=np.int64)
        share = max(1, max_history_length // len(pools.values)) if pools.each else max_history_length
        self._shares = np.full(len(pools.values), min(share, max_history_length))
        self._counts: dict[int, tuple[weakref.ref[Any], Ints]] = {}  # by the identity of columns

    def __reduce__(self) -> tuple[Any, ...]:
        return EventPools, (self._pools, self._limit)  # what was counted is counted again

    def select(self, groups: Sequence[StoreRows], max_num_candidates: int, *, has_values: bool) -> list[StoreRows]:
        """Return the samples with no other events than those of their histories, and their candidates.

        Each group's store gets slices in place of rows: those of arrays that are taken from its columns when they are
        asked for, with `has_values`; without, only lengths are known.

        Raises:
            IndexError: a row has fewer events than candidates.
        """
        return [self._select(*group, max_num_candidates, has_values=has_values) for group in groups]

    def _select(
        self, store: SequenceStore, rows: Ints, samples: Ints, max_num_candidates: int, *, has_values: bool
    ) -> StoreRows:
        begins, ends = store.begins[rows], store.ends[rows]
        num_candidates = np.full(len(rows), max_num_candidates, dtype=np.int64)
        if store.num_targets is not None:
            num_candidates = np.minimum(num_candidates, store.num_targets[rows])
        history_ends = ends - num_candidates
        if (history_ends < begins).any():
            raise IndexError(f"a row has fewer events than {max_num_candidates} candidates; it is not a sample")
        column = store.columns[self._pools.column]
        firsts = np.maximum(begins, history_ends - self._pools.within)
        sizes = np.empty(len(rows), dtype=np.int64)
        _count(column, self._values, self._blocks(column), firsts, history_ends, self._shares, self._limit, sizes)
        out_ends = np.cumsum(sizes + num_candidates)
        slices = Slices(store.rows_of(rows), out_ends - sizes - num_candidates, out_ends)
        made = replace(store, slices=slices, num_targets=num_candidates.astype(np.int32))
        if has_values:
            places = np.empty(int(out_ends[-1]) if len(out_ends) else 0, dtype=np.int64)
            _find_places(column, self._values, history_ends, ends, slices.begins, sizes, self._shares, places)
            events = {each.name for each in store.manifest.columns if each.kind == "event"}
            made = replace(made, columns=_TakenColumns(store.columns, events, places))
        return StoreRows(made, np.arange(len(rows)), samples)

    def _blocks(self, column: NDArray[Any]) -> Ints:
        """Return how often each value is in the column before each block: int64 [blocks + 1, values]."""
        key, counts = id(column), self._counts
        if (known := counts.get(key)) is None or known[0]() is not column:
            blocks = np.zeros((len(column) // _BLOCK + 1, len(self._values)), dtype=np.int64)
            for first in range(0, len(blocks) - 1, _SLICE // _BLOCK):  # so that columns need not be in memory
                _count_blocks(column, self._values, first, min(first + _SLICE // _BLOCK, len(blocks) - 1), blocks)
            known = counts[key] = weakref.ref(column, lambda _: counts.pop(key, None)), blocks
        return known[1]


class _TakenColumns(Mapping[str, NDArray[Any]]):
    """The columns of a store, those of events taken at some places when they are asked for."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], events: set[str], places: Ints) -> None:
        self._columns, self._events, self._places = columns, events, places
        self._taken: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._events:
            return self._columns[name]
        if (taken := self._taken.get(name)) is None:
            column = self._columns[name]
            taken = self._taken[name] = np.empty(len(self._places), dtype=column.dtype)
            _take(column, self._places, taken)
        return taken

    def at(self, name: str, events: Ints) -> NDArray[Any]:
        """Return the values of a column of events at some of the places alone."""
        return self._columns[name][self._places[events]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def values_at(store: SequenceStore, name: str, events: Ints) -> NDArray[Any]:
    """Return the values of a column of events at some of the events of a store, which may be of pools."""
    columns = store.columns
    return columns.at(name, events) if isinstance(columns, _TakenColumns) else columns[name][events]


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
    out_begins: Ints,
    sizes: Ints,
    shares: Ints,
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


@compiled
def _take(column: NDArray[Any], places: Ints, out: NDArray[Any]) -> None:
    for index in range(len(places)):
        out[index] = column[places[index]]
