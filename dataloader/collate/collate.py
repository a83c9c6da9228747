"""`Collate`: samples of stores -> batches, by a list of parts that says how each of their keys is made."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.batches.batch import SemanticIdBatch, SequenceBatch, name_keys
from evenrank.dataloader.batches.memory import HOST, Memory
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.dataloader.batches.token_padding import PaddedKey, TokenPadding
from evenrank.dataloader.codes import SEMANTIC_ID, CodeTable, read_codes
from evenrank.dataloader.collate.gather import (
    DrawKey,
    HistorySpans,
    ItemTokens,
    KeyValues,
    SampleLengths,
    StoreRows,
    find_context,
    find_known,
    find_spans,
    gather,
    pad_rows,
)
from evenrank.dataloader.collate.item_features import read_item_features
from evenrank.dataloader.collate.item_lists import CANDIDATE_SETS, CandidateSets, Sources
from evenrank.dataloader.collate.negatives import LOG_Q, NegativeSampler
from evenrank.dataloader.collate.parts import Part, list_parts, predicted_events
from evenrank.dataloader.collate.pools import EventPools
from evenrank.dataloader.collate.selection import Selection, select_events
from evenrank.dataloader.collate.stochastic_length import EventDraws
from evenrank.dataloader.collate.targets import TargetFeatures
from evenrank.dataloader.config import LoaderConfig
from evenrank.datasets.continuous_log import LogSource
from evenrank.datasets.order import resolve_order
from evenrank.datasets.schema import FLOAT, ITEM_ID, TIMESTAMP_MS, USER_ID, IdSummary, Manifest
from evenrank.datasets.store import SequenceStore

_FLOAT_FIELDS = ("float_features", "float_labels", "weights", LOG_Q)
_EVENTS_PER_CHUNK = 1 << 24  # bounds the memory for checking a store


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Collate:
    """Makes batches of samples, and decides which rows are samples.

    The last `max_num_candidates` events of a user are the candidates, and the newest `max_history_length` events before
    them the history:

        events          a b c d e f g       max_history_length = 3, max_num_candidates = 2
        history               c d e
        candidates                  f g
        item_id               c d e f g     action  c d e     label  f g

    With codes, the last event is the target, the one candidate, and each event has `levels` tokens:

        events          a b c d             max_history_length = 2, levels = 2
        semantic_id     b1 b2 c1 c2
        candidate_id    d1 d2               with `candidate_feature`
        label           d1 d2
        label           c1 c2 d1 d2         with `history_labels`
    """

    config: LoaderConfig
    parts: tuple[Part, ...]
    table: CodeTable | None = None
    sampler: NegativeSampler | None = None
    candidate_sets: CandidateSets | None = None
    selections: tuple[Selection, ...] = ()
    """Of the events of histories, one after the other."""
    targets: TargetFeatures | None = None
    item_tables: Mapping[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    """Features of items, [items] each; with a KeyMap of items, of rows of their table."""
    has_requests: bool = False
    padding: TokenPadding | None = None

    @classmethod
    def create(cls, config: LoaderConfig, manifest: Manifest, sources: Sources = ()) -> "Collate":
        """Read the codes, count the items that negatives are drawn from, and return the collate of a dataset.

        Raises:
            ConfigError: the dataset lacks a column, or is none to draw negatives from.
            DataError: a file of codes or of hard negatives is missing or malformed.
        """
        table, negatives, sets = config.codes, config.negatives, config.candidate_sets
        if table is not None and not isinstance(table, CodeTable):
            table = read_codes(table, config.codebook_sizes)
        items, selections = config.key_maps.get(ITEM_ID), list[Selection]()
        if config.pools is not None:
            selections.append(EventPools(config.pools, config.max_history_length))
        if config.stochastic_length is not None:
            selections.append(EventDraws(config.stochastic_length, config.max_history_length))
        made = cls(
            config=config,
            parts=(),
            table=table,
            sampler=None if negatives is None else NegativeSampler.create(negatives, sources, items),
            candidate_sets=None if sets is None else CandidateSets.read(sets, sources, config.key_maps),
            selections=tuple(selections),
            item_tables=_read_item_tables(config, sources),
            has_requests=resolve_order(config.order).has_requests,
        )
        return made.of(manifest)

    def of(self, manifest: Manifest) -> "Collate":
        """Return this collate for another dataset; an error if it lacks a column or has other items than the codes."""
        config, columns, targets = self.config, manifest.columns, None
        if self.table is not None and self.table.bundle is not None:
            self.table.bundle.check_items(manifest)
        kinds = [column.name for column in columns if column.kind == "event" and column.dtype != FLOAT]
        if config.pools is not None and config.pools.column not in kinds:
            raise ConfigError(
                f"pools are of {config.pools.column!r}, no column of events of integers; there are {', '.join(kinds)}"
            )
        if config.target_features or config.crosses:
            targets = TargetFeatures.create(config, columns, self.item_tables)
        item_types = {name: FLOAT if table.dtype == FLOAT else "int64" for name, table in self.item_tables.items()}
        target_types = {} if targets is None else targets.types(columns)
        parts = list_parts(config, columns, self.table, item_types, target_types)
        lists = {column.name for column in columns if column.kind == "list"}
        return replace(self, parts=parts, targets=targets, padding=_token_padding(config, parts, lists))

    def describe(self) -> dict[str, str | None]:
        """Return what files say, by option: the same for equal contents, at any path."""
        return {
            "codes": None if self.table is None else self.table.describe(),
            "negatives": None if self.sampler is None else self.sampler.describe(),
            CANDIDATE_SETS: None if self.candidate_sets is None else self.candidate_sets.describe(),
        }

    @property
    def ids(self) -> dict[str, IdSummary]:
        """The versions of the codes, if they are known, for states."""
        return {} if self.table is None or self.table.bundle is None else {SEMANTIC_ID: self.table.bundle.codes}

    def filters(self) -> tuple[object, ...]:
        """Return the settings of a loader's fingerprint: those that decide which rows are samples, and the codes."""
        if self.table is None:
            return ("candidates", self.config.max_num_candidates)
        return ("codes", self.config.max_history_length, self.table.describe())

    def unusable(self, store: SequenceStore) -> dict[str, NDArray[np.int64]]:
        """Return, per reason, the rows that are not samples: int64, ascending. All stores have the same reasons.

        They have fewer events than candidates or, if rows have numbers of targets, none; or an item without a code; or
        are of a user without a candidate set.
        """
        reasons: dict[str, NDArray[np.int64]] = {}
        if self.config.user_id:
            _check_user_ids(store)
        if most := self.config.max_num_candidates:
            is_short = store.lengths < most if store.num_targets is None else store.num_targets < 1
            reason = "no event to predict" if most == 1 else f"fewer events than {most} candidates"
            reasons[reason] = np.flatnonzero(is_short)
        if (sets := self.candidate_sets) is not None:
            reasons["no candidate set of the user"] = np.flatnonzero(sets.find(store, np.arange(len(store))) < 0)
        if self.table is not None:
            reasons["an item without a code"] = self._rows_without_codes(store, self.table)
        return reasons

    def _rows_without_codes(self, store: SequenceStore, table: CodeTable) -> NDArray[np.int64]:
        first_shown = np.maximum(store.begins, store.ends - 1 - self.config.max_history_length)
        items = store.columns[ITEM_ID]
        without_code = [np.empty(0, dtype=np.int64)]
        for first in range(0, len(items), _EVENTS_PER_CHUNK):
            without_code.append(first + np.flatnonzero(~table.has_code(items[first : first + _EVENTS_PER_CHUNK])))
        events = np.concatenate(without_code)
        return np.flatnonzero(np.searchsorted(events, first_shown) < np.searchsorted(events, store.ends))

    def lengths(self, groups: Sequence[StoreRows], key: DrawKey) -> SampleLengths:
        """Return how long the rows of these samples are in a batch, without making it."""
        _, spans, fields = self._find(groups, key, has_values=False)
        of_keys = {(field, name): values.lengths for field, keys in fields.items() for name, values in keys.items()}
        num_candidates = np.zeros_like(spans.ends) if self.table is not None else spans.ends - spans.history_ends
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
        memory: Memory = HOST,
    ) -> list[Any]:
        """Make batches of samples [n], in order; rows after the last sample are padding.

        At least one group is needed, because the stores have the types of values. What is drawn for a sample depends on
        its id, `seed` and `epoch`. Tensors are placed in `memory`.
        """
        num_samples = len(sample_ids)
        groups, spans, jagged = self._find(groups, DrawKey(seed, epoch, sample_ids), has_values=True)
        values: dict[str, NDArray[Any]] = {}
        lengths: dict[str, NDArray[np.int64]] = {}
        for field, keys in jagged.items():
            dtype = FLOAT if field in _FLOAT_FIELDS else "int64"
            values[field], lengths[field] = gather(groups, keys, batch_size, num_batches, dtype)
        if self.config.num_tasks > 1 and "labels" in values:
            values["labels"] &= (1 << self.config.num_tasks) - 1
        if "known" in values and "weights" in values:
            values["weights"][np.isnan(values["float_labels"])] = 0
        dense = {
            name: pad_rows(column, batch_size, num_batches)
            for name, column in self._dense_columns(groups, spans).items()
        }
        dense["sample_ids"] = pad_rows(sample_ids, batch_size, num_batches, fill=-1)
        fields = _place(memory, {field: [*keys] for field, keys in jagged.items()}, values, lengths, dense)
        if (predicted := jagged.get("known") or jagged.get("labels") or jagged.get("float_labels")) is None:
            # Items are predicted from their predecessors, which the first one lacks; see SequenceBatch.loss_key.
            loss_lengths = np.maximum(jagged["features"][ITEM_ID].lengths - 1, 0)
        else:
            (loss_lengths,) = (of_key.lengths for of_key in predicted.values())
        loss_tokens = pad_rows(loss_lengths, batch_size, num_batches).sum(axis=1).tolist()
        of_keys = {(field, key): of_key for field, keys in jagged.items() for key, of_key in keys.items()}
        names, longest = name_keys(tuple(of_keys)), [of_field.max(axis=2, initial=0) for of_field in lengths.values()]
        max_lengths = [dict(zip(names, of_batch, strict=True)) for of_batch in np.concatenate(longest, axis=1).tolist()]
        limits = {name: of_key.length_limit for name, of_key in zip(names, of_keys.values(), strict=True)}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        batch_type: Any = SequenceBatch
        if self.table is not None:
            batch_type = partial(SemanticIdBatch, candidate_levels=len(self.table.codebook_sizes))
        return [
            batch_type(
                batch_size=batch_size,
                num_real=min(max(num_samples - batch * batch_size, 0), batch_size),
                loss_tokens=loss_tokens[batch],
                max_lengths=max_lengths[batch],
                length_limits=dict(limits),
                **dict(zip(fields, tensors, strict=True)),
            )
            for batch, tensors in enumerate(zip(*fields.values(), strict=True))
        ]

    def _find(
        self, groups: Sequence[StoreRows], key: DrawKey, *, has_values: bool
    ) -> tuple[Sequence[StoreRows], HistorySpans, dict[str, dict[str, KeyValues]]]:
        """Return the samples' histories and candidates, and their values by field and key, in the order of batches.

        They are those of the groups that are returned. Without `has_values`, only lengths are right.
        """
        config, num_samples = self.config, len(key.sample_ids)
        takes = has_values or any(part.of_event == "place" for part in self.parts)
        for selection in self.selections:
            groups = select_events(selection, groups, key, config.max_num_candidates, has_values=takes)
        spans = find_spans(groups, num_samples, config.max_history_length, config.max_num_candidates)
        made = self.targets.values(groups, spans.history_ends) if has_values and self.targets is not None else {}
        of_values = key if has_values else None
        fields: dict[str, dict[str, KeyValues]] = {}
        for part in self.parts:
            if part.of_event == "target":
                each = np.arange(num_samples), np.ones(num_samples, dtype=np.int64)
                values = KeyValues("", *each, 1, array=made.get(part.key))
            else:
                values = self._values_of(part, groups, spans, of_values)
            fields.setdefault(part.field, {})[part.key] = values
        if self.sampler is not None:
            begin, end, limit = predicted_events(config)
            fields |= self.sampler.values(groups, getattr(spans, begin), getattr(spans, end), limit, of_values)
        if self.candidate_sets is not None:
            fields[CANDIDATE_SETS] = {ITEM_ID: self.candidate_sets.values(groups, num_samples)}
        return groups, spans, fields

    def _values_of(
        self, part: Part, groups: Sequence[StoreRows], spans: HistorySpans, key: DrawKey | None
    ) -> KeyValues:
        if part.events is None:
            return find_context(groups, part.column, len(spans.ends))
        begins, ends = getattr(spans, part.events.begin), getattr(spans, part.events.end)
        values = KeyValues(part.column, begins, ends - begins, part.events.limit)
        if part.of_event == "row":
            rows = find_context(groups, part.column, len(begins)).begins
            return values._replace(begins=rows, is_repeated=True)
        if part.of_event == "feature":
            return values._replace(table=self.item_tables[part.key])
        if part.of_event == "place":
            return find_known(groups, values, has_places=key is not None)
        if self.table is None or part.level_offsets is None:
            return values
        # Each event has one code, the same for features and labels, on any number of ranks.
        tokens, alternatives = ItemTokens(self.table.codes, part.level_offsets), self.table.alternatives
        if key is not None and self.config.draw_alternatives and alternatives is not None:
            tokens = tokens._replace(alternatives=alternatives, words=key.words(), ends=spans.ends)
        return values._replace(tokens=tokens)

    def _dense_columns(self, groups: Sequence[StoreRows], spans: HistorySpans) -> dict[str, NDArray[np.int64]]:
        """Return the dense fields besides the sample ids: int64 [n] each, 0 in padding rows."""
        columns = {} if self.table is not None else {"num_candidates": spans.ends - spans.history_ends}
        if self.has_requests:
            times = columns["request_ts_ms"] = np.empty_like(spans.begins)
            for store, _, samples in groups:
                times[samples] = store.columns[TIMESTAMP_MS][spans.history_ends[samples]]
        return columns


