"""Where samples lie in stores, and the compiled loops that copy them out, without the interpreter's lock."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.datasets.store import SequenceStore

_CACHE_LINE = 64  # bytes, of all processors that matter here
_NO_TARGETS = np.empty(0, dtype=np.int32)


class Pick(NamedTuple):
    """Samples that lie in one store."""

    store: SequenceStore
    rows: NDArray[np.int64]  # in the store
    slots: NDArray[np.int64]  # which row of the batch each becomes


def pick_rows(stores: Sequence[SequenceStore], ids: NDArray[np.int64]) -> list[Pick]:
    """Find samples whose numbers count through the rows of all stores, one store behind the other; at least one pick.

    Raises:
        IndexError: a number is outside.

    """
    ends = np.cumsum([len(store) for store in stores])
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < ends[-1]:
        raise IndexError(f"rows must lie in 0..{ends[-1] - 1}, got {int(ids.min())} to {int(ids.max())}")
    if len(stores) == 1 or not len(ids):
        return [Pick(stores[0], ids, np.arange(len(ids)))]
    homes = np.searchsorted(ends, ids, side="right")
    picks = []
    for number in np.unique(homes).tolist():
        slots = np.flatnonzero(homes == number)
        picks.append(Pick(stores[number], ids[slots] - (ends[number] - len(stores[number])), slots))
    return picks


class Spans(NamedTuple):
    """The events of n samples, as indices into the events of their stores; int64 [n] each.

    events          a b c d e f g       max_history_length = 3, max_num_candidates = 2
                        ^     ^   ^
                        begins splits ends
    """

    begins: NDArray[np.int64]  # of the history
    splits: NDArray[np.int64]  # where the history ends and the candidates begin
    ends: NDArray[np.int64]


def locate(picks: Sequence[Pick], num_samples: int, *, max_history_length: int, max_num_candidates: int) -> Spans:
    """Find the newest `max_history_length` events and the candidates behind them.

    A row with a number of targets has no more candidates than that: what comes before them was trained on.
    """
    begins, splits, ends = np.empty((3, num_samples), dtype=np.int64)
    for store, rows, slots in picks:
        targets = _NO_TARGETS if store.num_targets is None else store.num_targets
        if not _locate(
            store.offsets, targets, rows, slots, max_history_length, max_num_candidates, begins, splits, ends
        ):
            raise IndexError(f"a row has fewer events than {max_num_candidates} candidates; it is no sample")
    return Spans(begins, splits, ends)


def copy_events(
    picks: Sequence[Pick],
    column: str,
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """Copy events of a column: of sample i those from begins[i] to out[places[i]] and onwards; int64 [n] each."""
    for store, _, slots in picks:
        _copy_events(store.events[column], slots, begins, lengths, places, out)


def copy_codes(
    picks: Sequence[Pick],
    column: str,
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    codes: NDArray[np.int32],
    level_offsets: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """Copy the codes of a column's events: as `copy_events`, with `levels` values an event.

    Args:
        picks: the samples.
        column: whose values are rows of `codes`.
        begins: int64 [n], of the events.
        lengths: int64 [n], in events.
        places: int64 [n], where in `out` each sample's codes begin.
        codes: int32 [items, levels].
        level_offsets: int64 [levels], added to the codes.
        out: int64.

    """
    for store, _, slots in picks:
        if not _copy_codes(store.events[column], slots, begins, lengths, places, codes, level_offsets, out):
            raise IndexError("a row has an item without a code; it is no sample")


@compiled
def _locate(
    offsets: NDArray[np.int64],
    targets: NDArray[np.int32],
    rows: NDArray[np.int64],
    slots: NDArray[np.int64],
    max_history_length: int,
    max_num_candidates: int,
    begins: NDArray[np.int64],
    splits: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> bool:
    for index in range(len(rows)):
        row, slot = rows[index], slots[index]
        candidates = max_num_candidates
        if len(targets):
            candidates = min(candidates, targets[row])
        end = offsets[row + 1]
        split = end - candidates
        if split < offsets[row]:
            return False
        begins[slot] = max(offsets[row], split - max_history_length)
        splits[slot] = split
        ends[slot] = end
    return True


@compiled
def _copy_events(
    column: NDArray[np.integer],
    slots: NDArray[np.int64],
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    # Samples lie anywhere in a column that no cache holds. Touching all their cache lines first lets the processor
    # fetch many at a time, where copying would wait for each sample's before it comes to the next.
    step = _CACHE_LINE // column.itemsize
    touched = 0
    for slot in slots:
        for event in range(begins[slot], begins[slot] + lengths[slot], step):
            touched ^= column[event]
    for slot in slots:
        begin, place, length = begins[slot], places[slot], lengths[slot]
        events, copied = column[begin : begin + length], out[place : place + length]
        for event in range(length):  # compiled to a faster loop than an assignment of the slice
            copied[event] = events[event]
    return touched  # so that the compiler keeps the loads


@compiled
def _copy_codes(
    column: NDArray[np.integer],
    slots: NDArray[np.int64],
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    codes: NDArray[np.int32],
    level_offsets: NDArray[np.int64],
    out: NDArray[np.int64],
) -> bool:
    levels = codes.shape[1]
    for slot in slots:
        place = places[slot]
        for event in range(begins[slot], begins[slot] + lengths[slot]):
            item = column[event]
            if item < 0 or item >= len(codes) or codes[item, 0] < 0:
                return False
            for level in range(levels):
                out[place + level] = codes[item, level] + level_offsets[level]
            place += levels
    return True
