"""The common form in which every source returns its interactions, whatever its raw files look like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl

from evenrank.datasets.schema import ITEM_ID, USER_ID, IdKind, IdSummary, SourceFile, read_manifest
from evenrank.preprocess.build.vocabulary import label_ids, read_values, vocabulary_name
from evenrank.preprocess.files.table import EventPart
from evenrank.preprocess.log_config import TimestampUnit
from evenrank.preprocess.sources.features import NO_FEATURES, Features, continue_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """A dataset before its events are grouped by user."""

    parts: Sequence[EventPart]  # in file order
    sources: Callable[[], tuple[SourceFile, ...]]  # reads the raw files for their checksums
    files: Sequence[Path] = ()  # that are read
    context: Features = NO_FEATURES  # of users
    item_features: Features = NO_FEATURES
    has_item_table: bool = False  # whether features of items are a table, not columns of events
    num_actions: int | None  # None if the largest action is only known once all events are read
    time_unit: TimestampUnit = "ms"  # of the raw times; with `row`, those of events are undefined
    extra_events: Mapping[str, str] = field(default_factory=dict)  # types of further columns: int64 or float32
    has_eval_log: bool = False  # whether events have a further column, IN_EVAL
    options: Mapping[str, object] = field(default_factory=dict)  # of the source, for the manifest
    id_kinds: Mapping[str, IdKind] = field(default_factory=lambda: {USER_ID: "int64", ITEM_ID: "int64"})
    feature_ids: Mapping[str, IdSummary] = field(default_factory=dict)  # how their values became ids


def number_features(interactions: Interactions, folder: Path | None) -> Interactions:
    """Number the values of features as in an earlier dataset, if there is one; raises a DataError if it is damaged."""
    context, items, ids = interactions.context, interactions.item_features, dict[str, IdSummary]()
    if folder is not None:
        manifest = read_manifest(folder)
        earlier = {name: pl.Series(labels[1:], dtype=pl.String) for name, labels in manifest.context_labels.items()}
        for name in items.values.keys() & manifest.vocabulary_sizes.keys() - earlier.keys():
            earlier[name] = read_values(folder / vocabulary_name(name))
        context, items, ids = continue_ids(context, earlier), continue_ids(items, earlier), dict(manifest.ids)
    values = {**context.values, **items.values} if interactions.files else {}  # else they are drawn, as ids
    feature_ids = {name: label_ids(of_feature, ids.get(name)) for name, of_feature in values.items()}
    return replace(interactions, context=context, item_features=items, feature_ids=feature_ids)
