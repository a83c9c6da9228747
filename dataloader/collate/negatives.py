"""Negatives of samples, drawn where batches are collated: uniformly, by popularity, or hard ones from a file.

Each sample has one set, shared by its candidates or targets: a set per target would multiply the bytes of a batch and
of its exchange. Random words are a function of seed, epoch, sample id, draw and attempt, so a sample has the same
negatives in any batch on any rank. Items are drawn in O(1) by the alias method (Vose, "A linear algorithm for
generating random numbers with a given distribution", 1991). A draw of the user's own items is repeated; after 64
attempts, the drawable items are tried in turn, and a user who has all of them gets one of these.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import check_regular
from evenrank.core.hashing import GOLDEN, draw_unit
from evenrank.dataloader.collate.gather import DrawKey, Ints, KeyValues, StoreRows
from evenrank.dataloader.collate.selection import stored_events
from evenrank.dataloader.config import Negatives
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.datasets.continuous_log import LogSource
from evenrank.datasets.schema import ITEM_ID
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.stream import StreamSource

Floats = NDArray[np.float32]
Sources = Sequence[SequenceStore | StreamSource | LogSource]

NEGATIVES, LOG_Q = "negatives", "log_q"
_ATTEMPTS = 64
_MAX_ITEMS = 1 << 31  # 36 bytes each
_MIN_SLOTS = 1 << 13  # of a table of the items of a sample; so many fit into the second-level cache


class _Tables(NamedTuple):
    """M cells of probability 1/M each, and tables by item. Items are as in batches: rows of a table with a KeyMap."""

    cells: Ints  # [M, 2]: each drawable item, and the one that is drawn instead
    thresholds: NDArray[np.float64]  # [M]: the first one's share of the cell
    log_q: Floats  # of one event for items that are never drawn
    hard_begins: Ints
    hard_ends: Ints
    hard_items: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NegativeSampler:
    """Draws the negatives of samples of opened datasets. Any thread may use it."""

    settings: Negatives
    tables: _Tables

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
        is_dense = all(source.manifest.ids[ITEM_ID].rule == "dense" for source in sources)
        weights = np.ones(size)
        if settings.by == "popularity" or not is_dense:
            weights[:] = 0
            for source in sources:
                if isinstance(source, LogSource):
                    raise ConfigError("a log that grows has no counts of its items; use dense ids and by='uniform'")
                counts = source.item_counts()
                weights[: len(counts)] += counts
            alpha = settings.alpha if settings.by == "popularity" else 0
            weights = np.where(weights > 0, weights**alpha, 0)
        weights[: int(is_dense)] = 0  # unknown
        items = np.flatnonzero(weights)
        if not len(items):
            raise ConfigError("negatives are drawn from the items of the split 'train', which has none; add events")
        total = weights.sum()
        rows, num_rows = (items, size) if key_map is None else (key_map(items), key_map.num_embeddings)
        log_q = np.full(num_rows, -np.log(total), dtype=np.float32)
        log_q[rows] = np.log(weights[items] / total)
        thresholds = weights[items] * len(items) / total
        cells = np.stack([rows, rows[_find_aliases(thresholds)]], axis=1)
        hard = _read_hard(settings.hard, size, key_map, num_rows)
        return cls(settings=settings, tables=_Tables(cells, thresholds, log_q, *hard))

    def describe(self) -> str:
        """Return the settings, without the path of the file, and a hash of all that is drawn from."""
        digest = hashlib.sha256(b"".join(array.tobytes() for array in self.tables))
        names = ("count", "by", "alpha", "exclude_own", "num_hard", "fixed")
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
            for store, of_store, samples in groups:
                of_store, own = store.rows_of(of_store), stored_events(store, ITEM_ID)
                places = (store.columns[ITEM_ID], samples, begins, ends, starts, own, store.offsets, of_store)
                shares = (width, self.settings.num_hard, self.settings.exclude_own)
                _draw(*places, words, *shares, self.tables, items, negative, positive)
        drawn = KeyValues(ITEM_ID, rows, widths, width, array=items)
        of_positives = KeyValues(LOG_Q, starts, sizes, limit, array=positive)
        return {
            NEGATIVES: {ITEM_ID: drawn},
            LOG_Q: {"negative": drawn._replace(array=negative), "positive": of_positives},
        }


def _read_hard(path: Path | str | None, size: int, key_map: KeyMap | None, num_rows: int) -> tuple[Ints, Ints, Ints]:
    """Return where the hard negatives of each item begin and end, and all of them; none without a file."""
    begins, ends, none = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64), np.empty(0, np.int64)
    if path is None:
        return none, none, none
    check_regular(Path(path))
    try:
        table = pq.read_table(path, columns=[ITEM_ID, NEGATIVES])
        lists = table[NEGATIVES].cast(pa.list_(pa.int64())).combine_chunks()
        items, negatives = table[ITEM_ID].cast(pa.int64()).to_numpy(), lists.flatten().to_numpy()
        lengths = lists.value_lengths().to_numpy()
    except (OSError, KeyError, pa.ArrowException) as error:
        reason = f"({first_line(error)}); write item_id int64 and negatives list<int64>, without nulls"
        raise DataError(f"{path} is no Parquet file of hard negatives {reason}") from error
    for ids in (items, negatives):
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise DataError(f"{path} has items {ids.min()} to {ids.max()}, the dataset 0 to {size - 1}; use its ids")
    if len(np.unique(items)) < len(items):
        raise DataError(f"{path} has an item in more than one row; join their lists")
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
def _draw_item(word: np.uint64, number: int, cells: Ints, thresholds: NDArray[np.float64]) -> int:
    place = draw_unit(word, number) * len(cells)
    cell = min(int(place), len(cells) - 1)
    item, other = cells[cell, 0], cells[cell, 1]
    return int(item if place - cell < thresholds[cell] else other)  # both are loaded: a conditional move, not a jump


@compiled
def _draw(
    column: Ints,
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
    cells, thresholds, log_q, hard_begins, hard_ends, hard_items = tables
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
        for event in range(begins[sample], ends[sample]):
            out_positive[starts[sample] + event - begins[sample]] = log_q[column[event]]
        own = all_items[offsets[row] : offsets[row + 1] if exclude_own else offsets[row]]
        for event in range(len(own)):
            slots[_slot(own[event], own, before, slots)] = before + event + 1
        word, first, last = words[sample], sample * width, (sample + 1) * width
        if num_hard and offsets[row] < ends[sample]:
            target = column[ends[sample] - 1]
            begin, size = hard_begins[target], hard_ends[target] - hard_begins[target]
            for number in range(size):  # from a random one on, in their order
                item = hard_items[begin + (int(word >> np.uint64(1)) + number) % size]
                if not exclude_own and (column[begins[sample] : ends[sample]] == item).any():
                    continue  # no target is its own negative
                if last > first + width - num_hard and not _is_own(item, own, before, slots):
                    last -= 1
                    out[last], out_negative[last] = item, 0
        for place in range(first, last):
            out[place] = _draw_item(word, (place - first) * _ATTEMPTS, cells, thresholds)
        spare = -1  # what all draws that found own items only become
        for place in range(first, last):
            attempt = 1
            while attempt < _ATTEMPTS and _is_own(out[place], own, before, slots):
                out[place] = _draw_item(word, (place - first) * _ATTEMPTS + attempt, cells, thresholds)
                attempt += 1
            if attempt == _ATTEMPTS and _is_own(out[place], own, before, slots):
                while spare < 0 or (attempt < _ATTEMPTS + len(cells) and _is_own(spare, own, before, slots)):
                    spare = cells[(int(word >> np.uint64(1)) + attempt) % len(cells), 0]
                    attempt += 1
                out[place] = spare
            out_negative[place] = log_q[out[place]]
        before += len(own)
    return touched  # so that the compiler does not remove the loads
