"""Histories of some of the events before the candidates: a store of those that a selection chooses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.collate.gather import DrawKey, HistorySpans, Ints, StoreRows, find_spans
from evenrank.datasets.store import SequenceStore, Slices

FindPlaces = Callable[[Ints, Ints], None]
"""Called as `(begins, out)`: writes the places of the selected events and of the candidates of m samples in the columns
of their store, in the order of time, those of a sample from its begin on."""


class Selection(Protocol):
    """Chooses the events of histories. Any thread may use it."""

    within: int
    """The events before the candidates that are chosen from."""

    def choose(self, store: SequenceStore, spans: HistorySpans, key: DrawKey) -> tuple[Ints, FindPlaces]:
        """Return how many events of each of m histories are selected, [m], and what finds them."""


def select_events(
    selection: Selection, groups: Sequence[StoreRows], key: DrawKey, max_num_candidates: int, *, has_values: bool
) -> list[StoreRows]:
    """Return the samples with no other events than those that are selected, and their candidates.

    Each group's store gets slices in place of rows: those of arrays that are taken from its columns when they are asked
    for, with `has_values`; without, only lengths are known.

    Raises:
        IndexError: a row has fewer events than candidates.
    """
    made = []
    for store, rows, samples in groups:
        group = StoreRows(store, rows, np.arange(len(rows)))
        spans = find_spans([group], len(rows), selection.within, max_num_candidates)
        sizes, find_places = selection.choose(store, spans, key._replace(sample_ids=key.sample_ids[samples]))
        num_candidates = spans.ends - spans.history_ends
        ends = np.cumsum(sizes + num_candidates)
        slices = Slices(store.rows_of(rows), ends - sizes - num_candidates, ends)
        selected = replace(store, slices=slices, num_targets=num_candidates.astype(np.int32))
        if has_values:
            places, columns = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64), store.columns
            find_places(slices.begins, places)
            if isinstance(columns, _TakenColumns):  # of another selection
                places, columns = columns.places[places], columns.stored
            events = {each.name for each in store.manifest.columns if each.kind == "event"}
            selected = replace(selected, columns=_TakenColumns(columns, events, places))
        made.append(StoreRows(selected, group.sample_indices, samples))
    return made


class _TakenColumns(Mapping[str, NDArray[Any]]):
    """The columns of a store, those of events taken at some places when they are asked for."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], events: set[str], places: Ints) -> None:
        self.stored, self.places, self._events = columns, places, events
        self._taken: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._events:
            return self.stored[name]
        if (taken := self._taken.get(name)) is None:
            column = self.stored[name]
            taken = self._taken[name] = np.empty(len(self.places), dtype=column.dtype)
            _take(column, self.places, taken)
        return taken

    def at(self, name: str, events: Ints) -> NDArray[Any]:
        """Return the values of a column of events at some of the places alone."""
        return self.stored[name][self.places[events]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def values_at(store: SequenceStore, name: str, events: Ints) -> NDArray[Any]:
    """Return the values of a column of events at some of the events of a store, which may be selected ones."""
    columns = store.columns
    return columns.at(name, events) if isinstance(columns, _TakenColumns) else columns[name][events]


def stored_events(store: SequenceStore, name: str) -> NDArray[Any]:
    """Return all of a column of events, also of those that are not selected, as the offsets of rows count them."""
    columns = store.columns
    return columns.stored[name] if isinstance(columns, _TakenColumns) else columns[name]


@compiled
def _take(column: NDArray[Any], places: Ints, out: NDArray[Any]) -> None:
    for index in range(len(places)):
        out[index] = column[places[index]]
