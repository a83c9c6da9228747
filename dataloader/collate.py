"""Rows of a store -> one batch, in a few vectorised passes over all samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.dataloader.batch import SequenceBatch, keyed_jagged_tensor
from evenrank.datasets.schema import ACTION, ITEM_ID
from evenrank.datasets.store import SequenceStore

LABEL = "label"


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCollate:
    """Collates rows of one store into a SequenceBatch.

    Of a user's events, the last `num_candidates` are the candidates and the newest `max_history_length` before them the
    history:

        events          a b c d e f g       max_history_length = 3, num_candidates = 2
        history               c d e
        candidates                  f g
        item_id               c d e f g     action  c d e     label  f g
    """

    store: SequenceStore
    max_history_length: int  # events
    num_candidates: int  # events; rows must have at least that many
    label_history: bool  # with no candidates, the history's actions are the labels
    candidate_actions: bool  # the candidates' actions are part of the `action` feature too

    def __call__(self, rows: Sequence[int] | NDArray[np.int64]) -> SequenceBatch:
        """Collate rows (numbers in the split, 0 or more of them) into a batch with a row for each."""
        ids = np.asarray(rows, dtype=np.int64)
        ends = self.store.offsets[ids + 1]
        splits = ends - self.num_candidates  # where candidates begin
        begins = np.maximum(self.store.offsets[ids], splits - self.max_history_length)
        action_ends = ends if self.candidate_actions else splits

        contextual = self.store.manifest.contextual
        keys = [*contextual, ITEM_ID, ACTION]
        lengths = np.ones((len(keys), len(ids)), dtype=np.int64)
        lengths[-2] = ends - begins
        lengths[-1] = action_ends - begins
        actions = self.store.events[ACTION]
        values = np.concatenate(
            [
                *(self.store.rows[name][ids] for name in contextual),
                _gather(self.store.events[ITEM_ID], begins, lengths[-2]),
                _gather(actions, begins, lengths[-1]),
            ],
            dtype=np.int64,
        )
        labels = None
        if self.num_candidates or self.label_history:
            label_begins = splits if self.num_candidates else begins
            label_lengths = ends - label_begins
            label_values = _gather(actions, label_begins, label_lengths).astype(np.int64)
            labels = keyed_jagged_tensor([LABEL], torch.from_numpy(label_values), label_lengths[np.newaxis])
        return SequenceBatch(
            batch_size=len(ids),
            num_real=len(ids),
            loss_tokens=int((lengths[-2] if labels is None else label_lengths).sum()),
            features=keyed_jagged_tensor(keys, torch.from_numpy(values), lengths),
            labels=labels,
            num_candidates=torch.full((len(ids),), self.num_candidates, dtype=torch.int64),
            sample_ids=torch.from_numpy(ids),
        )


def _gather(column: NDArray[np.integer], begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.integer]:
    """Concatenate column[begins[i] : begins[i] + lengths[i]] over all i."""
    # begins 10 40, lengths 2 3: the output positions 0 1 2 3 4 are shifted by 10-0 and 40-2 to 10 11 40 41 42.
    shifts = begins - np.concatenate(([0], np.cumsum(lengths)[:-1]))
    return column[np.repeat(shifts, lengths) + np.arange(lengths.sum())]
