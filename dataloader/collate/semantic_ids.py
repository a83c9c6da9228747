"""Items as tuples of codes (semantic ids): the code table, and samples -> SemanticIdBatch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import check_regular
from evenrank.dataloader.batches.batch import SemanticIdBatch
from evenrank.dataloader.collate.gather import Layout, SampleLengths, Spans, StoreRows, copy_codes, find_spans
from evenrank.dataloader.collate.sequences import (
    LABEL,
    check_user_ids,
    context_lengths,
    context_limits,
    layout_with_context,
    pad_rows,
)
from evenrank.datasets.schema import ITEM_ID
from evenrank.datasets.store import SequenceStore

SEMANTIC_ID = "semantic_id"
CANDIDATE_ID = "candidate_id"
_NO_CODE = -1
_MAX_LEVELS = 64  # more than any model uses: a table with more is probably transposed
_EVENTS_PER_CHUNK = 1 << 24  # bounds the memory for checking a store


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeTable:
    """The codes of every item.

    levels = 2, codebook_sizes = (3, 4)     item     0    1    2
                                            codes   0 3  2 1  - -     (item 2 has no code)
                                            tokens  0 6  2 4          (tokens of the second level start at 3)
    """

    codes: NDArray[np.int32]
    """[items, levels]; -1 in every level of an item without a code."""
    codebook_sizes: tuple[int, ...]
    """[levels]: the codes of a level are in 0..size-1."""

    def __post_init__(self) -> None:
        codes, sizes = self.codes, self.codebook_sizes
        if codes.ndim != 2 or codes.dtype.kind not in "iu" or codes.shape[1] != len(sizes):
            raise ConfigError(
                f"codes must be integers [items, {len(sizes)}], as there are {len(sizes)} codebook_sizes, got "
                f"{codes.dtype} {list(codes.shape)}; transpose a table [levels, items]"
            )
        if ((codes < _NO_CODE) | (codes >= np.array(sizes))).any():
            raise ConfigError(
                f"codes must be -1 (no code) or below codebook_sizes, {list(sizes)}, got {codes.min()} to "
                f"{codes.max(axis=0).tolist()} in the levels; give each level a size above its largest code"
            )
        partly_missing = (codes == _NO_CODE).any(axis=1) & (codes != _NO_CODE).any(axis=1)
        if partly_missing.any():
            raise ConfigError(
                f"item {int(np.argmax(partly_missing))} has codes in some levels only; set all of its levels to -1, or "
                "none"
            )

    @property
    def level_offsets(self) -> NDArray[np.int64]:
        """First token of each level: int64 [levels]."""
        return np.cumsum([0, *self.codebook_sizes])[:-1]

    def has_code(self, items: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which items have a code: bool, of the same shape. Items beyond the table have none."""
        in_table = (items >= 0) & (items < len(self.codes))
        has_code: NDArray[np.bool_] = in_table & (self.codes[np.where(in_table, items, 0), 0] != _NO_CODE)
        return has_code

    def describe(self) -> str:
        """Return the sizes of the table and a hash of its contents; equal for equal tables."""
        levels = self.codes.shape[1]
        digest = hashlib.sha256(np.ascontiguousarray(self.codes, dtype="<i4").tobytes()).hexdigest()
        return f"{levels} levels of {len(self.codes)} items, codebook_sizes {list(self.codebook_sizes)}, {digest[:16]}"


