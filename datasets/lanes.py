"""`LaneOrder`: the order of a stream, in which ranks read their own parts of a split, one row after the other.

L lanes read a block each, L ranges of rows, and then the next L blocks. The rows of a lane come shuffled in windows of
`window_rows`, and position p is the next row of one of the lanes in turn:

    L = 4     position            0 1 2 3 | 4 5 6 7 | 8 ...
              column, p mod L     0 1 2 3 | 0 1 2 3 | 0
              lane                0 2 1 3 | 0 2 1 3 | 0

Everything follows from the epoch and the position, whatever the number of ranks. These divide the positions of each
step: sorted by lane, into equal parts. Lanes come in the order of a radical inverse (of van der Corput), so that any
few consecutive positions are spread evenly over all of them. A rank then meets the same lanes in every step, up to one
at each border.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.order import derive_seed, permute

Ints = NDArray[np.int64]

# The row group at the end of a block is read twice. So blocks should be long, but shorter ones mix better.
_MIN_WINDOWS, _WINDOWS = 16, 128  # of a block: at least, so that small splits have fewer lanes; of large splits
_OFFSET = -2  # index of the seed of where an epoch begins


class Span(NamedTuple):
    """Rows first..end-1 that are read, after which those from `end` on usually come next in the lane."""

    first: int
    end: int
    lane: int


class LaneWindow(NamedTuple):
    """Positions first..end-1, the next `window_rows` rows of each lane of a round, or fewer at its end."""

    first: int
    end: int
    round: int
    row: int
    """Rows of each lane that precede, in the round."""


class LaneRows(NamedTuple):
    """The rows of some lanes in a window, in the order of the epoch."""

    rows: Ints
    """[lanes, window_rows]: rows of the split; undefined after the last one of a lane."""
    places: Ints
    """[lanes, window_rows]: where each of them is among what the spans have; any of these after the last one."""
    spans: list[Span]
    """What to read."""


class LaneOrder:
    """Rows of a split by lanes.

    Args:
        num_rows: rows of the split.
        lanes: a split of few rows has half as many, or a quarter, and so on.
        window_rows: rows of a lane that are shuffled together.
    """

    def __init__(self, num_rows: int, *, lanes: int, window_rows: int) -> None:
        while lanes > 1 and num_rows < lanes * window_rows * _MIN_WINDOWS:
            lanes //= 2
        self.num_samples = num_rows
        self.num_lanes = lanes
        self._window_rows = window_rows
        self._num_rounds = max(1, num_rows // (lanes * window_rows * _WINDOWS))
        self._num_blocks = lanes * self._num_rounds
        self._block_rows = num_rows // self._num_blocks
        self._column_of_lane = radical_inverses(lanes)
        # Small integers are sorted much faster.
        self._lane_of_column = np.argsort(self._column_of_lane).astype(np.min_scalar_type(lanes))

    def rows(self, positions: Ints, *, seed: int, epoch: int) -> Ints:
        """Return the rows at positions."""
        rows, flat = np.empty_like(positions), positions.reshape(-1)
        left = np.argsort(flat, kind="stable")
        while len(left):
            window = self.window(int(flat[left[0]]))
            own, left = np.split(left, [np.searchsorted(flat[left], window.end)])
            lanes, places = self.places(window, flat[own])
            unique, indices = np.unique(lanes, return_inverse=True)
            rows.reshape(-1)[own] = self.window_of(window, unique, seed=seed, epoch=epoch).rows[indices, places]
        return rows

    def fingerprint(self) -> tuple[object, ...]:
        """Return the numbers of rows, of lanes and of rows in a window."""
        return ("lanes", self.num_samples, self.num_lanes, self._window_rows)

    def share(self, positions: Ints, rank: int, world_size: int) -> Ints:
        """Return those positions of a step, ascending, that a rank has: int64 [n], by lane and ascending in each."""
        bounds = [len(positions) * each // world_size for each in (rank, rank + 1)]
        by_lane = np.argsort(self._lane_of_column[positions % self.num_lanes], kind="stable")
        return positions[by_lane[slice(*bounds)]]

    def window(self, position: int) -> LaneWindow:
        """Return the window that a position is in."""
        row = position // self.num_lanes
        number = min(row // self._block_rows, self._num_rounds)
        first = number * self._block_rows  # of the round
        begin = row - (row - first) % self._window_rows
        # The rows that are left after the last round, fewer than there are blocks, are another one.
        end = self.num_samples if number == self._num_rounds else (first + self._block_rows) * self.num_lanes
        end = min((begin + self._window_rows) * self.num_lanes, end)
        return LaneWindow(begin * self.num_lanes, end, number, begin - first)

    def places(self, window: LaneWindow, positions: Ints) -> tuple[Ints, Ints]:
        """Return the lanes of positions in a window, and how many rows of these precede in it: int64 [n] each."""
        rows, columns = np.divmod(positions - window.first, self.num_lanes)
        return self._lane_of_column[columns].astype(np.int64), rows

    def window_of(self, window: LaneWindow, lanes: Ints, *, seed: int, epoch: int) -> LaneRows:
        """Return the rows that lanes, ascending, have in a window."""
        if window.round == self._num_rounds:
            blocks = self._num_blocks + lanes
            rest = self._rows_in(self.num_samples - self._num_blocks * self._block_rows, np.arange(self.num_lanes))
            firsts = self._num_blocks * self._block_rows + (np.cumsum(rest) - rest)[lanes]
        else:
            blocks = permute(window.round * self.num_lanes + lanes, self._num_blocks, seed=seed, epoch=epoch)
            firsts = blocks * self._block_rows
        counts = self._rows_in(window.end - window.first, lanes)
        # So that blocks, and what is left after them, are others in each epoch.
        offset = permute(np.zeros(1, np.int64), self.num_samples, seed=derive_seed(seed, _OFFSET), epoch=epoch)
        firsts = (firsts + window.row + offset) % self.num_samples
        sizes, all_rows = counts.tolist(), np.arange(self._window_rows)
        shuffled = np.zeros((len(lanes), self._window_rows), dtype=np.int64)
        for of_lane, block, size in zip(shuffled, blocks.tolist(), sizes, strict=True):
            row_seed = derive_seed(seed, block) + window.row + 1
            of_lane[:size] = permute(all_rows[:size], size, seed=row_seed, epoch=epoch)
        rows = (firsts[:, None] + shuffled) % self.num_samples
        places = (np.cumsum(counts) - counts)[:, None] + shuffled
        spans: list[Span] = []
        for lane, first, count in zip(lanes.tolist(), firsts.tolist(), sizes, strict=True):
            for begin, end in ((first, min(first + count, self.num_samples)), (0, first + count - self.num_samples)):
                if spans and spans[-1].end == begin < end:
                    spans[-1] = Span(spans[-1].first, end, lane)
                elif begin < end:
                    spans.append(Span(begin, end, lane))
        return LaneRows(rows, places, spans)

    def _rows_in(self, num_positions: int, lanes: Ints) -> Ints:
        """Return how many of the first positions of a round are of these lanes: int64 [n]."""
        return (num_positions + self.num_lanes - 1 - self._column_of_lane[lanes]) // self.num_lanes


def radical_inverses(count: int) -> Ints:
    """Return 0..count-1 with their digits reversed, in the mixed radix of the prime factors of `count`: int64 [count].

    Any run of consecutive numbers is spread evenly over the result, whose inverse does the same.
    """
    digits, rest, radix = np.arange(count), np.zeros(count, dtype=np.int64), 2
    place = count
    while place > 1:
        if place % radix:
            radix += 1
            continue
        place //= radix
        rest += digits % radix * place
        digits //= radix
    return rest
