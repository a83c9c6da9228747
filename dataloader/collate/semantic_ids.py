"""Items as tuples of codes: the table of codes, and samples -> SemanticIdBatch."""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.dataloader.batch import SemanticIdBatch
from evenrank.dataloader.collate.layout import Layout
from evenrank.dataloader.collate.sequences import LABEL, contextual_layout, padded
from evenrank.dataloader.collate.spans import Pick, copy_codes, locate
from evenrank.datasets.schema import ITEM_ID
from evenrank.datasets.store import SequenceStore

SEMANTIC_ID = "semantic_id"
_NO_CODE = -1
# More levels than any codebook has: a table with more lies on its side.
_MAX_LEVELS = 64
# Events whose codes are looked up at a time when a store is checked.
_EVENTS_AT_A_TIME = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeTable:
    """The codes of every item.

    levels = 2, codebook_sizes = (3, 4)     item     0    1    2
                                            codes   0 3  2 1  - -     (item 2 has no code)
                                            tokens  0 6  2 4          (the second level's begin at 3)
    """

    codes: NDArray[np.int32]  # [items, levels]; -1 in every level of an item without a code
    codebook_sizes: tuple[int, ...]  # [levels]: codes of a level lie in 0..size-1

    @property
    def level_offsets(self) -> NDArray[np.int64]:
        """Where the tokens of each level begin: int64 [levels]."""
        return np.cumsum([0, *self.codebook_sizes])[:-1]

    def has_code(self, items: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Say which items have a code: bool, of the same shape. Items beyond the table have none."""
        inside = (items >= 0) & (items < len(self.codes))
        found: NDArray[np.bool_] = inside & (self.codes[np.where(inside, items, 0), 0] != _NO_CODE)
        return found


def read_codes(path: Path | str, codebook_sizes: Sequence[int] | None = None) -> CodeTable:
    """Read a table of whole numbers [levels, items] from a `.pt` or `.npy` file; -1 stands for no code.

    Files are read without unpickling: nothing in them is ever executed.

    Args:
        path: the file.
        codebook_sizes: of each level; None: the largest code of the level + 1.

    Raises:
        DataError: the file cannot be read, or is not such a table.

    """
    path = Path(path)
    table = _read_tensor(path)
    if table.ndim != 2 or table.dtype.kind not in "iu" or not table.size:
        raise DataError(f"{path} must be a tensor of whole numbers [levels, items], it is {table.dtype} {table.shape}")
    if len(table) > _MAX_LEVELS:
        raise DataError(
            f"{path} has {len(table):,} levels of {table.shape[1]:,} items; transpose it if those are items"
        )
    low, high = int(table.min()), int(table.max())
    if low < _NO_CODE or high > np.iinfo(np.int32).max:
        raise DataError(f"{path} has codes from {low} to {high}; they must be -1 (no code) or 0 to 2^31-1")
    missing = table == _NO_CODE
    partly = np.flatnonzero(missing.any(axis=0) & ~missing.all(axis=0))
    if len(partly):
        raise DataError(f"{path} has codes for item {partly[0]} in some levels only; -1 must be in all levels or none")
    used = (table.max(axis=1).astype(np.int64) + 1).tolist()
    sizes = tuple(used if codebook_sizes is None else codebook_sizes)
    if len(sizes) != len(used) or any(size < least for size, least in zip(sizes, used, strict=True)):
        raise DataError(
            f"{path} has codes up to {[one - 1 for one in used]} in its levels, codebook_sizes {list(sizes)}"
        )
    return CodeTable(codes=np.ascontiguousarray(table.T, dtype=np.int32), codebook_sizes=sizes)


def _read_tensor(path: Path) -> NDArray[np.integer]:
    if path.suffix not in (".pt", ".npy"):
        raise DataError(f"{path} must be a .pt file of torch.save or a .npy file of numpy.save")
    try:
        if path.suffix == ".npy":
            array: NDArray[np.integer] = np.load(path, allow_pickle=False)
            return array
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} cannot be read as a tensor without running code from it ({reason})") from error
    if not isinstance(loaded, torch.Tensor) or loaded.layout != torch.strided:
        raise DataError(f"{path} must hold one tensor [levels, items], it holds {type(loaded).__name__}")
    return loaded.numpy()


@dataclass(frozen=True, kw_only=True, slots=True)
class SemanticIdCollate:
    """Collates samples into a SemanticIdBatch.

    events    a b c d       max_history_length = 2, levels = 2
    semantic_id             b1 b2 c1 c2
    label                               d1 d2
    """

    table: CodeTable
    max_history_length: int  # events; each has `levels` tokens
    label_offsets: bool  # labels are tokens, with the offsets of their levels, instead of codes

    def check(self, store: SequenceStore) -> None:
        """Every store will do."""

    def unusable(self, store: SequenceStore) -> dict[str, NDArray[np.int64]]:
        """Return the rows without a target, and those with an item without a code among the events they would show."""
        lacking = store.lengths if store.num_targets is None else store.num_targets
        return {
            "no event to predict": np.flatnonzero(lacking < 1),
            "an item without a code": self._without_codes(store),
        }

    def filters(self) -> tuple[object, ...]:
        """Say what decides which rows make samples."""
        coded = np.packbits(self.table.codes[:, 0] != _NO_CODE)
        return ("codes", self.max_history_length, hashlib.sha256(coded.tobytes()).hexdigest())

    def _without_codes(self, store: SequenceStore) -> NDArray[np.int64]:
        shown_from = np.maximum(store.offsets[:-1], store.offsets[1:] - 1 - self.max_history_length)
        items = store.events[ITEM_ID]
        found = []
        for first in range(0, len(items), _EVENTS_AT_A_TIME):
            events = first + np.flatnonzero(~self.table.has_code(items[first : first + _EVENTS_AT_A_TIME]))
            rows = np.searchsorted(store.offsets, events, side="right") - 1
            found.append(np.unique(rows[events >= shown_from[rows]]))
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def __call__(
        self, picks: Sequence[Pick], sample_ids: NDArray[np.int64], *, batch_size: int, num_batches: int = 1
    ) -> list[SemanticIdBatch]:
        """Make batches of the picked samples."""
        count = len(sample_ids)
        codes, levels = self.table.codes, self.table.codes.shape[1]
        offsets = self.table.level_offsets
        begins, splits, ends = locate(picks, count, max_history_length=self.max_history_length, max_num_candidates=1)
        features = contextual_layout(picks, {SEMANTIC_ID: (splits - begins) * levels}, batch_size, num_batches)
        places = features.places(SEMANTIC_ID)
        copy_codes(picks, ITEM_ID, begins, splits - begins, places, codes, offsets, features.values)
        labels = Layout({LABEL: (ends - splits) * levels}, batch_size, num_batches)
        label_offsets = offsets if self.label_offsets else np.zeros_like(offsets)
        copy_codes(picks, ITEM_ID, splits, ends - splits, labels.places(LABEL), codes, label_offsets, labels.values)
        ids = torch.from_numpy(padded(sample_ids, batch_size, num_batches, fill=-1))
        longest = zip(features.max_lengths(), labels.max_lengths(), strict=True)
        return [
            SemanticIdBatch(
                batch_size=batch_size,
                num_real=tokens // levels,
                loss_tokens=tokens,
                max_lengths=longest_feature | longest_label,
                features=of_features,
                labels=of_labels,
                sample_ids=ids[number],
            )
            for number, (of_features, of_labels, (longest_feature, longest_label), (tokens,)) in enumerate(
                zip(features.tensors(), labels.tensors(), longest, labels.num_values(), strict=True)
            )
        ]