def _token_padding(config: LoaderConfig, parts: Sequence[Part], lists: Collection[str]) -> TokenPadding | None:
    """Return the padding of features: padding rows have as many candidates as samples, and any history."""
    keys = []
    for part in parts:
        if part.field.endswith("features") and part.column not in lists:
            tokens = 1 if part.level_offsets is None else len(part.level_offsets)
            most = 1 if part.events is None else part.events.limit
            history = config.max_history_length if part.events and part.events.begin == "begins" else 0
            keys.append(PaddedKey(part.field, part.key, (most - history) * tokens, most * tokens))
    steps = config.pad_tokens_to
    return None if steps is None else TokenPadding(steps=steps, keys=tuple(keys), of_same_events=True)


def _place(
    memory: Memory,
    keys: Mapping[str, list[str]],
    values: Mapping[str, NDArray[Any]],
    lengths: Mapping[str, NDArray[np.int64]],
    dense: Mapping[str, NDArray[np.int64]],
) -> dict[str, Sequence[Any]]:
    """Return the fields of G batches by name, [G] each, all of which are placed together.

    Given the keys of the jagged ones, their values, batch after batch, and lengths, [G, K, B]; the dense ones, [G, B].
    """
    offsets = {}
    if memory.is_device:  # where a model that needs them would launch a kernel
        for field, of_field in lengths.items():
            offsets[field] = np.zeros((len(of_field), of_field[0].size + 1), dtype=np.int64)
            np.cumsum(of_field.reshape(len(of_field), -1), axis=1, out=offsets[field][:, 1:])
    groups = (values, lengths, offsets, dense)
    tensors = iter(memory.place([array for group in groups for array in group.values()]))
    placed = [{name: next(tensors) for name in group} for group in groups]
    fields: dict[str, Sequence[Any]] = {}
    for field, of_field in lengths.items():
        counts = of_field.sum(axis=2).tolist()
        parts = placed[0][field].split([sum(of_batch) for of_batch in counts])
        starts = placed[2][field].unbind() if field in offsets else [None] * len(counts)
        batches = zip(parts, placed[1][field].unbind(), counts, starts, strict=True)
        fields[field] = [
            keyed_jagged_tensor(keys[field], of_values, of_lengths, of_keys, offsets=begins)
            for of_values, of_lengths, of_keys, begins in batches
        ]
    return fields | {name: tensor.unbind() for name, tensor in placed[3].items()}


