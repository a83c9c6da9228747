"""The slices of samples in their stores, and the compiled loops that copy them without holding the GIL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.hashing import mix64, mix_word
from evenrank.datasets.store import SequenceStore

Ints = NDArray[np.int64]

_CACHE_LINE = 64  # bytes, on x86-64 and most ARM processors
_NO_TARGETS = np.empty(0, dtype=np.int32)


class StoreRows(NamedTuple):
    """The samples that come from one store."""

    store: SequenceStore
    rows: Ints
    """[m]: rows, or slices, of the store."""
    sample_indices: Ints
    """[m]: index of each row among the n samples that are collated together."""


def group_by_store(stores: Sequence[SequenceStore], sample_ids: Ints) -> list[StoreRows]:
    """Group samples [n], numbered consecutively through all stores, by store; without samples, into an empty one."""
    ends = np.cumsum([len(store) for store in stores])
    if len(sample_ids) and not 0 <= int(sample_ids.min()) <= int(sample_ids.max()) < ends[-1]:
        raise IndexError(
            f"rows must be between 0 and {ends[-1] - 1}, got {int(sample_ids.min())} to {int(sample_ids.max())}"
        )
    if len(stores) == 1 or not len(sample_ids):
        return [StoreRows(stores[0], sample_ids, np.arange(len(sample_ids)))]
    store_indices = np.searchsorted(ends, sample_ids, side="right")
    groups = []
    for index in np.unique(store_indices).tolist():
        sample_indices = np.flatnonzero(store_indices == index)
        rows = sample_ids[sample_indices] - (ends[index] - len(stores[index]))
        groups.append(StoreRows(stores[index], rows, sample_indices))
    return groups


class HistorySpans(NamedTuple):
    """Where histories and candidates of n samples are among the events of their stores: int64 [n] each.

    events          a b c d e f g         max_history_length = 3, max_num_candidates = 2
                        ^     ^   ^
                   begins     |   ends
                       history_ends
    """

    begins: Ints
    history_ends: Ints
    ends: Ints

    @property
    def followers(self) -> Ints:
        """The first events with one before them: the second ones of histories, or candidates. int64 [n]."""
        return np.minimum(self.begins + 1, self.history_ends)


def find_spans(
    groups: Sequence[StoreRows], num_samples: int, max_history_length: int, max_num_candidates: int
) -> HistorySpans:
    """Find each sample's candidates, its last events, and the newest `max_history_length` events before them.

    A row with a number of targets has at most that many candidates, because the events before them were trained on.
    """
    spans = HistorySpans(*np.empty((3, num_samples), dtype=np.int64))
    for store, rows, sample_indices in groups:
        targets = _NO_TARGETS if store.num_targets is None else store.num_targets
        if not _find_spans(
            store.begins, store.ends, targets, rows, sample_indices, max_history_length, max_num_candidates, *spans
        ):
            raise IndexError(f"a row has fewer events than {max_num_candidates} candidates; it is not a sample")
    return spans


class DrawKey(NamedTuple):
    """What is drawn for samples depends on it alone: not on their batch, its rank or the number of ranks."""

    seed: int
    epoch: int
    sample_ids: Ints

    def words(self) -> NDArray[np.uint64]:
        """Return a random word for each sample: uint64 [n]."""
        word = mix64(mix64(np.array([self.seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)) ^ np.uint64(self.epoch))
        return mix64(word ^ mix64(self.sample_ids.astype(np.uint64)))


class ItemTokens(NamedTuple):
    """The tokens of items: the codes of each [items, levels], -1 without a code, plus an offset for each level.

    With `alternatives`, an event has one of its item's codes, drawn by its sample and its distance to the end.
    """

    codes: NDArray[np.int32]
    level_offsets: Ints
    alternatives: NDArray[np.int32] = np.empty((0, 0, 0), dtype=np.int32)
    """[items, A, levels]: further codes of each item, then -1."""
    words: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
    """[n]: random words of the samples."""
    ends: Ints = np.empty(0, dtype=np.int64)
    """[n]: where their events end, as in HistorySpans."""


class KeyValues(NamedTuple):
    """The values of one key of n samples: of each, a slice of a column of its store, given by begin and size."""

    column: str
    begins: Ints
    sizes: Ints
    max_size: int | None
    """Most elements of any sample, also of other batches and ranks; None: not known."""
    tokens: ItemTokens | None = None
    """Replaces each element, an item, by its tokens."""
    is_repeated: bool = False
    """Whether a sample's values are all the element at its begin."""
    array: NDArray[Any] | None = None
    """The column, if it was made for these samples and is in no store."""
    table: NDArray[Any] | None = None
    """Replaces each element, an item, by its feature."""

    def elements(self, store: SequenceStore) -> NDArray[Any]:
        """Return the column."""
        return store.columns[self.column] if self.array is None else self.array

    @property
    def lengths(self) -> Ints:
        """Values of each sample: int64 [n]."""
        return self.sizes if self.tokens is None else self.sizes * self.tokens.codes.shape[1]

    @property
    def length_limit(self) -> int | None:
        """Most values of any sample; None: not known."""
        return self.max_size if self.tokens is None or not self.max_size else self.max_size * self.tokens.codes.shape[1]


