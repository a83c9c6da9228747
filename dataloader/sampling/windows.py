"""`WindowedOrder`: the samples of each window of steps, step by step as they were assigned; see `plan`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.order import SampleOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """The windows of the positions of an epoch."""

    start: int
    # End of the first windows: they have the pending samples of a window that a job was resumed in, up to the end of a
    # step.
    first_end: int
    end: int  # end of the last full step; a step that is not full has no window
    samples_per_step: int
    steps: int  # of a window; the last one may have fewer

    def bounds(self, position: int) -> tuple[int, int]:
        """Return the start and the end of the window that has this position; from `end` on, the position twice."""
        if position >= self.end:
            return position, position
        size = self.steps * self.samples_per_step
        start, end = (self.start, self.first_end) if position < self.first_end else (self.first_end, self.end)
        first = position - (position - start) % size
        return first, min(first + size, end)


AssignWindow = Callable[..., NDArray[np.integer[Any]]]
"""Called as `(order, first, end, *, seed, epoch)`: assigns the samples of a window of an order to its steps.

Returns the indices of the samples at positions first..end-1, step by step: integers [end - first]."""


class WindowedOrder:
    """An order in which the samples of each window come step by step, as `assign_window` assigns them."""

    def __init__(self, order: SampleOrder, windows: Windows, assign_window: AssignWindow) -> None:
        self.windows = windows
        self.underlying = order
        self.num_samples = order.num_samples
        self._assign_window = assign_window

    def positions(self, places: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the positions in the underlying order of the samples at these places: int64 of the same shape."""
        positions = places.copy()
        left = np.flatnonzero(places < self.windows.end)
        while len(left):
            first, end = self.windows.bounds(int(places[left[0]]))
            in_window = (first <= places[left]) & (places[left] < end)
            of_window, left = left[in_window], left[~in_window]
            indices = self._assign_window(self.underlying, first, end, seed=seed, epoch=epoch)
            positions[of_window] = indices[places[of_window] - first]
            positions[of_window] += first
        return positions

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at these positions."""
        return self.underlying.rows(self.positions(positions, seed=seed, epoch=epoch), seed=seed, epoch=epoch)

    def fingerprint(self) -> tuple[object, ...]:
        """Return everything that the order depends on, besides seed, epoch and costs."""
        return (*self.underlying.fingerprint(), "windows", self.windows)
