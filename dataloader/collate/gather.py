"""The spans of samples in their stores, and the compiled loops that copy them out without holding the GIL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.numba_cache import compiled
from evenrank.dataloader.batches.batch import keyed_jagged_tensor
from evenrank.datasets.store import SequenceStore

_CACHE_LINE = 64  # bytes, on x86-64 and most ARM processors
_NO_TARGETS = np.empty(0, dtype=np.int32)


class StoreRows(NamedTuple):
    """The samples that come from one store."""

    store: SequenceStore
    """Where the events are."""
    rows: NDArray[np.int64]
    """[m]: rows of the store."""
    sample_indices: NDArray[np.int64]
    """[m]: index of each row among the n samples that are collated together."""


def group_by_store(stores: Sequence[SequenceStore], sample_ids: NDArray[np.int64]) -> list[StoreRows]:
    """Group samples by the store that they come from.

    Args:
        stores: whose rows are numbered consecutively: the second's follow the first's.
        sample_ids: int64 [n], such row numbers.

    Returns:
        At least one group; without samples, an empty group of the first store.

    Raises:
        IndexError: a row number is out of range.

    """
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


class Spans(NamedTuple):
    """The events of n samples, as indices into the events of their stores.

    events          a b c d e f g       max_history_length = 3, max_num_candidates = 2
                        ^     ^   ^
                        begins splits ends
    """

    begins: NDArray[np.int64]
    """[n]: where the history begins."""
    splits: NDArray[np.int64]
    """[n]: where the history ends and the candidates begin."""
    ends: NDArray[np.int64]
    """[n]: where the candidates end."""


def find_spans(
    groups: Sequence[StoreRows], num_samples: int, *, max_history_length: int, max_num_candidates: int
) -> Spans:
    """Find each sample's candidates, its last events, and the newest `max_history_length` events before them.

    A row with a number of targets has at most that many candidates, because the events before them were trained on.

    Raises:
        IndexError: a row has fewer events than candidates.

    """
    begins, splits, ends = np.empty((3, num_samples), dtype=np.int64)
    for store, rows, sample_indices in groups:
        targets = _NO_TARGETS if store.num_targets is None else store.num_targets
        if not _find_spans(
            store.offsets, targets, rows, sample_indices, max_history_length, max_num_candidates, begins, splits, ends
        ):
            raise IndexError(f"a row has fewer events than {max_num_candidates} candidates; it is not a sample")
    return Spans(begins, splits, ends)


def copy_events(
    groups: Sequence[StoreRows],
    column: str,
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out_begins: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """Copy events of a column: sample i's from begins[i] on to out[out_begins[i]] on.

    Args:
        groups: the samples.
        column: name of the list column.
        begins: int64 [n], indices into the column of each sample's store.
        lengths: int64 [n], in events.
        out_begins: int64 [n], indices into `out`.
        out: int64.

    """
    for store, _, sample_indices in groups:
        _copy_events(store.events[column], sample_indices, begins, lengths, out_begins, out)


class ContextSpans(NamedTuple):
    """The values of a contextual feature of n samples, as indices into the feature's values in their stores."""

    begins: NDArray[np.int64]
    """[n]: where the values begin."""
    lengths: NDArray[np.int64]
    """[n]: how many there are."""


def find_context(groups: Sequence[StoreRows], name: str, num_samples: int) -> ContextSpans:
    """Find each sample's values of a contextual feature or `user_id`: one, or any number if it is multi-valued."""
    begins, lengths = np.empty((2, num_samples), dtype=np.int64)
    for store, rows, sample_indices in groups:
        spans = store.multi_valued.get(name)
        begins[sample_indices] = rows if spans is None else spans.offsets[rows]
        lengths[sample_indices] = 1 if spans is None else spans.offsets[rows + 1] - spans.offsets[rows]
    return ContextSpans(begins, lengths)


def copy_context(
    groups: Sequence[StoreRows], name: str, spans: ContextSpans, out_begins: NDArray[np.int64], out: NDArray[np.int64]
) -> None:
    """Copy the values of a contextual feature or `user_id`: sample i's to out[out_begins[i]] on."""
    for store, _, sample_indices in groups:
        _copy_events(store.rows[name], sample_indices, spans.begins, spans.lengths, out_begins, out)