def find_context(groups: Sequence[StoreRows], name: str, num_samples: int) -> KeyValues:
    """Find each sample's values of a contextual feature or `user_id`: one, or any number if it is multi-valued."""
    begins, sizes = np.empty((2, num_samples), dtype=np.int64)
    for store, indices, sample_indices in groups:
        rows = store.rows_of(indices)
        if (offsets := store.list_offsets.get(name)) is None:
            begins[sample_indices], sizes[sample_indices] = rows, 1
        else:
            begins[sample_indices], sizes[sample_indices] = offsets[rows], offsets[rows + 1] - offsets[rows]
    store = groups[0].store
    return KeyValues(name, begins, sizes, store.list_limits.get(name) if name in store.list_offsets else 1)


def find_known(groups: Sequence[StoreRows], values: KeyValues, *, has_places: bool) -> KeyValues:
    """Find the places of those of each sample's floats that are not missing, or only how many they are."""
    counts, begins = np.empty_like(values.sizes), np.cumsum(values.sizes) - values.sizes
    places = np.empty(values.sizes.sum() if has_places else 0, dtype=np.int64)
    for store, _, samples in groups:
        _find_known(values.elements(store), samples, values.begins, values.sizes, begins, counts, places)
    return KeyValues("", begins, counts, values.max_size, array=places)


def gather(
    groups: Sequence[StoreRows], keys: Mapping[str, KeyValues], batch_size: int, num_batches: int, dtype: str
) -> tuple[NDArray[Any], Ints]:
    """Copy the samples' values into one array, batch after batch and key after key; rows after the last are padding.

    Return the array, and the lengths of the rows of G batches with K keys: [G, K, B].

    batch_size = 2, lengths {"sex": [1 1 1], "item_id": [2 0 3]}, two batches, the second with one padding row:

        values    s0 s1 | i0 i0 | s2 | i2 i2 i2
                  batch 0       | batch 1
    """
    lengths = np.stack([pad_rows(values.lengths, batch_size, num_batches) for values in keys.values()], axis=1)
    out_begins = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
    out = np.empty(int(lengths.sum()), dtype=dtype)
    for index, values in enumerate(keys.values()):
        begins_of_key = out_begins[:, index].reshape(-1)
        for store, _, samples in groups:
            places = (values.elements(store), samples, values.begins, values.sizes, begins_of_key)
            if values.is_repeated:
                _repeat_elements(*places, out)
            elif values.table is not None:
                _look_up(*places, values.table, out)
            elif values.tokens is None:
                _copy_elements(*places, out)
            elif not _copy_tokens(*places, *values.tokens, out):
                raise IndexError("a row has an item without a code; it is not a sample")
    return out, lengths


def pad_rows(column: Ints, batch_size: int, num_batches: int, *, fill: int = 0) -> Ints:
    """Divide a column [n] into the rows of batches, padded with `fill`: int64 [num_batches, batch_size]."""
    rows = np.empty(num_batches * batch_size, dtype=np.int64)
    rows[: len(column)], rows[len(column) :] = column, fill
    return rows.reshape(num_batches, batch_size)


