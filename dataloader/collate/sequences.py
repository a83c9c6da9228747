"""Samples of stores -> batches: the base `Collate`, and `SequenceCollate` for histories and candidates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.batches.batch import Batch, SequenceBatch
from evenrank.dataloader.collate.gather import (
    HistorySpans,
    KeyValues,
    SampleLengths,
    StoreRows,
    find_context,
    find_spans,
    gather,
    pad_rows,
)
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.datasets.store import SequenceStore

LABEL = "label"


@dataclass(frozen=True, kw_only=True, slots=True)
class Collate(ABC, Generic[Batch]):
    """Makes batches of samples, and decides which rows are samples. Its fields are the settings in `config.py`."""

    _batch_type: ClassVar[Callable[..., Any]]

    max_history_length: int
    max_num_candidates: int
    user_id: bool

    def check(self, store: SequenceStore) -> None:
        """Raise a ConfigError if the store lacks a column that batches need."""

    @abstractmethod
    def unusable(self, store: SequenceStore) -> Mapping[str, NDArray[np.int64]]:
        """Return, per reason, the rows that are not samples: int64, ascending. All stores have the same reasons."""

    @abstractmethod
    def filters(self) -> tuple[object, ...]:
        """Return the settings of the loader's fingerprint: those that decide which rows are samples, and the codes."""

    def lengths(self, groups: Sequence[StoreRows], num_samples: int) -> SampleLengths:
        """Return how long the rows of these samples are in a batch, without making it."""
        spans, features, labels = self._find(groups, num_samples)
        of_keys = {("features", name): values.lengths for name, values in features.items()}
        if labels is not None:
            of_keys["labels", LABEL] = labels.lengths
        no_candidates = np.zeros(num_samples, dtype=np.int64)
        num_candidates = self._dense_columns(spans).get("num_candidates", no_candidates)
        return SampleLengths(of_keys=of_keys, num_candidates=num_candidates)

    def __call__(
        self, groups: Sequence[StoreRows], sample_ids: NDArray[np.int64], *, batch_size: int, num_batches: int = 1
    ) -> list[Batch]:
        """Make batches of samples [n], in order; rows after the last sample are padding.

        At least one group is needed, because the stores name the contextual features.
        """
        num_samples = len(sample_ids)
        spans, features, labels = self._find(groups, num_samples)
        gathered = gather(groups, features, batch_size, num_batches)
        fields: dict[str, Sequence[Any]] = {"features": gathered.tensors}
        max_lengths = gathered.max_lengths
        if labels is None:
            # Items are predicted from their predecessors, which the first one lacks; see SequenceBatch.loss_key.
            loss_lengths = np.maximum(features[ITEM_ID].lengths - 1, 0)
        else:
            loss_lengths = labels.lengths
            gathered = gather(groups, {LABEL: labels}, batch_size, num_batches)
            self._finish_labels(gathered.values)
            fields["labels"] = gathered.tensors
            max_lengths = [a | b for a, b in zip(max_lengths, gathered.max_lengths, strict=True)]
        loss_tokens = pad_rows(loss_lengths, batch_size, num_batches).sum(axis=1).tolist()
        for name, column in self._dense_columns(spans).items():
            fields[name] = torch.from_numpy(pad_rows(column, batch_size, num_batches)).unbind()
        fields["sample_ids"] = torch.from_numpy(pad_rows(sample_ids, batch_size, num_batches, fill=-1)).unbind()
        limits = {name: values.length_limit for name, values in features.items()}
        if labels is not None:
            limits[LABEL] = labels.length_limit
        return [
            self._batch_type(
                batch_size=batch_size,
                num_real=min(max(num_samples - batch * batch_size, 0), batch_size),
                loss_tokens=loss_tokens[batch],
                max_lengths=max_lengths[batch],
                length_limits=dict(limits),
                **dict(zip(fields, tensors, strict=True)),
            )
            for batch, tensors in enumerate(zip(*fields.values(), strict=True))
        ]

    @abstractmethod
    def _event_values(self, spans: HistorySpans) -> dict[str, KeyValues]:
        """Return the features that are made from events, by key."""

    @abstractmethod
    def _label_values(self, spans: HistorySpans) -> KeyValues | None: ...

    def _dense_columns(self, spans: HistorySpans) -> dict[str, NDArray[np.int64]]:
        """Return the dense fields besides the sample ids: int64 [n] each, 0 in padding rows."""
        return {}

    def _finish_labels(self, values: NDArray[np.int64]) -> None:
        """Change the gathered labels in place."""

    def _find(
        self, groups: Sequence[StoreRows], num_samples: int
    ) -> tuple[HistorySpans, dict[str, KeyValues], KeyValues | None]:
        """Return the samples' histories and candidates, their features by key, and their labels."""
        spans = find_spans(groups, num_samples, self.max_history_length, self.max_num_candidates)
        names = (*((USER_ID,) if self.user_id else ()), *groups[0].store.manifest.contextual)
        context = {name: find_context(groups, name, num_samples) for name in names}
        return spans, context | self._event_values(spans), self._label_values(spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCollate(Collate[SequenceBatch]):
    """Collates samples into a SequenceBatch.

    The last `max_num_candidates` events of a user are the candidates, and the newest `max_history_length` events before
    them the history:

        events          a b c d e f g       max_history_length = 3, max_num_candidates = 2
        history               c d e
        candidates                  f g
        item_id               c d e f g     action  c d e     label  f g
    """

    _batch_type = SequenceBatch

    num_tasks: int
    candidate_actions: bool
    extra_events: tuple[str, ...]

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

    def _event_values(self, spans: HistorySpans) -> dict[str, KeyValues]:
        begins, history_ends, ends = spans
        values: dict[str, KeyValues] = {}
        for name in (ITEM_ID, ACTION, *self.extra_events):
            # The time at which a candidate is shown is known in advance; everything else about the event is an outcome.
            if name in (ITEM_ID, TIMESTAMP_MS) or self.candidate_actions:
                max_size = self.max_history_length + self.max_num_candidates
                values[name] = KeyValues(name, begins, ends - begins, max_size)
            else:
                values[name] = KeyValues(name, begins, history_ends - begins, self.max_history_length)
        return values

    def _label_values(self, spans: HistorySpans) -> KeyValues | None:
        if not self.max_num_candidates and not self.num_tasks:
            return None
        begins = spans.history_ends if self.max_num_candidates else spans.begins
        return KeyValues(ACTION, begins, spans.ends - begins, self.max_num_candidates or self.max_history_length)

    def _finish_labels(self, values: NDArray[np.int64]) -> None:
        if self.num_tasks > 1:
            values &= (1 << self.num_tasks) - 1

    def _dense_columns(self, spans: HistorySpans) -> dict[str, NDArray[np.int64]]:
        return {"num_candidates": spans.ends - spans.history_ends}


def check_user_ids(store: SequenceStore) -> None:
    """Raise a DataError if a user id is negative, and so no row of an embedding table; datasets may have such ids."""
    user_ids = store.rows[USER_ID]
    if len(user_ids) and (least := int(user_ids.min())) < 0:
        raise DataError(
            f"user_id=True makes user ids a feature, but {store.folder or 'the dataset'} has user {least}; number its "
            "users from 0, or leave user_id=True out"
        )