def read_codes(path: Path | str, codebook_sizes: Sequence[int] | None = None) -> CodeTable:
    """Read an integer table [levels, items] from a `.pt` or `.npy` file; -1 means no code.

    Files are read without unpickling objects, so no code in them is ever run.

    Args:
        path: of the file.
        codebook_sizes: per level; None: the largest code of the level + 1.

    Raises:
        DataError: the file cannot be read, or is not such a table.

    """
    path = Path(path)
    table = _read_tensor(path)
    if table.ndim != 2 or table.dtype.kind not in "iu" or not table.size:
        raise DataError(f"{path} must contain an integer tensor [levels, items], got {table.dtype} {table.shape}")
    if len(table) > _MAX_LEVELS:
        raise DataError(
            f"{path} has {len(table):,} levels of {table.shape[1]:,} items, more than {_MAX_LEVELS} levels; transpose "
            "the table if its first dimension is the items"
        )
    low, high = int(table.min()), int(table.max())
    if low < _NO_CODE or high > np.iinfo(np.int32).max:
        raise DataError(f"{path} has codes from {low} to {high}; they must be -1 (no code) or 0 to 2^31-1")
    is_missing = table == _NO_CODE
    partly_missing = np.flatnonzero(is_missing.any(axis=0) & ~is_missing.all(axis=0))
    if len(partly_missing):
        raise DataError(
            f"{path} has codes for item {partly_missing[0]} in some levels only; set all of its levels to -1, or none"
        )
    max_codes = table.max(axis=1).astype(np.int64).tolist()
    sizes = tuple([code + 1 for code in max_codes] if codebook_sizes is None else codebook_sizes)
    if len(sizes) != len(max_codes) or any(size <= code for size, code in zip(sizes, max_codes, strict=True)):
        raise DataError(
            f"{path} has codes up to {max_codes} in its levels, got codebook_sizes {list(sizes)}; give each level a "
            "size above its largest code"
        )
    return CodeTable(codes=np.ascontiguousarray(table.T, dtype=np.int32), codebook_sizes=sizes)


