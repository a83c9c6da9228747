"""Samples of stores -> batches, in a few compiled passes over the samples of several batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.batches.batch import JaggedBatch, SequenceBatch
from evenrank.dataloader.collate.gather import (
    Layout,
    SampleLengths,
    Spans,
    StoreRows,
    copy_context,
    copy_events,
    find_context,
    find_spans,
)
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.datasets.store import SequenceStore

LABEL = "label"

Batch = TypeVar("Batch", bound=JaggedBatch)


class Collate(Protocol[Batch]):
    """Makes batches of samples, and decides which rows are samples."""

    def check(self, store: SequenceStore) -> None:
        """Raise a ConfigError if the store lacks a column that batches need."""
        ...

    def unusable(self, store: SequenceStore) -> Mapping[str, NDArray[np.int64]]:
        """Return, per reason, the rows that are not samples: int64, ascending. All stores have the same reasons.

        Raises:
            DataError: a row has a user id that cannot be a feature.

        """
        ...

    def filters(self) -> tuple[object, ...]:
        """Return what decides which rows are samples, and what their values mean; part of the loader's fingerprint.

        Cut-offs and labels are left out: a job may go on with others.
        """
        ...

    def lengths(self, groups: Sequence[StoreRows], num_samples: int) -> SampleLengths:
        """Return how long the rows of these samples are in a batch, without making it."""
        ...

    def __call__(
        self, groups: Sequence[StoreRows], sample_ids: NDArray[np.int64], *, batch_size: int, num_batches: int = 1
    ) -> list[Batch]:
        """Make batches of samples, in order; rows after the last sample are padding.

        Args:
            groups: the samples by store; at least one group, because the stores name the contextual features.
            sample_ids: int64 [n], n <= num_batches * batch_size: the ids that batches give the samples.
            batch_size: rows of each batch.
            num_batches: how many to make.

        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCollate:
    """Collates samples into a SequenceBatch.

    The last `max_num_candidates` events of a user are the candidates, and the newest `max_history_length` events before
    them the history:

        events          a b c d e f g       max_history_length = 3, max_num_candidates = 2
        history               c d e
        candidates                  f g
        item_id               c d e f g     action  c d e     label  f g
    """

    max_history_length: int
    """Events of a history; longer histories keep their newest ones."""
    max_num_candidates: int
    """Candidates of a sample."""
    user_id: bool
    """Whether `user_id` is a feature."""
    num_tasks: int
    """Above 1: labels keep this many low bits. Above 0 without candidates: the history has labels."""
    candidate_actions: bool
    """Whether the `action` feature includes the candidates' actions."""
    extra_events: tuple[str, ...]
    """Further list columns that become features."""

    def check(self, store: SequenceStore) -> None:
        """Raise a ConfigError if the store lacks one of the extra events."""
        known = [name for name in store.events if name not in (ITEM_ID, ACTION)]
        for name in self.extra_events:
            if name not in known:
                raise ConfigError(f"the dataset has no extra events {name!r}; known: {', '.join(known)}")

    def unusable(self, store: SequenceStore) -> dict[str, NDArray[np.int64]]:
        """Return the rows with fewer events than candidates or, if rows have numbers of targets, those with none."""
        if self.user_id:
            check_user_ids(store)
        if not self.max_num_candidates:
            return {}
        is_short = store.lengths < self.max_num_candidates if store.num_targets is None else store.num_targets < 1
        return {f"fewer events than {self.max_num_candidates} candidates": np.flatnonzero(is_short)}

    def filters(self) -> tuple[object, ...]:
        """Return the settings that decide which rows are samples."""
        return ("candidates", self.max_num_candidates)

    def __call__(
        self, groups: Sequence[StoreRows], sample_ids: NDArray[np.int64], *, batch_size: int, num_batches: int = 1
    ) -> list[SequenceBatch]:
        """Make batches of samples."""
        num_samples = len(sample_ids)
        spans = self._find_spans(groups, num_samples)
        begins, splits, ends = spans
        lengths = self._event_lengths(spans)
        features = layout_with_context(groups, lengths, batch_size, num_batches, user_id=self.user_id)
        for name, lengths_of_key in lengths.items():
            copy_events(groups, name, begins, lengths_of_key, features.begins(name), features.values)

        has_labels = self._has_labels
        label_begins = self._label_begins(spans)
        label_lengths = ends - label_begins
        labels = Layout({LABEL: label_lengths}, batch_size, num_batches)
        if has_labels:
            copy_events(groups, ACTION, label_begins, label_lengths, labels.begins(LABEL), labels.values)
            if self.num_tasks > 1:
                labels.values &= (1 << self.num_tasks) - 1

        ids = torch.from_numpy(pad_rows(sample_ids, batch_size, num_batches, fill=-1))
        num_candidates = torch.from_numpy(pad_rows(ends - splits, batch_size, num_batches, fill=0))
        limits = self._length_limits(groups[0].store)
        tensors = zip(features.tensors(), labels.tensors() if has_labels else repeat(None), strict=False)
        return [
            SequenceBatch(
                batch_size=batch_size,
                num_real=min(max(num_samples - batch * batch_size, 0), batch_size),
                loss_tokens=loss_tokens,
                max_lengths=feature_max | label_max if has_labels else feature_max,
                length_limits=dict(limits),
                features=features_of_batch,
                labels=labels_of_batch,
                num_candidates=num_candidates[batch],
                sample_ids=ids[batch],
            )
            for batch, ((features_of_batch, labels_of_batch), feature_max, label_max, (loss_tokens,)) in enumerate(
                zip(tensors, features.max_lengths(), labels.max_lengths(), labels.num_values(), strict=True)
            )
        ]

    def lengths(self, groups: Sequence[StoreRows], num_samples: int) -> SampleLengths:
        """Return how long the rows of these samples are in a batch."""
        spans = self._find_spans(groups, num_samples)
        features = context_lengths(groups, num_samples, user_id=self.user_id) | self._event_lengths(spans)
        of_keys = {("features", name): lengths for name, lengths in features.items()}
        if self._has_labels:
            of_keys["labels", LABEL] = spans.ends - self._label_begins(spans)
        return SampleLengths(of_keys=of_keys, num_candidates=spans.ends - spans.splits)

    @property
    def _has_labels(self) -> bool:
        return self.max_num_candidates > 0 or self.num_tasks > 0

    def _find_spans(self, groups: Sequence[StoreRows], num_samples: int) -> Spans:
        return find_spans(
            groups,
            num_samples,
            max_history_length=self.max_history_length,
            max_num_candidates=self.max_num_candidates,
        )

    def _event_lengths(self, spans: Spans) -> dict[str, NDArray[np.int64]]:
        """Return the lengths of the features that are columns of events: int64 [n] each."""
        item_lengths = spans.ends - spans.begins
        action_lengths = (spans.ends if self.candidate_actions else spans.splits) - spans.begins
        lengths = {ITEM_ID: item_lengths, ACTION: action_lengths}
        # The time at which a candidate is shown is known in advance; everything else about the event is an outcome.
        return lengths | {name: item_lengths if name == TIMESTAMP_MS else action_lengths for name in self.extra_events}

    def _label_begins(self, spans: Spans) -> NDArray[np.int64]:
        """Return the first event of each sample that has a loss: int64 [n]; all up to its last one have."""
        if self.max_num_candidates:
            return spans.splits
        if self._has_labels:
            return spans.begins
        # Items are predicted from their predecessors, which the first one lacks; see SequenceBatch.loss_key.
        return np.minimum(spans.begins + 1, spans.ends)

    def _length_limits(self, store: SequenceStore) -> dict[str, int]:
        """Return the longest that a row of each key can be."""
        item_limit = self.max_history_length + self.max_num_candidates
        action_limit = item_limit if self.candidate_actions else self.max_history_length
        limits = context_limits(store, user_id=self.user_id) | {ITEM_ID: item_limit, ACTION: action_limit}
        limits |= {name: item_limit if name == TIMESTAMP_MS else action_limit for name in self.extra_events}
        if self.max_num_candidates or self.num_tasks:
            limits[LABEL] = self.max_num_candidates or self.max_history_length
        return limits


