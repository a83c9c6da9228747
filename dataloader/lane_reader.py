"""`read_steps`: the positions of a rank in each step of a stream -> its samples."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.collate.gather import StoreRows
from evenrank.datasets.lanes import LaneOrder, LaneRows, LaneWindow, Span
from evenrank.datasets.store import SequenceStore

Ints = NDArray[np.int64]

_LANES_PER_PART = 16  # of which whole row groups are in memory at the same time


class _Part(NamedTuple):
    """Some lanes of a window, ascending, in memory."""

    lanes: Ints
    order: LaneRows
    store: SequenceStore
    left_out: dict[str, NDArray[np.bool_]]
    """Per reason, whether each row is no sample: bool [lanes, window_rows]."""


class StepRows(NamedTuple):
    """What a rank has in a step: n samples, and rows that are none."""

    groups: list[StoreRows]
    sample_ids: Ints
    """[n]: rows of the split."""
    left_out: Counter[str]
    """Rows that are no samples, per reason."""
    is_last: bool
    """Whether it is the last step that needs the window in memory."""


def read_steps(
    order: LaneOrder,
    steps: Iterable[Ints],
    *,
    seed: int,
    epoch: int,
    read: Callable[[list[Span]], tuple[SequenceStore, Mapping[str, Ints]]],
    submit: Callable[[Callable[[], _Part]], Callable[[], _Part]],
    num_parts: int,
) -> Iterator[StepRows]:
    """Yield what a rank has in each step, given its `share` of the positions of each; any thread may call `read`.

    A step's positions come after those of earlier steps. `read` returns rows and, per reason, which of them are no
    samples. One window is in memory and, if `submit` has a thread compute it, the next one, in `num_parts` parts.
    """

    def read_lanes(window: LaneWindow, lanes: Ints) -> _Part:
        of_lanes = order.window_of(window, lanes, seed=seed, epoch=epoch)
        store, unusable = read(of_lanes.spans)
        left_out = {}
        for reason, rows in unusable.items():
            is_left_out = np.zeros(len(store), dtype=bool)
            is_left_out[rows] = True
            left_out[reason] = is_left_out[of_lanes.places]
        return _Part(lanes, of_lanes, store, left_out)

    def begin(piece: _Pieces) -> tuple[_Pieces, list[Callable[[], _Part]]]:
        lanes = np.unique(order.places(piece.window, np.concatenate(piece.positions))[0])
        parts = np.array_split(lanes, max(num_parts, -(-len(lanes) // _LANES_PER_PART)))
        return piece, [submit(partial(read_lanes, piece.window, part)) for part in parts if len(part)]

    begun = map(begin, _by_window(order, steps))
    step, parts, following = _Step(), list[_Part](), next(begun, None)
    while following is not None:
        piece, waiting = following
        parts = []  # so that they need not be in memory with the next ones
        parts = [wait() for wait in waiting]
        following = next(begun, None)
        last = len(piece.positions) - piece.goes_on - 1
        for number, taken in enumerate(_take(order, piece, parts)):
            step.add(*taken)
            del taken
            if number <= last:
                yield step.rows(is_last=number == last)
                step = _Step()


class _Pieces(NamedTuple):
    """The positions of consecutive steps that are in a window."""

    window: LaneWindow
    positions: list[Ints]
    """Of each step."""
    goes_on: bool
    """Whether the last step goes on in the next window."""


def _by_window(order: LaneOrder, steps: Iterable[Ints]) -> Iterator[_Pieces]:
    window, pieces = LaneWindow(0, 0, 0, 0), list[Ints]()
    for positions in steps:
        while (later := positions[positions >= window.end]).size:
            yield _Pieces(window, [*pieces, positions[positions < window.end]], True)
            window, pieces, positions = order.window(int(later.min())), [], later
        pieces.append(positions)
    if pieces:
        yield _Pieces(window, pieces, False)


def _take(order: LaneOrder, piece: _Pieces, parts: list[_Part]) -> Iterator[tuple[list[StoreRows], Ints, Counter[str]]]:
    """Yield what a window has of each step: samples by part, numbered from 0, their ids, and rows that are none."""
    if not parts:
        yield from ([([], np.empty(0, dtype=np.int64), Counter[str]())] * len(piece.positions))
        return
    lanes, places = order.places(piece.window, np.concatenate(piece.positions))
    indices = np.searchsorted(np.concatenate([part.lanes for part in parts]), lanes), places
    rows, in_store = (np.concatenate(each)[indices] for each in zip(*(part.order[:2] for part in parts), strict=True))
    steps = np.repeat(np.arange(len(piece.positions)), [len(positions) for positions in piece.positions])
    # By step and part, in which order positions are already.
    keys = steps * len(parts) + np.searchsorted([part.lanes[0] for part in parts], lanes, side="right") - 1
    left_out = [Counter[str]() for _ in piece.positions]
    is_sample = np.ones(len(keys), dtype=bool)
    for reason in parts[0].left_out:
        is_left_out = np.concatenate([part.left_out[reason] for part in parts])[indices]
        is_sample &= ~is_left_out
        for of_step, count in zip(
            left_out, np.bincount(steps[is_left_out], minlength=len(left_out)).tolist(), strict=True
        ):
            of_step[reason] += count
    rows, in_store, keys = rows[is_sample], in_store[is_sample], keys[is_sample]
    bounds = np.searchsorted(keys, np.arange(len(left_out) * len(parts) + 1)).tolist()
    for step, of_step in enumerate(left_out):
        begin, *ends = bounds[step * len(parts) : (step + 1) * len(parts) + 1]
        groups, first = [], begin
        for part, end in zip(parts, ends, strict=True):
            if first < end:
                groups.append(StoreRows(part.store, in_store[first:end], np.arange(first, end) - begin))
            first = end
        yield groups, rows[begin:first], of_step


class _Step:
    """What was taken for a step, from one window after the other."""

    def __init__(self) -> None:
        self._groups: list[StoreRows] = []
        self._sample_ids = [np.empty(0, dtype=np.int64)]
        self._left_out: Counter[str] = Counter()
        self._num_samples = 0

    def add(self, groups: list[StoreRows], sample_ids: Ints, left_out: Counter[str]) -> None:
        """Add what a window has."""
        self._groups += (StoreRows(store, rows, self._num_samples + indices) for store, rows, indices in groups)
        self._sample_ids.append(sample_ids)
        self._left_out.update(left_out)
        self._num_samples += len(sample_ids)

    def rows(self, *, is_last: bool) -> StepRows:
        """Return all that was taken, without rows that are no samples."""
        return StepRows(self._groups, np.concatenate(self._sample_ids), self._left_out, is_last)
