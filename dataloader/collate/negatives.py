"""Negatives of samples, drawn where batches are collated: uniformly, by popularity, or hard ones from a file.

Each sample has one set, shared by its candidates or targets: a set per target would multiply the bytes of a batch and
of its exchange. Random words are a function of seed, epoch, sample id, draw and attempt, so a sample has the same
negatives in any batch on any rank. Items are drawn in O(1) by the alias method (Vose, "A linear algorithm for
generating random numbers with a given distribution", 1991). With `known_at`, which items can be drawn depends on the
time of the sample. They are a prefix of all, in the order of their first events, where a draw is a binary search among
cumulative weights, in O(log M). A draw of the user's own items is repeated; after 64 attempts, the drawable items are
tried in turn, and a user who has all of them gets one of these.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.core.hashing import GOLDEN, draw_unit
from evenrank.dataloader.collate.gather import DrawKey, Ints, KeyValues, StoreRows
from evenrank.dataloader.collate.item_lists import Sources, read_item_lists
from evenrank.dataloader.collate.selection import stored_events
from evenrank.dataloader.config import Negatives
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.datasets.continuous_log import LogSource
from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS
from evenrank.datasets.store import NEVER_MS, SequenceStore

Floats = NDArray[np.float32]

NEGATIVES, LOG_Q = "negatives", "log_q"
_ATTEMPTS = 64
_MAX_ITEMS = 1 << 31  # 36 bytes each, or 60
_MIN_SLOTS = 1 << 13  # of a table of the items of a sample; so many fit into the second-level cache


class _Tables(NamedTuple):
    """M cells of probability 1/M each, and tables by item. Items are as in batches: rows of a table with a KeyMap.

    With `known_at`, cells come in the order of their first items' first events, and are of these alone.
    """

    cells: Ints  # [M, 2]: each drawable item, and the one that is drawn instead
    thresholds: NDArray[np.float64]  # [M]: the first one's share of the cell
    log_q: Floats  # of one event for items that are never drawn
    firsts: Ints  # [M] with `known_at`, ascending: the time of the first event of each cell's item; else empty
    cumulative: NDArray[np.float64]  # [M], likewise: sums of weights up to each cell's
    first_of: Ints  # of each item, likewise
    hard_begins: Ints
    hard_ends: Ints
    hard_items: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NegativeSampler:
    """Draws the negatives of samples of opened datasets. Any thread may use it."""

    settings: Negatives
    tables: _Tables
    sources: Sources
    key_map: KeyMap | None

    @classmethod
    def create(cls, settings: Negatives, sources: Sources, key_map: KeyMap | None) -> "NegativeSampler":
        """Count the items of datasets, and read the file of hard negatives."""
        if not sources:
            raise ConfigError("random batches have no items to draw negatives from; leave negatives out")
        if any(isinstance(source, SequenceStore) and ITEM_ID in source.column_maps for source in sources):
            raise ConfigError("negatives are drawn before items are mapped; pass key_maps, and a store without them")
        size = max(source.manifest.vocabulary_sizes[ITEM_ID] for source in sources)
        if size > _MAX_ITEMS:
            raise ConfigError(f"negatives need tables of all {size:,} ids of items; preprocess with --ids item=dense")
        hard = _read_hard(settings.hard, size, key_map, size if key_map is None else key_map.num_embeddings)
        tables = _make_tables(settings, sources, size, key_map, hard)
        return cls(settings=settings, tables=tables, sources=sources, key_map=key_map)

    def before(self, begin_ms: int) -> "NegativeSampler":
        """Return the sampler for a window of time that begins then, with `counted="before"`."""
        size = max(source.manifest.vocabulary_sizes[ITEM_ID] for source in self.sources)
        hard = self.tables.hard_begins, self.tables.hard_ends, self.tables.hard_items
        return replace(self, tables=_make_tables(self.settings, self.sources, size, self.key_map, hard, begin_ms))

    def describe(self) -> str:
        """Return the settings, without the path of the file, and a hash of all that is drawn from."""
        digest = hashlib.sha256(b"".join(array.tobytes() for array in self.tables))
        names = ("count", "by", "alpha", "exclude_own", "num_hard", "fixed", "known_at", "counted")
        settings = [getattr(self.settings, name) for name in names]
        return f"{settings} {digest.hexdigest()[:16]}"

    def values(
        self, groups: Sequence[StoreRows], begins: Ints, ends: Ints, limit: int, key: DrawKey | None
    ) -> dict[str, dict[str, KeyValues]]:
        """Return the fields of negatives of n samples, whose positives are the events begins..ends-1, at most `limit`.

        Without a key, only their lengths are known.
        """
        width, sizes = self.settings.count + self.settings.num_hard, ends - begins
        starts, widths = np.cumsum(sizes) - sizes, np.full(len(begins), width)
        rows = np.arange(len(begins)) * width
        shape = (len(begins) * width, int(sizes.sum())) if key else (0, 0)
        items, negative, positive = np.empty(shape[0], dtype=np.int64), *(np.empty(n, np.float32) for n in shape)
        if key:
            words = (key._replace(epoch=0) if self.settings.fixed else key).words()
            for store, indices, samples in groups:
                events = store.columns[ITEM_ID], store.columns[TIMESTAMP_MS], store.begins[indices]
                own = stored_events(store, ITEM_ID), store.offsets, store.rows_of(indices)
                places = (*events, samples, begins, ends, starts, *own)
                shares = (width, self.settings.num_hard, self.settings.exclude_own)
                _draw(*places, words, *shares, self.tables, items, negative, positive)
        drawn = KeyValues(ITEM_ID, rows, widths, width, array=items)
        of_positives = KeyValues(LOG_Q, starts, sizes, limit, array=positive)
        return {
            NEGATIVES: {ITEM_ID: drawn},
            LOG_Q: {"negative": drawn._replace(array=negative), "positive": of_positives},
        }


def _make_tables(
    settings: Negatives,
    sources: Sources,
    size: int,
    key_map: KeyMap | None,
    hard: tuple[Ints, Ints, Ints],
    before_ms: int = NEVER_MS,
) -> _Tables:
    """Return the tables, with popularity as it was at a time."""
    is_dense = all(source.manifest.ids[ITEM_ID].rule == "dense" for source in sources)
    weights, firsts = np.ones(size), np.full(size, NEVER_MS)
    for source in sources if settings.known_at else ():
        if not isinstance(source, SequenceStore):
            raise ConfigError("streams and logs do not know when items came first; use build_loader, or known_at=False")
        of_source = source.first_times()
        np.minimum(firsts[: len(of_source)], of_source, out=firsts[: len(of_source)])
    if settings.by == "popularity" or not is_dense:
        weights = _count(sources, size, before_ms)
        if not weights.any():  # of the first window
            weights = np.minimum(_count(sources, size, NEVER_MS), 1)
        weights = np.where(weights > 0, weights ** (settings.alpha if settings.by == "popularity" else 0), 0)
    weights[: int(is_dense)] = 0  # unknown
    if settings.known_at:
        weights[firsts == NEVER_MS] = 0
        if not firsts[firsts < NEVER_MS].any():  # as of a folder of Parquet files
            raise ConfigError("known_at needs the times of the events of train, and there are none; leave it out")
    items, total = np.flatnonzero(weights), weights.sum()
    if not len(items):
        raise ConfigError("negatives are drawn from the items of the split 'train', which has none; add events")
    items = items[np.argsort(firsts[items], kind="stable")]
    weights, firsts = weights[items], firsts[items]
    rows, num_rows = (items, size) if key_map is None else (key_map(items), key_map.num_embeddings)
    log_q, first_of = np.full(num_rows, -np.log(total), dtype=np.float32), np.full(num_rows, NEVER_MS)
    log_q[rows], first_of[rows] = np.log(weights / total), firsts
    thresholds = weights * len(items) / total
    cells = np.stack([rows, rows[_find_aliases(thresholds)]], axis=1)
    end = None if settings.known_at else 0
    return _Tables(cells, thresholds, log_q, firsts[:end], np.cumsum(weights)[:end], first_of[:end], *hard)


def _count(sources: Sources, size: int, before_ms: int) -> NDArray[np.float64]:
    """Return the events of each item before a time, of all sources."""
    counts = np.zeros(size)
    for source in sources:
        if isinstance(source, LogSource):
            raise ConfigError("a log that grows has no counts of its items; use dense ids and by='uniform'")
        of_source = source.item_counts(before_ms) if isinstance(source, SequenceStore) else source.item_counts()
        counts[: len(of_source)] += of_source
    return counts


def _read_hard(path: Path | str | None, size: int, key_map: KeyMap | None, num_rows: int) -> tuple[Ints, Ints, Ints]:
    """Return where the hard negatives of each item begin and end, and all of them; none without a file."""
    begins, ends, none = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64), np.empty(0, np.int64)
    if path is None:
        return none, none, none
    items, lengths, negatives = read_item_lists(path, "hard negatives", ITEM_ID, NEGATIVES, size)
    items, negatives = (items, negatives) if key_map is None else (key_map(items), key_map(negatives))
    ends[items] = np.cumsum(lengths)
    begins[items] = ends[items] - lengths
    return begins, ends, negatives


@compiled
def _find_aliases(shares: NDArray[np.float64]) -> Ints:
    """Return which cell fills up each of the cells with these shares [M] of mean 1, and limit the shares to 1."""
    aliases = np.arange(len(shares))
    waiting = np.flatnonzero(shares < 1)
    top = len(waiting)
    for giver in np.flatnonzero(shares >= 1):
        while top and shares[giver] >= 1:
            top -= 1
            aliases[waiting[top]] = giver
            shares[giver] -= 1 - shares[waiting[top]]
        if shares[giver] < 1:
            waiting[top] = giver
            top += 1
    shares[waiting[:top]] = 1  # only rounding has left them without a giver
    return aliases


@compiled
def _slot(item: int, own: Ints, before: int, slots: Ints) -> int:
    """Return the slot of an item in the hash table of `own`, or the one where it would be.

    Slots hold 1 + before + the item's index in `own`; up to `before` they are free, left from earlier samples.
    """
    slot = int((np.uint64(item) * GOLDEN) >> np.uint64(32)) & (len(slots) - 1)
    while slots[slot] > before and own[slots[slot] - before - 1] != item:
        slot = (slot + 1) & (len(slots) - 1)
    return slot


@compiled
def _is_own(item: int, own: Ints, before: int, slots: Ints) -> bool:
    return bool(slots[_slot(item, own, before, slots)] > before)


@compiled
def _draw_item(share: float, cells: Ints, thresholds: NDArray[np.float64]) -> int:
    place = share * len(cells)
    cell = min(int(place), len(cells) - 1)
    item, other = cells[cell, 0], cells[cell, 1]
    return int(item if place - cell < thresholds[cell] else other)  # both are loaded: a conditional move, not a jump


@compiled
def _draw_known(share: float, cells: Ints, cumulative: NDArray[np.float64], num_known: int) -> int:
    """Return the item of the first of these cells whose cumulative weight is above a share of all of theirs."""
    low, high, weight = 0, num_known - 1, share * cumulative[num_known - 1]
    while low < high:
        middle = (low + high) >> 1
        low, high = (low, middle) if cumulative[middle] > weight else (middle + 1, high)
    return int(cells[low, 0])


@compiled
def _draw(
    column: Ints,
    times: Ints,
    first_events: Ints,
    sample_indices: Ints,
    begins: Ints,
    ends: Ints,
    starts: Ints,
    all_items: Ints,
    offsets: Ints,
    rows: Ints,
    words: NDArray[np.uint64],
    width: int,
    num_hard: int,
    exclude_own: bool,
    tables: _Tables,
    out: Ints,
    out_negative: Floats,
    out_positive: Floats,
) -> int:
    """Write the samples' negatives, the hard ones last, and the logs of probabilities: 0 of hard ones."""
    cells, thresholds, log_q, firsts, cumulative, first_of, hard_begins, hard_ends, hard_items = tables
    num_slots = _MIN_SLOTS
    for row in rows:
        while exclude_own and num_slots < 2 * (offsets[row + 1] - offsets[row]):
            num_slots *= 2
    slots = np.zeros(num_slots, dtype=np.int64)
    before, touched = 0, 0  # events of the samples before
    for index in range(len(rows)):
        if index % 64 == 0:  # fetches the cache lines of many samples at a time; see _copy_elements
            for row in rows[index : index + 64]:
                for event in range(offsets[row], offsets[row + 1], 8):
                    touched ^= all_items[event]
        sample, row = sample_indices[index], rows[index]
        time, num_known, of_known = np.int64(0), len(cells), np.float32(0)  # log of the weights of all per known
        if len(firsts):
            time = times[begins[sample]] if begins[sample] < ends[sample] else firsts[0]
            num_known = max(np.searchsorted(firsts, time, side="right"), 1)
            of_known = np.float32(np.log(cumulative[-1] / cumulative[num_known - 1]))
        for event in range(begins[sample], ends[sample]):
            out_positive[starts[sample] + event - begins[sample]] = log_q[column[event]] + of_known
        own = all_items[offsets[row] : offsets[row + 1] if exclude_own else offsets[row]]
        for event in range(len(own)):
            slots[_slot(own[event], own, before, slots)] = before + event + 1
        word, first, last = words[sample], sample * width, (sample + 1) * width
        if num_hard and first_events[index] < ends[sample]:
            target = column[ends[sample] - 1]
            begin, size = hard_begins[target], hard_ends[target] - hard_begins[target]
            for number in range(size):  # from a random one on, in their order
                item = hard_items[begin + (int(word >> np.uint64(1)) + number) % size]
                if len(firsts) and first_of[item] > time:
                    continue
                if not exclude_own and (column[begins[sample] : ends[sample]] == item).any():
                    continue  # no target is its own negative
                if last > first + width - num_hard and not _is_own(item, own, before, slots):
                    last -= 1
                    out[last], out_negative[last] = item, 0
        for place in range(first, last):
            share = draw_unit(word, (place - first) * _ATTEMPTS)
            if len(firsts):
                out[place] = _draw_known(share, cells, cumulative, num_known)
            else:
                out[place] = _draw_item(share, cells, thresholds)
        spare = -1  # what all draws that found own items only become
        for place in range(first, last):
            attempt = 1
            while attempt < _ATTEMPTS and _is_own(out[place], own, before, slots):
                share = draw_unit(word, (place - first) * _ATTEMPTS + attempt)
                if len(firsts):
                    out[place] = _draw_known(share, cells, cumulative, num_known)
                else:
                    out[place] = _draw_item(share, cells, thresholds)
                attempt += 1
            if attempt == _ATTEMPTS and _is_own(out[place], own, before, slots):
                while spare < 0 or (attempt < _ATTEMPTS + num_known and _is_own(spare, own, before, slots)):
                    spare = cells[(int(word >> np.uint64(1)) + attempt) % num_known, 0]
                    attempt += 1
                out[place] = spare
            out_negative[place] = log_q[out[place]] + of_known
        before += len(own)
    return touched  # so that the compiler does not remove the loads