def layout_with_context(
    groups: Sequence[StoreRows],
    lengths: Mapping[str, NDArray[np.int64]],
    batch_size: int,
    num_batches: int,
    *,
    user_id: bool,
) -> Layout:
    """Lay out user ids on request, contextual features, and keys with these lengths [n]; fill in all but these keys."""
    num_samples = len(next(iter(lengths.values())))
    names = context_limits(groups[0].store, user_id=user_id)
    context = {name: find_context(groups, name, num_samples) for name in names}
    layout = Layout({**{name: spans.lengths for name, spans in context.items()}, **lengths}, batch_size, num_batches)
    for name, spans in context.items():
        copy_context(groups, name, spans, layout.begins(name), layout.values)
    return layout


def context_lengths(groups: Sequence[StoreRows], num_samples: int, *, user_id: bool) -> dict[str, NDArray[np.int64]]:
    """Return how many values samples have of `user_id`, on request, and of each contextual feature: int64 [n] each."""
    names = context_limits(groups[0].store, user_id=user_id)
    return {name: find_context(groups, name, num_samples).lengths for name in names}


def context_limits(store: SequenceStore, *, user_id: bool) -> dict[str, int]:
    """Return the most values that a sample can have of `user_id`, on request, and of each contextual feature."""
    names = (*((USER_ID,) if user_id else ()), *store.manifest.contextual)
    return {name: store.multi_valued[name].max_length if name in store.multi_valued else 1 for name in names}


def check_user_ids(store: SequenceStore) -> None:
    """Raise a DataError if a user id is negative, and so no row of an embedding table; datasets may have such ids."""
    user_ids = store.rows[USER_ID]
    if len(user_ids) and (least := int(user_ids.min())) < 0:
        raise DataError(
            f"user_id=True makes user ids a feature, but {store.folder or 'the dataset'} has user {least}; number its "
            "users from 0, or leave user_id=True out"
        )


def pad_rows(values: NDArray[np.int64], batch_size: int, num_batches: int, *, fill: int) -> NDArray[np.int64]:
    """Return values [n] as the rows of batches, padded with `fill`: int64 [num_batches, batch_size]."""
    rows = np.full(num_batches * batch_size, fill, dtype=np.int64)
    rows[: len(values)] = values
    return rows.reshape(num_batches, batch_size)
