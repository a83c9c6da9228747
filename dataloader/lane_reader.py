"""`read_steps`: lanes of a stream, whose windows are shuffle buffers -> the samples of each step of a rank."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.collate.gather import StoreRows
from evenrank.datasets.lanes import EpochLanes, LaneRows, LaneWindow, Span
from evenrank.datasets.order import StepSchedule
from evenrank.datasets.store import SequenceStore

Ints = NDArray[np.int64]


class ReadRows(NamedTuple):
    """Rows in memory."""

    store: SequenceStore
    left_out: Mapping[str, NDArray[np.bool_]]
    """Per reason, whether each row is no sample: bool [rows]."""


class _Part(NamedTuple):
    """Some lanes of a window, in memory."""

    lanes: Ints
    """[n], ascending."""
    order: LaneRows
    read: ReadRows


class StepRows(NamedTuple):
    """What a rank has in a step: n samples, and rows that are none."""

    groups: list[StoreRows]
    sample_ids: Ints
    """[n]: rows of the split."""
    left_out: Counter[str]
    """Rows that are no samples, per reason."""


Submit = Callable[[Callable[[], _Part]], Callable[[], _Part]]


def read_steps(
    order: EpochLanes,
    schedule: StepSchedule,
    *,
    rank: int,
    world_size: int,
    read: Callable[[list[Span]], ReadRows],
    submit: Submit,
    num_parts: int,
) -> Iterator[StepRows]:
    """Yield what a rank has in each step of a schedule over all rows; any thread may call `read`.

    One window is in memory and, if `submit` has a thread compute it, the next one, in `num_parts` parts.
    """
    steps = _Steps(order, schedule, rank, world_size)

    def read_part(window: LaneWindow, lanes: Ints) -> _Part:
        rows = order.rows(window, lanes)
        return _Part(lanes, rows, read(rows.spans))

    def begin_next() -> tuple[LaneWindow, list[Callable[[], _Part]]] | None:
        if (following := next(steps.windows, None)) is None:
            return None
        window, lanes = following
        return window, [submit(partial(read_part, window, each)) for each in np.array_split(lanes, num_parts)]

    window, parts = LaneWindow(0, 0, 0, 0), list[_Part]()
    following = begin_next()
    for _ in range(schedule.num_steps):
        taken = _Taken()
        while not steps.shares or taken.add(steps.shares[0], order, window, parts):
            assert following is not None
            window, waiting = following
            parts = []  # so that they need not be in memory with the next ones
            parts = [wait() for wait in waiting]
            following = begin_next()
        steps.shares.popleft()
        yield taken.rows()


class _Steps:
    """The positions of a rank in each step, and the lanes that it needs for them in each window."""

    def __init__(self, order: EpochLanes, schedule: StepSchedule, rank: int, world_size: int) -> None:
        self.shares: deque[Ints] = deque()  # of the steps that begin in windows that were yielded, and are not done
        self.windows = self._find(order, schedule, rank, world_size)

    def _find(
        self, order: EpochLanes, schedule: StepSchedule, rank: int, world_size: int
    ) -> Iterator[tuple[LaneWindow, Ints]]:
        step, num_steps = 0, schedule.num_steps
        rest = np.empty(0, dtype=np.int64)  # positions of these steps in later windows
        for window in order.windows(schedule.first_position(0, 0)):
            own = [rest]
            while step < num_steps and (first := schedule.first_position(step, 0)) < window.end:
                end = schedule.position_after(step)
                own.append(order.share(first, end, rank=rank, world_size=world_size))
                self.shares.append(own[-1])
                step += 1
            positions = np.concatenate(own)
            within, rest = np.split(positions, [np.searchsorted(positions, window.end)])
            yield window, np.unique(order.places(window, within)[0])


class _Taken:
    """What was taken for a step, from one window after the other."""

    def __init__(self) -> None:
        self._num_positions = 0
        self._parts: list[tuple[_Part, Ints, Ints, NDArray[np.bool_]]] = []
        self._left_out: Counter[str] = Counter()

    def add(self, positions: Ints, order: EpochLanes, window: LaneWindow, parts: list[_Part]) -> bool:
        """Take from a window what it has of a step's positions; return whether some are in later windows."""
        end = int(np.searchsorted(positions, window.end))
        lanes, rows = order.places(window, positions[self._num_positions : end])
        for part in parts if len(lanes) else ():
            own = np.flatnonzero((lanes >= part.lanes[0]) & (lanes <= part.lanes[-1])) if len(part.lanes) else lanes[:0]
            index = np.searchsorted(part.lanes, lanes[own]), rows[own]
            places = part.order.places[index]
            is_sample = np.ones(len(own), dtype=bool)
            for reason, is_left_out in part.read.left_out.items():
                self._left_out[reason] += int(is_left_out[places].sum())
                is_sample &= ~is_left_out[places]
            self._parts.append((part, self._num_positions + own, np.stack([places, part.order.rows[index]]), is_sample))
        self._num_positions = max(end, self._num_positions)
        return end < len(positions)

    def rows(self) -> StepRows:
        """Return all that was taken, in the order of positions, without rows that are no samples."""
        is_sample = np.zeros(self._num_positions, dtype=bool)
        sample_ids = np.empty(self._num_positions, dtype=np.int64)
        for _, positions, (_, ids), is_sample_of_part in self._parts:
            is_sample[positions], sample_ids[positions] = is_sample_of_part, ids
        indices = np.cumsum(is_sample) - 1
        groups = [
            StoreRows(part.read.store, places[is_own], indices[positions[is_own]])
            for part, positions, (places, _), is_own in self._parts
            if is_own.any()
        ]
        return StepRows(groups, sample_ids[is_sample], self._left_out)
