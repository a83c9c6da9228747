"""The order of a stream: which row of a split comes at each position of an epoch, and which rank reads it.

An epoch is a sequence of rounds. In a round each of L lanes reads a block, a range of rows, from a row on that differs
from epoch to epoch to its end, and then up to that row. The rows of a lane come shuffled in windows of `window_rows`,
and position q of a round is the next row of one of the lanes in turn:

    L = 4     position q of the round    0 1 2 3 | 4 5 6 7 | 8 ...
              column, q mod L            0 1 2 3 | 0 1 2 3 | 0
              lane                       0 2 1 3 | 0 2 1 3 | 0

Everything follows from (epoch, position), whatever the number of ranks. Those divide the lanes, in their order, into
equal parts in each step. Lanes come in the order of a radical inverse (of van der Corput), so that any few consecutive
positions are spread evenly over all lanes. A rank then meets the same lanes in every step, up to one at each border.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.order import derive_seed, permute

Ints = NDArray[np.int64]

# Longer blocks are cheaper to read, because the row groups at their ends are read twice; shorter ones mix better.
_WINDOWS_PER_BLOCK = 64


class Span(NamedTuple):
    """Rows first..end-1 that are read, after which the rows up to `until` come next."""

    first: int
    end: int
    until: int


class LaneWindow(NamedTuple):
    """The next `num_rows` rows of each lane of a round, or fewer at its end: positions first..end-1."""

    first: int
    end: int
    round_first: int
    """Position at which the round begins."""
    row: int
    """Rows of each lane that precede, in the round."""


class LaneRows(NamedTuple):
    """The rows of some lanes in a window."""

    rows: Ints
    """[lanes, window_rows]: rows of the split, in the order of the epoch; -1 after the last one of a lane."""
    places: Ints
    """[lanes, window_rows]: where each of them is among what the spans have."""
    spans: list[Span]
    """What to read."""


class _Round(NamedTuple):
    """The blocks of a round, by lane: int64 [lanes] each."""

    number: Ints
    first: Ints
    size: Ints
    rotation: Ints


class EpochLanes:
    """The order of an epoch.

    Args:
        num_rows: rows of the split.
        max_lanes: there are fewer if not all would have a whole window.
        window_rows: rows of a lane that are shuffled together.
    """

    def __init__(self, num_rows: int, *, max_lanes: int, window_rows: int, seed: int, epoch: int) -> None:
        self.num_rows = num_rows
        self.window_rows = window_rows
        self.num_lanes = lanes = num_lanes(num_rows, max_lanes, window_rows)
        self._seed = seed
        self._epoch = epoch
        self._num_rounds = max(1, num_rows // (lanes * window_rows * _WINDOWS_PER_BLOCK))
        self._block_rows = num_rows // (lanes * self._num_rounds)
        self._round_rows = lanes * self._block_rows
        # Blocks have equally many rows, and what is left, less than one row per block, comes in a round of its own.
        self._num_left = num_rows - self._num_rounds * self._round_rows
        of_left = permute(np.zeros(1, dtype=np.int64), self._num_rounds + 1, seed=derive_seed(seed, -2), epoch=epoch)
        self._place_of_left = int(of_left[0])
        self._column_of_lane = radical_inverses(lanes)
        self._lane_of_column = np.argsort(self._column_of_lane)

    def share(self, first: int, end: int, *, rank: int, world_size: int) -> Ints:
        """Return the positions, of first..end-1, of one of the ranks that divide them: int64 [n], ascending."""
        lanes, begin = self.num_lanes, first
        firsts, counts = [], []  # per round, by lane
        while begin < end:
            round_first, round_end = self._bounds(self._place(begin))
            stop = min(end, round_end)
            # A lane has positions round_first + column + row * lanes.
            offsets = lanes - 1 - self._column_of_lane - round_first
            rows = (begin + offsets) // lanes
            firsts.append(round_first + self._column_of_lane + rows * lanes)
            counts.append((stop + offsets) // lanes - rows)
            begin = stop
        if not counts:
            return np.empty(0, dtype=np.int64)
        first_of, count_of = np.stack(firsts, axis=1).reshape(-1), np.stack(counts, axis=1).reshape(-1)
        ends = np.cumsum(count_of)
        starts = ends - count_of
        total = end - first
        own_first, own_end = total * rank // world_size, total * (rank + 1) // world_size
        skipped = np.clip(own_first - starts, 0, count_of)
        taken = np.clip(own_end - starts, 0, count_of) - skipped
        own = np.flatnonzero(taken)
        before = np.cumsum(taken[own]) - taken[own]
        steps = np.arange(own_end - own_first) - np.repeat(before, taken[own])
        return np.sort(np.repeat(first_of[own] + skipped[own] * lanes, taken[own]) + steps * lanes)

    def windows(self, position: int) -> Iterator[LaneWindow]:
        """Yield the windows from that of a position on."""
        while position < self.num_rows:
            round_first, round_end = self._bounds(self._place(position))
            of_window = self.num_lanes * self.window_rows
            first = position - (position - round_first) % of_window
            end = min(first + of_window, round_end)
            yield LaneWindow(first, end, round_first, (first - round_first) // self.num_lanes)
            position = end

    def places(self, window: LaneWindow, positions: Ints) -> tuple[Ints, Ints]:
        """Return the lanes of positions in a window, and how many rows of these precede in it: int64 [n] each."""
        rows, columns = np.divmod(positions - window.round_first, self.num_lanes)
        return self._lane_of_column[columns], rows - window.row

    def rows(self, window: LaneWindow, lanes: Ints) -> LaneRows:
        """Return the rows of some lanes in a window, in the order of the epoch."""
        blocks = self._round(self._place(window.first))
        rows, places = np.full((2, len(lanes), self.window_rows), -1, dtype=np.int64)
        spans: list[Span] = []
        num_read = 0
        for index, lane in enumerate(lanes.tolist()):
            number, first, size, rotation = (int(values[lane]) for values in blocks)
            count = min(self.window_rows, size - window.row)
            if count <= 0:
                continue
            seed = derive_seed(self._seed, number) + window.row + 1
            shuffled = permute(np.arange(count), count, seed=seed, epoch=self._epoch)
            begin = rotation + window.row
            rows[index, :count] = first + (begin + shuffled) % size
            places[index, :count] = num_read + shuffled
            num_read += count
            if begin < size:
                spans.append(Span(first + begin, first + min(begin + count, size), first + size))
            if (end := begin + count) > size:
                spans.append(Span(first + max(begin - size, 0), first + end - size, first + rotation))
        return LaneRows(rows, places, spans)

    def _place(self, position: int) -> int:
        """Return how many rounds precede that of a position."""
        begin, end = self._bounds(self._place_of_left)
        if position < begin:
            return position // self._round_rows
        return self._place_of_left if position < end else self._place_of_left + 1 + (position - end) // self._round_rows

    def _bounds(self, place: int) -> tuple[int, int]:
        """Return the first position of a round, and that after its last one."""
        if place <= self._place_of_left:
            first = place * self._round_rows
            return first, first + (self._num_left if place == self._place_of_left else self._round_rows)
        first = (place - 1) * self._round_rows + self._num_left
        return first, first + self._round_rows

    def _round(self, place: int) -> _Round:
        lanes, columns, num_blocks = self.num_lanes, self._column_of_lane, self.num_lanes * self._num_rounds
        if place == self._place_of_left:
            size = (self._num_left - columns + lanes - 1) // lanes
            first = num_blocks * self._block_rows + np.cumsum(size) - size
            return _Round(num_blocks + np.arange(lanes), first, size, np.zeros(lanes, dtype=np.int64))
        numbers = (place - (place > self._place_of_left)) * lanes + np.arange(lanes)
        blocks = permute(numbers, num_blocks, seed=self._seed, epoch=self._epoch)
        size, rotation = np.full(lanes, self._block_rows), np.zeros(lanes, dtype=np.int64)
        if self._block_rows > self.window_rows:
            seed = derive_seed(self._seed, -3)
            rotation = permute(blocks % self._block_rows, self._block_rows, seed=seed, epoch=self._epoch)
        return _Round(blocks, blocks * self._block_rows, size, rotation)


def num_lanes(num_rows: int, max_lanes: int, window_rows: int) -> int:
    """Return the number of lanes of a split: `max_lanes`, or fewer so that each has at least one whole window."""
    return max(1, min(max_lanes, num_rows // window_rows))


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