def _read_tensor(path: Path) -> NDArray[np.integer]:
    if path.suffix not in (".pt", ".npy"):
        raise DataError(f"{path} must be a .pt file from torch.save or a .npy file from numpy.save")
    check_regular(path)
    try:
        if path.suffix == ".npy":
            # Mapped, a file that is shorter than its header says takes no memory.
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(loaded, torch.Tensor) or loaded.layout != torch.strided or loaded.is_quantized:
            raise DataError(f"{path} must contain one tensor [levels, items], got {type(loaded).__name__}")
        if loaded.numel() * loaded.element_size() > path.stat().st_size:  # an expanded tensor repeats its elements
            raise DataError(f"{path} has fewer bytes than a tensor {list(loaded.shape)}; save it after contiguous()")
        return loaded.detach().numpy()
    except DataError:
        raise
    except Exception as error:  # a malformed file can raise anything
        raise DataError(
            f"{path} cannot be read as a tensor without running code from it ({first_line(error)}); save a single "
            "tensor [levels, items]"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class SemanticIdCollate:
    """Collates samples into a SemanticIdBatch.

    events        a b c d       max_history_length = 2, levels = 2
    semantic_id                 b1 b2 c1 c2
    candidate_id                            d1 d2   (if `candidate_feature`)
    label                                   d1 d2
    label                             c1 c2 d1 d2   (if `history_labels`)
    """

    table: CodeTable
    """The codes of the items."""
    max_history_length: int
    """Events of a history, each of `levels` tokens; longer histories keep their newest events."""
    user_id: bool
    """Whether `user_id` is a feature."""
    label_offsets: bool
    """Whether labels are tokens, with the offsets of their levels, rather than codes."""
    history_labels: bool
    """Whether the events of a history have labels too, except for its first."""
    candidate_feature: bool
    """Whether the tokens of the target are a feature."""

    def check(self, store: SequenceStore) -> None:
        """Accept every store: batches need no columns besides those of every dataset."""

    def unusable(self, store: SequenceStore) -> dict[str, NDArray[np.int64]]:
        """Return the rows without a target, and those whose history or target contains an item without a code."""
        if self.user_id:
            check_user_ids(store)
        num_targets = store.lengths if store.num_targets is None else store.num_targets
        return {
            "no event to predict": np.flatnonzero(num_targets < 1),
            "an item without a code": self._rows_without_codes(store),
        }

    def filters(self) -> tuple[object, ...]:
        """Return the settings that decide which rows are samples, and the codes, with which weights are trained."""
        return ("codes", self.max_history_length, self.table.describe())

    def _rows_without_codes(self, store: SequenceStore) -> NDArray[np.int64]:
        first_shown = np.maximum(store.offsets[:-1], store.offsets[1:] - 1 - self.max_history_length)
        items = store.events[ITEM_ID]
        rows_of_chunks = []
        for first in range(0, len(items), _EVENTS_PER_CHUNK):
            events = first + np.flatnonzero(~self.table.has_code(items[first : first + _EVENTS_PER_CHUNK]))
            rows = np.searchsorted(store.offsets, events, side="right") - 1
            rows_of_chunks.append(np.unique(rows[events >= first_shown[rows]]))
        return np.unique(np.concatenate(rows_of_chunks)) if rows_of_chunks else np.empty(0, dtype=np.int64)

    def __call__(
        self, groups: Sequence[StoreRows], sample_ids: NDArray[np.int64], *, batch_size: int, num_batches: int = 1
    ) -> list[SemanticIdBatch]:
        """Make batches of samples."""
        codes, levels = self.table.codes, self.table.codes.shape[1]
        level_offsets = self.table.level_offsets
        label_level_offsets = level_offsets if self.label_offsets else np.zeros_like(level_offsets)
        spans = self._find_spans(groups, len(sample_ids))
        events = self._events(spans)
        lengths = {key: num_events * levels for key, (_, num_events) in events.items()}
        features = layout_with_context(groups, lengths, batch_size, num_batches, user_id=self.user_id)
        for key, (firsts, num_events) in events.items():
            out_begins = features.begins(key)
            copy_codes(groups, ITEM_ID, firsts, num_events, out_begins, codes, level_offsets, features.values)
        label_firsts, num_labeled = self._labeled(spans)
        labels = Layout({LABEL: num_labeled * levels}, batch_size, num_batches)
        out_begins = labels.begins(LABEL)
        copy_codes(groups, ITEM_ID, label_firsts, num_labeled, out_begins, codes, label_level_offsets, labels.values)
        ids = torch.from_numpy(pad_rows(sample_ids, batch_size, num_batches, fill=-1))
        max_lengths = zip(features.max_lengths(), labels.max_lengths(), strict=True)
        limits = self._length_limits(groups[0].store)
        return [
            SemanticIdBatch(
                batch_size=batch_size,
                num_real=min(max(len(sample_ids) - batch * batch_size, 0), batch_size),
                loss_tokens=loss_tokens,
                max_lengths=feature_max | label_max,
                length_limits=dict(limits),
                features=features_of_batch,
                labels=labels_of_batch,
                sample_ids=ids[batch],
            )
            for batch, (features_of_batch, labels_of_batch, (feature_max, label_max), (loss_tokens,)) in enumerate(
                zip(features.tensors(), labels.tensors(), max_lengths, labels.num_values(), strict=True)
            )
        ]

    def lengths(self, groups: Sequence[StoreRows], num_samples: int) -> SampleLengths:
        """Return how long the rows of these samples are in a batch."""
        spans, levels = self._find_spans(groups, num_samples), self.table.codes.shape[1]
        features = context_lengths(groups, num_samples, user_id=self.user_id)
        features |= {key: num_events * levels for key, (_, num_events) in self._events(spans).items()}
        of_keys = {("features", name): lengths for name, lengths in features.items()}
        of_keys["labels", LABEL] = self._labeled(spans)[1] * levels
        return SampleLengths(of_keys=of_keys, num_candidates=np.zeros(num_samples, dtype=np.int64))

    def _find_spans(self, groups: Sequence[StoreRows], num_samples: int) -> Spans:
        return find_spans(groups, num_samples, max_history_length=self.max_history_length, max_num_candidates=1)

    def _events(self, spans: Spans) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the events of each key: where each sample's begin, and how many there are, int64 [n] both."""
        events = {SEMANTIC_ID: (spans.begins, spans.splits - spans.begins)}
        if self.candidate_feature:
            events[CANDIDATE_ID] = (spans.splits, spans.ends - spans.splits)
        return events

    def _labeled(self, spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each sample's events with labels begin, and how many there are: int64 [n] both."""
        firsts = np.minimum(spans.begins + 1, spans.splits) if self.history_labels else spans.splits
        return firsts, spans.ends - firsts

    def _length_limits(self, store: SequenceStore) -> dict[str, int]:
        """Return the longest that a row of each key can be."""
        levels = self.table.codes.shape[1]
        limits = context_limits(store, user_id=self.user_id) | {SEMANTIC_ID: self.max_history_length * levels}
        if self.candidate_feature:
            limits[CANDIDATE_ID] = levels
        num_labeled = max(self.max_history_length, 1) if self.history_labels else 1
        return limits | {LABEL: num_labeled * levels}
