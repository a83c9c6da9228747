"""Samples of stores -> batches: the base `Collate`, and `SequenceCollate` for histories and candidates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.batches.batch import Batch, SequenceBatch, name_keys
from evenrank.dataloader.collate.gather import (
    DrawKey,
    HistorySpans,
    KeyValues,
    SampleLengths,
    StoreRows,
    find_context,
    find_known,
    find_spans,
    gather,
    pad_rows,
)
from evenrank.dataloader.collate.negatives import LOG_Q, NegativeSampler
from evenrank.datasets.schema import ACTION, FLOAT, FLOAT_OR_MISSING, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.datasets.store import SequenceStore

LABEL, TARGET, WEIGHT, KNOWN = "label", "target", "weight", "known"
_FLOAT_FIELDS = ("float_features", "targets", "weights", LOG_Q)
Fields = dict[str, dict[str, KeyValues]]  # by field of the batch, in its order, and key


@dataclass(frozen=True, kw_only=True, slots=True)
class Collate(ABC, Generic[Batch]):
    """Makes batches of samples, and decides which rows are samples. Its fields are the settings in `config.py`."""

    _batch_type: ClassVar[Callable[..., Any]]

    max_history_length: int
    max_num_candidates: int
    user_id: bool
    context: tuple[str, ...] | None = None
    has_requests: bool = False

    def check(self, store: SequenceStore) -> None:
        """Raise a ConfigError if the store lacks a column that batches need."""
        _check_known("contextual feature", self.context or (), store.manifest.contextual)

    @abstractmethod
    def unusable(self, store: SequenceStore) -> Mapping[str, NDArray[np.int64]]:
        """Return, per reason, the rows that are not samples: int64, ascending. All stores have the same reasons."""

    @abstractmethod
    def filters(self) -> tuple[object, ...]:
        """Return the settings of the loader's fingerprint: those that decide which rows are samples, and the codes."""

    def lengths(self, groups: Sequence[StoreRows], num_samples: int) -> SampleLengths:
        """Return how long the rows of these samples are in a batch, without making it."""
        spans, fields = self._find(groups, num_samples)
        of_keys = {(field, name): values.lengths for field, keys in fields.items() for name, values in keys.items()}
        no_candidates = np.zeros(num_samples, dtype=np.int64)
        num_candidates = self._dense_columns(groups, spans).get("num_candidates", no_candidates)
        return SampleLengths(of_keys=of_keys, num_candidates=num_candidates)

    def __call__(
        self,
        groups: Sequence[StoreRows],
        sample_ids: NDArray[np.int64],
        *,
        batch_size: int,
        num_batches: int = 1,
        seed: int = 0,
        epoch: int = 0,
    ) -> list[Batch]:
        """Make batches of samples [n], in order; rows after the last sample are padding.

        At least one group is needed, because the stores name the contextual features. What is drawn for a sample
        depends on its id, `seed` and `epoch`.
        """
        num_samples = len(sample_ids)
        spans, jagged = self._find(groups, num_samples, DrawKey(seed, epoch, sample_ids))
        fields: dict[str, Sequence[Any]] = {}
        values: dict[str, NDArray[Any]] = {}
        longest = []
        for field, keys in jagged.items():
            dtype = FLOAT if field in _FLOAT_FIELDS else "int64"
            values[field], fields[field], longest_of_keys = gather(groups, keys, batch_size, num_batches, dtype)
            longest.append(longest_of_keys)
        self._finish(values)
        if (predicted := jagged.get("known") or jagged.get("labels") or jagged.get("targets")) is None:
            # Items are predicted from their predecessors, which the first one lacks; see SequenceBatch.loss_key.
            loss_lengths = np.maximum(jagged["features"][ITEM_ID].lengths - 1, 0)
        else:
            (loss_lengths,) = (of_key.lengths for of_key in predicted.values())
        loss_tokens = pad_rows(loss_lengths, batch_size, num_batches).sum(axis=1).tolist()
        for name, column in self._dense_columns(groups, spans).items():
            fields[name] = torch.from_numpy(pad_rows(column, batch_size, num_batches)).unbind()
        fields["sample_ids"] = torch.from_numpy(pad_rows(sample_ids, batch_size, num_batches, fill=-1)).unbind()
        of_keys = {(field, key): of_key for field, keys in jagged.items() for key, of_key in keys.items()}
        names = name_keys(tuple(of_keys))
        max_lengths = [dict(zip(names, of_batch, strict=True)) for of_batch in np.concatenate(longest, axis=1).tolist()]
        limits = {name: of_key.length_limit for name, of_key in zip(names, of_keys.values(), strict=True)}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        return [
            self._batch_type(
                batch_size=batch_size,
                num_real=min(max(num_samples - batch * batch_size, 0), batch_size),
                loss_tokens=loss_tokens[batch],
                max_lengths=max_lengths[batch],
                length_limits=dict(limits),
                **self._shared(),
                **dict(zip(fields, tensors, strict=True)),
            )
            for batch, tensors in enumerate(zip(*fields.values(), strict=True))
        ]

    @abstractmethod
    def _event_values(self, spans: HistorySpans, key: DrawKey | None) -> dict[str, KeyValues]:
        """Return the features that are made from events, by key. Without a key to draw with, only lengths are right."""

    @abstractmethod
    def _loss_values(self, groups: Sequence[StoreRows], spans: HistorySpans, key: DrawKey | None) -> Fields:
        """Return the fields of labels, targets, weights and negatives, as far as batches have them, as above."""

    def _dense_columns(self, groups: Sequence[StoreRows], spans: HistorySpans) -> dict[str, NDArray[np.int64]]:
        """Return the dense fields besides the sample ids: int64 [n] each, 0 in padding rows."""
        if not self.has_requests:
            return {}
        times = np.empty_like(spans.begins)
        for store, _, samples in groups:
            times[samples] = store.columns[TIMESTAMP_MS][spans.history_ends[samples]]
        return {"request_ts_ms": times}

    def _shared(self) -> dict[str, Any]:
        """Return the fields that are the same in all batches, by name."""
        return {}

    def _finish(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Change the gathered values, of all batches by field, in place."""

    def _find(
        self, groups: Sequence[StoreRows], num_samples: int, key: DrawKey | None = None
    ) -> tuple[HistorySpans, Fields]:
        """Return the samples' histories and candidates, and the values of all jagged keys."""
        spans = find_spans(groups, num_samples, self.max_history_length, self.max_num_candidates)
        store = groups[0].store
        context = store.manifest.contextual if self.context is None else self.context
        names = (*((USER_ID,) if self.user_id else ()), *context)
        features = {name: find_context(groups, name, num_samples) for name in names} | self._event_values(spans, key)
        floats = {name: features.pop(name) for name in [*features] if features[name].elements(store).dtype.kind == "f"}
        fields = {"features": features, "float_features": floats} if floats else {"features": features}
        return spans, fields | self._loss_values(groups, spans, key)


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
    label: str | None = None
    target: str | None = None
    weight: str | None = None
    sampler: NegativeSampler | None = None

    def check(self, store: SequenceStore) -> None:
        """Raise a ConfigError if the store lacks a column that batches need."""
        Collate.check(self, store)
        columns = store.manifest.columns
        events = {name: dtype for name, kind, dtype, *_ in columns if kind == "event" and name != ITEM_ID}
        integers = [name for name, dtype in events.items() if dtype != FLOAT]
        floats = [name for name, kind, dtype, *_ in columns if kind != "event" and dtype == FLOAT]
        _check_known("extra events", self.extra_events, [name for name in events if name != ACTION])
        _check_known("integer events for label", [self.label] if self.label else (), integers)
        _check_known("events for target", [self.target] if self.target else (), events)
        _check_known("events or float feature for weight", [self.weight] if self.weight else (), [*events, *floats])
        if self.weight and store.manifest.extra_events.get(self.weight) == FLOAT_OR_MISSING:
            raise ConfigError(
                f"weight {self.weight!r} may be missing in the dataset; declare it with =FILL or =drop there"
            )

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

    def _event_values(self, spans: HistorySpans, key: DrawKey | None) -> dict[str, KeyValues]:
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

    def _loss_values(self, groups: Sequence[StoreRows], spans: HistorySpans, key: DrawKey | None) -> Fields:
        begins, max_size = self._predicted(spans)
        values = KeyValues(self.label or ACTION, begins, spans.ends - begins, max_size)
        fields = {"labels": {LABEL: values}} if self.max_num_candidates or self.num_tasks or self.label else {}
        if self.target:
            fields["targets"] = {TARGET: values._replace(column=self.target)}
        if self.weight:
            values = values._replace(column=self.weight)
            if self.weight in groups[0].store.manifest.contextual:
                rows = find_context(groups, self.weight, len(begins)).begins
                values = values._replace(begins=rows, is_repeated=True)
            fields["weights"] = {WEIGHT: values}
        if self.target and groups[0].store.manifest.extra_events.get(self.target) == FLOAT_OR_MISSING:
            fields["known"] = {KNOWN: find_known(groups, fields["targets"][TARGET], has_places=key is not None)}
        if self.sampler is not None:
            fields |= self.sampler.values(groups, begins, spans.ends, max_size, key)
        return fields

    def _predicted(self, spans: HistorySpans) -> tuple[NDArray[np.int64], int]:
        """Return where the events with a loss begin, which end with the sample, and how many they are at most."""
        if self.max_num_candidates:
            return spans.history_ends, self.max_num_candidates
        if self.num_tasks or self.label or self.target:
            return spans.begins, self.max_history_length
        # Items are predicted from their predecessors, which the first one lacks.
        return np.minimum(spans.begins + 1, spans.ends), max(self.max_history_length - 1, 0)

    def _finish(self, values: Mapping[str, NDArray[Any]]) -> None:
        if self.num_tasks > 1 and "labels" in values:
            values["labels"] &= (1 << self.num_tasks) - 1
        if "known" in values and "weights" in values:
            values["weights"][np.isnan(values["targets"])] = 0

    def _dense_columns(self, groups: Sequence[StoreRows], spans: HistorySpans) -> dict[str, NDArray[np.int64]]:
        return {"num_candidates": spans.ends - spans.history_ends, **Collate._dense_columns(self, groups, spans)}


def _check_known(kind: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"the dataset has no {kind} {name!r}; known: {', '.join(known) or 'none'}")


def check_user_ids(store: SequenceStore) -> None:
    """Raise a DataError if a user id is negative, and so no row of an embedding table; datasets may have such ids."""
    user_ids = store.columns[USER_ID]
    if len(user_ids) and (least := int(user_ids.min())) < 0:
        raise DataError(
            f"user_id=True makes user ids a feature, but {store.folder or 'the dataset'} has user {least}; number its "
            "users from 0, or leave user_id=True out"
        )
