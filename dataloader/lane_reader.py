"""`read_steps`: the positions of a rank in each step of a stream -> its samples."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.collate.gather import StoreRows
from evenrank.datasets.lanes import LaneOrder, LaneWindow, Span
from evenrank.datasets.store import SequenceStore

Ints = NDArray[np.int64]


class StepRows(NamedTuple):
    """What a rank has in a step: n samples, and rows that are none."""

    groups: list[StoreRows]
    sample_ids: Ints
    """[n]: rows of the split."""
    left_out: Counter[str]
    """Rows that are no samples, per reason."""
    is_last: bool = False
    """Whether it is the last step that needs the window in memory."""

    def followed_by(self, others: "StepRows") -> "StepRows":
        """Return these samples and others of the same step."""
        first = len(self.sample_ids)
        groups = [StoreRows(store, rows, first + indices) for store, rows, indices in others.groups]
        sample_ids = np.append(self.sample_ids, others.sample_ids)
        return StepRows(self.groups + groups, sample_ids, self.left_out + others.left_out)


class _Pieces(NamedTuple):
    """The positions of consecutive steps that are in a window."""

    window: LaneWindow
    positions: list[Ints]
    """Of each step."""
    goes_on: bool
    """Whether the last step goes on in the next window."""


def read_steps(
    order: LaneOrder,
    steps: Iterable[Ints],
    *,
    seed: int,
    epoch: int,
    read: Callable[[list[Span]], tuple[SequenceStore, Mapping[str, Ints]]],
    submit: Callable[[Callable[[], list[StepRows]]], Callable[[], list[StepRows]]],
    num_parts: int,
) -> Iterator[StepRows]:
    """Yield what a rank has in each step, given its `share` of the positions of each; any thread may call `read`.

    A step's positions come after those of earlier steps. `read` returns rows and, per reason, which of them are no
    samples. One window is in memory and, if `submit` has a thread compute it, the next one, in `num_parts` parts.
    """

    def read_lanes(piece: _Pieces, own: Ints) -> list[StepRows]:
        """Return what some lanes, ascending, have of each step."""
        of_lanes = order.window_of(piece.window, own, seed=seed, epoch=epoch)
        store, unusable = read(of_lanes.spans)
        lanes, places = order.places(piece.window, np.concatenate(piece.positions))
        is_own = np.isin(lanes, own)
        indices = np.searchsorted(own, lanes[is_own]), places[is_own]
        rows, sample_ids = of_lanes.places[indices], of_lanes.rows[indices]
        steps = np.repeat(np.arange(len(piece.positions)), [len(each) for each in piece.positions])[is_own]
        is_sample = np.ones(len(rows), dtype=bool)
        left_out = [Counter[str]() for _ in piece.positions]
        for reason, of_store in unusable.items():
            is_left_out = np.isin(rows, of_store)
            is_sample &= ~is_left_out
            for of_step, count in zip(left_out, np.bincount(steps[is_left_out], minlength=len(left_out)), strict=True):
                of_step[reason] += int(count)
        ends = np.searchsorted(steps[is_sample], np.arange(1, len(left_out)))
        split = (np.split(each[is_sample], ends) for each in (rows, sample_ids))
        return [
            StepRows([StoreRows(store, rows, np.arange(len(rows)))], sample_ids, of_step)
            for rows, sample_ids, of_step in zip(*split, left_out, strict=True)
        ]

    def begin(piece: _Pieces) -> tuple[_Pieces, list[Callable[[], list[StepRows]]]]:
        lanes = np.unique(order.places(piece.window, np.concatenate(piece.positions))[0])
        parts = np.array_split(lanes, max(1, min(num_parts, len(lanes))))
        return piece, [submit(partial(read_lanes, piece, part)) for part in parts]

    begun = map(begin, _by_window(order, steps))
    before, of_parts, following = list[StepRows](), list[list[StepRows]](), next(begun, None)
    while following is not None:
        piece, waiting = following
        of_parts = []  # so that they need not be in memory with the next ones
        of_parts = [wait() for wait in waiting]
        following = next(begun, None)
        num_steps = len(piece.positions) - piece.goes_on
        for number, of_step in enumerate(zip(*of_parts, strict=True), 1):
            step = reduce(StepRows.followed_by, (*before, *of_step))
            before = [step] if number > num_steps else []
            if not before:
                yield step._replace(is_last=number == num_steps)
            del step, of_step


def _by_window(order: LaneOrder, steps: Iterable[Ints]) -> Iterator[_Pieces]:
    window, pieces = LaneWindow(0, 0, 0, 0), list[Ints]()
    for positions in steps:
        while (later := positions[positions >= window.end]).size:
            yield _Pieces(window, [*pieces, positions[positions < window.end]], True)
            window, pieces, positions = order.window(int(later.min())), [], later
        pieces.append(positions)
    if pieces:
        yield _Pieces(window, pieces, False)