def _read_item_tables(config: LoaderConfig, sources: Sources) -> dict[str, NDArray[Any]]:
    """Return the features of items: with key maps, the rows of their tables by the rows of the table of items."""
    if not (names := config.item_features):
        return {}
    files = {source.manifest.item_features and source.manifest.item_features.sha256 for source in sources}
    if len(files) != 1 or isinstance(sources[0], LogSource):
        raise ConfigError("item_features need stored datasets or streams, all with the same table of features of items")
    tables = read_item_features(sources[0], names)
    for name, table in tables.items():
        of_feature, of_items = config.key_maps.get(name), config.key_maps.get(ITEM_ID)
        mapped = table if of_feature is None else of_feature(table)
        if of_items is not None:
            tables[name] = np.zeros(of_items.num_embeddings, dtype=table.dtype)
            tables[name][of_items(np.arange(len(table)))] = mapped
        else:
            tables[name] = mapped
    return tables


def _check_user_ids(store: SequenceStore) -> None:
    """Raise a DataError if a user id is negative, and so no row of an embedding table; datasets may have such ids."""
    user_ids = store.columns[USER_ID]
    if len(user_ids) and (least := int(user_ids.min())) < 0:
        raise DataError(
            f"user_id=True makes user ids a feature, but {store.folder or 'the dataset'} has user {least}; number its "
            "users from 0, or leave user_id=True out"
        )
