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
        left_out = {reason: np.isin(of_lanes.places, rows) for reason, rows in unusable.items()}
        return _Part(lanes, of_lanes, store, left_out)

    def begin(piece: _Pieces) -> tuple[_Pieces, list[Callable[[], _Part]]]:
        lanes = np.unique(order.places(piece.window, np.concatenate(piece.positions))[0])
        parts = np.array_split(lanes, max(num_parts, -(-len(lanes) // _LANES_PER_PART)))
        return piece, [submit(partial(read_lanes, piece.window, part)) for part in parts if len(part)]

    begun = map(begin, _by_window(order, steps))
    step, parts, following = _Step(), list[_Part](), next(begun, None)
    while following is not None:
        (window, pieces, goes_on), waiting = following
        parts = []  # so that they need not be in memory with the next ones
        parts = [wait() for wait in waiting]
        following = next(begun, None)
        for number, positions in enumerate(pieces):
            step.add(*order.places(window, positions), parts)
            if number < len(pieces) - goes_on:
                yield step.rows(is_last=number == len(pieces) - goes_on - 1)
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


class _Step:
    """What was taken for a step, from one window after the other."""

    def __init__(self) -> None:
        self._groups: list[StoreRows] = []
        self._sample_ids = [np.empty(0, dtype=np.int64)]
        self._left_out: Counter[str] = Counter()
        self._num_samples = 0

    def add(self, lanes: Ints, places: Ints, parts: list[_Part]) -> None:
        """Take rows of a window, given by their lanes, ascending, and their places in these."""
        for part in parts:
            own = slice(*np.searchsorted(lanes, (part.lanes[0], part.lanes[-1] + 1)))
            indices = np.searchsorted(part.lanes, lanes[own]), places[own]
            is_sample = np.ones(len(indices[1]), dtype=bool)
            for reason, is_left_out in part.left_out.items():
                self._left_out[reason] += int(is_left_out[indices].sum())
                is_sample &= ~is_left_out[indices]
            if is_sample.any():
                rows = part.order.places[indices][is_sample]
                self._groups.append(StoreRows(part.store, rows, self._num_samples + np.arange(len(rows))))
                self._sample_ids.append(part.order.rows[indices][is_sample])
                self._num_samples += len(rows)

    def rows(self, *, is_last: bool) -> StepRows:
        """Return all that was taken, without rows that are no samples."""
        return StepRows(self._groups, np.concatenate(self._sample_ids), self._left_out, is_last)