@compiled
def _find_spans(
    begins_of_rows: Ints,
    ends_of_rows: Ints,
    num_targets: NDArray[np.int32],
    rows: Ints,
    sample_indices: Ints,
    max_history_length: int,
    max_num_candidates: int,
    begins: Ints,
    history_ends: Ints,
    ends: Ints,
) -> bool:
    for index in range(len(rows)):
        row, sample = rows[index], sample_indices[index]
        num_candidates = max_num_candidates
        if len(num_targets):
            num_candidates = min(num_candidates, num_targets[row])
        end = ends_of_rows[row]
        history_end = end - num_candidates
        if history_end < begins_of_rows[row]:
            return False
        begins[sample] = max(begins_of_rows[row], history_end - max_history_length)
        history_ends[sample] = history_end
        ends[sample] = end
    return True


@compiled
def _copy_elements(
    column: NDArray[Any], sample_indices: Ints, begins: Ints, sizes: Ints, out_begins: Ints, out: NDArray[Any]
) -> int:
    # Samples are scattered over a column that fits no cache. Touching all their cache lines first lets the processor
    # fetch many lines at a time; copying right away would wait for each sample's lines in turn.
    step = _CACHE_LINE // column.itemsize
    touched = 0
    for sample in sample_indices:
        for index in range(begins[sample], begins[sample] + sizes[sample], step):
            touched ^= int(column[index])
    for sample in sample_indices:
        begin, out_begin, size = begins[sample], out_begins[sample], sizes[sample]
        elements, copied = column[begin : begin + size], out[out_begin : out_begin + size]
        for index in range(size):  # compiles to a faster loop than a slice assignment
            copied[index] = elements[index]
    return touched  # so that the compiler does not remove the loads


@compiled
def _repeat_elements(
    column: NDArray[Any], sample_indices: Ints, begins: Ints, sizes: Ints, out_begins: Ints, out: NDArray[Any]
) -> None:
    for sample in sample_indices:
        out[out_begins[sample] : out_begins[sample] + sizes[sample]] = column[begins[sample]]


@compiled
def _look_up(
    column: NDArray[Any],
    sample_indices: Ints,
    begins: Ints,
    sizes: Ints,
    out_begins: Ints,
    table: NDArray[Any],
    out: NDArray[Any],
) -> None:
    for sample in sample_indices:
        begin, out_begin = begins[sample], out_begins[sample]
        for index in range(sizes[sample]):
            out[out_begin + index] = table[column[begin + index]]


@compiled
def _find_known(
    column: NDArray[np.floating],
    sample_indices: Ints,
    begins: Ints,
    sizes: Ints,
    out_begins: Ints,
    counts: Ints,
    out: Ints,
) -> None:
    for sample in sample_indices:
        count = 0
        for index in range(sizes[sample]):
            if not np.isnan(column[begins[sample] + index]):
                if len(out):
                    out[out_begins[sample] + count] = index
                count += 1
        counts[sample] = count


@compiled
def _copy_tokens(
    column: NDArray[np.integer],
    sample_indices: Ints,
    begins: Ints,
    sizes: Ints,
    out_begins: Ints,
    codes: NDArray[np.int32],
    level_offsets: Ints,
    alternatives: NDArray[np.int32],
    words: NDArray[np.uint64],
    ends: Ints,
    out: Ints,
) -> bool:
    """Return whether all items have codes."""
    levels, num_alternatives = codes.shape[1], alternatives.shape[1]
    for sample in sample_indices:
        out_index = out_begins[sample]
        for index in range(begins[sample], begins[sample] + sizes[sample]):
            item = column[index]
            if item < 0 or item >= len(codes) or codes[item, 0] < 0:
                return False
            choice = np.int64(0)  # the item's first code, or an alternative from 1
            if num_alternatives:
                count = 1
                while count <= num_alternatives and alternatives[item, count - 1, 0] >= 0:
                    count += 1
                choice = np.int64(mix_word(words[sample] ^ np.uint64(ends[sample] - index)) % np.uint64(count))
            for level in range(levels):
                code = codes[item, level] if choice == 0 else alternatives[item, choice - 1, level]
                out[out_index + level] = code + level_offsets[level]
            out_index += levels
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLengths:
    """The lengths of n samples as they are trained, known before batches are made."""

    of_keys: Mapping[tuple[str, str], Ints]
    """Per field and key of the batch, in its order, [n]: after truncation, in tokens, with candidates."""
    num_candidates: Ints
    """[n]; zeros for batches without candidates."""
