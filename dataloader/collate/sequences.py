"""Samples of stores -> batches, in a few compiled passes over the samples of several batches at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch, SequenceBatch
from evenrank.dataloader.collate.layout import Layout
from evenrank.dataloader.collate.spans import Pick, copy_events, locate
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS
from evenrank.datasets.store import SequenceStore

LABEL = "label"

Batch = TypeVar("Batch", bound=JaggedBatch)


class Collate(Protocol[Batch]):
    """Makes batches of samples."""

    def check(self, store: SequenceStore) -> None:
        """Raise a ConfigError if the store lacks what batches need."""
        ...

    def unusable(self, store: SequenceStore) -> Mapping[str, NDArray[np.int64]]:
        """Return per reason the rows that make no sample, ascending: int64. Reasons are the same for all stores."""
        ...

    def filters(self) -> tuple[object, ...]:
        """Say what decides which rows make samples."""
        ...

    def __call__(
        self, picks: Sequence[Pick], sample_ids: NDArray[np.int64], *, batch_size: int, num_batches: int = 1
    ) -> list[Batch]:
        """Make batches of the picked samples, in order: as many as there are rows for, then padding.

        Args:
            picks: where the samples lie; at least one, whose stores say which contextual features there are.
            sample_ids: int64 [0..num_batches * batch_size], what the samples are called.
            batch_size: rows of each batch.
            num_batches: how many to make.

        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCollate:
    """Collates samples into a SequenceBatch.

    Of a user's events, the last `max_num_candidates` are the candidates and the newest `max_history_length` before them
    the history:

        events          a b c d e f g       max_history_length = 3, max_num_candidates = 2
        history               c d e
        candidates                  f g
        item_id               c d e f g     action  c d e     label  f g
    """

    max_history_length: int  # events
    max_num_candidates: int  # events
    num_tasks: int  # above 1: labels keep that many low bits; without candidates, above 0: the history has labels
    candidate_actions: bool  # the candidates' actions are part of the `action` feature too
    extra_events: tuple[str, ...]  # further event columns that become features

    def check(self, store: SequenceStore) -> None:
        """Raise a ConfigError if the store lacks one of the extra events."""
        known = [name for name in store.events if name not in (ITEM_ID, ACTION)]
        for name in self.extra_events:
            if name not in known:
                raise ConfigError(f"the dataset has no extra events {name!r}; it has {', '.join(known)}")

    def unusable(self, store: SequenceStore) -> dict[str, NDArray[np.int64]]:
        """Return the rows with fewer events than candidates; where rows have targets, those with none."""
        if not self.max_num_candidates:
            return {}
        lacking = store.lengths < self.max_num_candidates if store.num_targets is None else store.num_targets < 1
        return {f"fewer events than {self.max_num_candidates} candidates": np.flatnonzero(lacking)}

    def filters(self) -> tuple[object, ...]:
        """Say what decides which rows make samples."""
        return ("candidates", self.max_num_candidates)

    def __call__(
        self, picks: Sequence[Pick], sample_ids: NDArray[np.int64], *, batch_size: int, num_batches: int = 1
    ) -> list[SequenceBatch]:
        """Make batches of the picked samples."""
        count = len(sample_ids)
        begins, splits, ends = locate(
            picks, count, max_history_length=self.max_history_length, max_num_candidates=self.max_num_candidates
        )
        actions = (ends if self.candidate_actions else splits) - begins
        lengths = {ITEM_ID: ends - begins, ACTION: actions}
        # When a candidate is shown is known beforehand; what comes of it is not.
        lengths |= {name: ends - begins if name == TIMESTAMP_MS else actions for name in self.extra_events}
        features = contextual_layout(picks, lengths, batch_size, num_batches)
        for name, of_key in lengths.items():
            copy_events(picks, name, begins, of_key, features.places(name), features.values)

        label_begins = splits if self.max_num_candidates else begins
        labels = Layout({LABEL: ends - label_begins}, batch_size, num_batches)
        has_labels = self.max_num_candidates > 0 or self.num_tasks > 0
        if has_labels:
            copy_events(picks, ACTION, label_begins, ends - label_begins, labels.places(LABEL), labels.values)
            if self.num_tasks > 1:
                labels.values &= (1 << self.num_tasks) - 1

        ids = torch.from_numpy(padded(sample_ids, batch_size, num_batches, fill=-1))
        num_candidates = torch.from_numpy(padded(ends - splits, batch_size, num_batches, fill=0))
        tensors = zip(features.tensors(), labels.tensors() if has_labels else repeat(None), strict=False)
        return [
            SequenceBatch(
                batch_size=batch_size,
                num_real=min(max(count - number * batch_size, 0), batch_size),
                loss_tokens=tokens,
                max_lengths=longest | longest_label if has_labels else longest,
                features=of_features,
                labels=of_labels,
                num_candidates=num_candidates[number],
                sample_ids=ids[number],
            )
            for number, ((of_features, of_labels), longest, longest_label, (tokens,)) in enumerate(
                zip(tensors, features.max_lengths(), labels.max_lengths(), labels.num_values(), strict=True)
            )
        ]


def contextual_layout(
    picks: Sequence[Pick], lengths: Mapping[str, NDArray[np.int64]], batch_size: int, num_batches: int
) -> Layout:
    """Lay out the contextual features in front of keys of these lengths [n], and fill the contextual ones in."""
    contextual = picks[0].store.manifest.contextual
    ones = np.ones(len(next(iter(lengths.values()))), dtype=np.int64)
    layout = Layout({**dict.fromkeys(contextual, ones), **lengths}, batch_size, num_batches)
    for name in contextual:
        places = layout.places(name)
        for store, rows, slots in picks:
            layout.values[places[slots]] = store.rows[name][rows]
    return layout


def padded(values: NDArray[np.int64], batch_size: int, num_batches: int, *, fill: int) -> NDArray[np.int64]:
    """Return the values [n] as rows of batches: int64 [num_batches, batch_size], filled up."""
    rows = np.full(num_batches * batch_size, fill, dtype=np.int64)
    rows[: len(values)] = values
    return rows.reshape(num_batches, batch_size)