def copy_codes(
    groups: Sequence[StoreRows],
    column: str,
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out_begins: NDArray[np.int64],
    codes: NDArray[np.int32],
    level_offsets: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """Copy the codes of a column's events, like `copy_events` with `levels` values per event.

    Args:
        groups: the samples.
        column: name of a list column whose values are rows of `codes`.
        begins: int64 [n], indices into the column of each sample's store.
        lengths: int64 [n], in events.
        out_begins: int64 [n], indices into `out` of each sample's first code.
        codes: int32 [items, levels].
        level_offsets: int64 [levels], added to the codes.
        out: int64.

    Raises:
        IndexError: an item has no code.

    """
    for store, _, sample_indices in groups:
        if not _copy_codes(
            store.events[column], sample_indices, begins, lengths, out_begins, codes, level_offsets, out
        ):
            raise IndexError("a row has an item without a code; it is not a sample")


@compiled
def _find_spans(
    offsets: NDArray[np.int64],
    num_targets: NDArray[np.int32],
    rows: NDArray[np.int64],
    sample_indices: NDArray[np.int64],
    max_history_length: int,
    max_num_candidates: int,
    begins: NDArray[np.int64],
    splits: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> bool:
    for index in range(len(rows)):
        row, sample = rows[index], sample_indices[index]
        num_candidates = max_num_candidates
        if len(num_targets):
            num_candidates = min(num_candidates, num_targets[row])
        end = offsets[row + 1]
        split = end - num_candidates
        if split < offsets[row]:
            return False
        begins[sample] = max(offsets[row], split - max_history_length)
        splits[sample] = split
        ends[sample] = end
    return True


@compiled
def _copy_events(
    column: NDArray[np.integer],
    sample_indices: NDArray[np.int64],
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out_begins: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    # Samples are scattered over a column that fits no cache. Touching all their cache lines first lets the processor
    # fetch many lines at a time; copying right away would wait for each sample's lines in turn.
    step = _CACHE_LINE // column.itemsize
    touched = 0
    for sample in sample_indices:
        for event in range(begins[sample], begins[sample] + lengths[sample], step):
            touched ^= column[event]
    for sample in sample_indices:
        begin, out_begin, length = begins[sample], out_begins[sample], lengths[sample]
        events, copied = column[begin : begin + length], out[out_begin : out_begin + length]
        for event in range(length):  # compiles to a faster loop than a slice assignment
            copied[event] = events[event]
    return touched  # so that the compiler does not remove the loads


@compiled
def _copy_codes(
    column: NDArray[np.integer],
    sample_indices: NDArray[np.int64],
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out_begins: NDArray[np.int64],
    codes: NDArray[np.int32],
    level_offsets: NDArray[np.int64],
    out: NDArray[np.int64],
) -> bool:
    levels = codes.shape[1]
    for sample in sample_indices:
        out_index = out_begins[sample]
        for event in range(begins[sample], begins[sample] + lengths[sample]):
            item = column[event]
            if item < 0 or item >= len(codes) or codes[item, 0] < 0:
                return False
            for level in range(levels):
                out[out_index + level] = codes[item, level] + level_offsets[level]
            out_index += levels
    return True


# The layout of the values of several batches in one array, so that one compiled pass per column fills all of them.


class Layout:
    """The jagged values of G batches: batch after batch, and key after key within each, as their tensors need them.

    batch_size = 2, lengths {"sex": [1 1 1], "item_id": [2 0 3]}, two batches, the second with one padding row:

        values    s0 s1 | i0 i0 | s2 | i2 i2 i2
                  batch 0       | batch 1

    Args:
        lengths: per key, int64 [n], of the samples in order; each batch takes the next `batch_size` of them.
        batch_size: rows of each batch.
        num_batches: G; rows after the last sample are padding.

    Attributes:
        values: int64 [sum of all lengths], uninitialized.

    """

    def __init__(self, lengths: Mapping[str, NDArray[np.int64]], batch_size: int, num_batches: int) -> None:
        self._keys = list(lengths)
        rows = np.zeros((len(lengths), num_batches * batch_size), dtype=np.int64)
        for index, lengths_of_key in enumerate(lengths.values()):
            rows[index, : len(lengths_of_key)] = lengths_of_key
            self._num_samples = len(lengths_of_key)
        self._lengths = rows.reshape(len(lengths), num_batches, batch_size)
        num_values = self._lengths.sum(axis=2).T  # [G, K]
        self._begins = (np.cumsum(num_values) - num_values.reshape(-1)).reshape(num_values.shape)
        self._num_values: list[list[int]] = num_values.tolist()
        self.values = np.empty(int(num_values.sum()), dtype=np.int64)

    def begins(self, key: str) -> NDArray[np.int64]:
        """Return the index into `values` at which each sample's values of a key begin: int64 [n]."""
        index = self._keys.index(key)
        lengths = self._lengths[index]
        begins: NDArray[np.int64] = np.cumsum(lengths, axis=1) - lengths + self._begins[:, index, np.newaxis]
        return begins.reshape(-1)[: self._num_samples]

    def max_lengths(self) -> list[dict[str, int]]:
        """Return the longest row of each key, per batch."""
        longest = self._lengths.max(axis=2, initial=0).T.tolist()
        return [dict(zip(self._keys, longest_of_batch, strict=True)) for longest_of_batch in longest]

    def num_values(self) -> list[list[int]]:
        """Return the number of values of each key, per batch."""
        return self._num_values

    def tensors(self) -> list[KeyedJaggedTensor]:
        """Return each batch's tensor, a view of `values`."""
        lengths = np.ascontiguousarray(self._lengths.transpose(1, 0, 2))
        values = torch.from_numpy(self.values).split([sum(num_values) for num_values in self._num_values])
        return [
            keyed_jagged_tensor(self._keys, values_of_batch, lengths[batch], length_per_key=self._num_values[batch])
            for batch, values_of_batch in enumerate(values)
        ]


# `SampleLengths`: how long samples are in a batch, known before it is made.


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLengths:
    """The lengths of n samples as they are trained: after truncation, in codes of items, with candidates."""

    of_keys: Mapping[tuple[str, str], NDArray[np.int64]]
    """Per field and key of the batch, in its order, int64 [n]."""
    num_candidates: NDArray[np.int64]
    """[n]; zeros for batches without candidates."""
