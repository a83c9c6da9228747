"""Histories of which a random part is trained: `StochasticLength`, drawn by compiled loops.

events     a b c d e f g h i | ?      max_history_length = 9, alpha = 1.27, newest = 2: 4 = int(9^0.635) events
an epoch     b     e     h i          with probability 1 - (4 / 9)^2, else all of them
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.hashing import draw_unit, mix64
from evenrank.dataloader.collate.gather import DrawKey, HistorySpans, Ints
from evenrank.dataloader.collate.selection import FindPlaces
from evenrank.dataloader.config import StochasticLength
from evenrank.datasets.store import SequenceStore


class EventDraws:
    """Draws the events of histories. Any thread may use it."""

    def __init__(self, settings: StochasticLength, max_history_length: int) -> None:
        self.within = max_history_length
        self._limit, self._newest = settings.limit(max_history_length), settings.newest

    def choose(self, store: SequenceStore, spans: HistorySpans, key: DrawKey) -> tuple[Ints, FindPlaces]:
        """Return how many events of each of m histories are kept, [m], and what draws them."""
        words = mix64(~key.words())  # other ones than those that negatives are drawn by
        lengths, sizes = spans.history_ends - spans.begins, np.empty_like(spans.begins)
        _draw_sizes(words, lengths, self._limit, sizes)
        return sizes, partial(_draw_places, words, *spans, sizes, self._newest)


@compiled
def _draw_sizes(words: NDArray[np.uint64], lengths: Ints, limit: float, out: Ints) -> None:
    for sample in range(len(out)):
        length = lengths[sample]
        is_whole = length <= limit or draw_unit(words[sample], 0) * length * length < limit * limit
        out[sample] = length if is_whole else np.int64(limit)


@compiled
def _draw_places(
    words: NDArray[np.uint64],
    begins: Ints,
    history_ends: Ints,
    ends: Ints,
    sizes: Ints,
    newest: int,
    out_begins: Ints,
    out: Ints,
) -> None:
    """Draw the events before the newest ones without replacement, each with the probability `needed / left`.

    This is selection sampling (Fan, Muller and Rezucha, "Development of sampling plans by using sequential (item by
    item) selection techniques and digital computers", 1962), in the order of time.
    """
    for sample in range(len(sizes)):
        begin, place, needed = begins[sample], out_begins[sample], sizes[sample] - newest
        for index in range(begin, ends[sample]):
            left = history_ends[sample] - newest - index  # below 1, as `needed`, from the newest events on
            if needed >= left or draw_unit(words[sample], index - begin + 1) * left < needed:
                out[place] = index
                place += 1
                needed -= 1
