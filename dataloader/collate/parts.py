"""What batches are made of: a flat list of their keys, from the settings of a loader and the columns of a dataset."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.batch import SequenceBatch
from evenrank.dataloader.codes import CANDIDATE_ID, SEMANTIC_ID, CodeTable
from evenrank.dataloader.collate.gather import Ints
from evenrank.dataloader.config import LoaderConfig
from evenrank.datasets.schema import ACTION, FLOAT, ITEM_ID, TIMESTAMP_MS, USER_ID, Column, Schema

LABEL, WEIGHT, KNOWN = "label", "weight", "known"


class Events(NamedTuple):
    """Consecutive events of a sample, from one bound to another; bounds are named as in HistorySpans."""

    begin: str
    end: str
    limit: int
    """Most events of any sample."""


class Part(NamedTuple):
    """How a key of batches is made."""

    field: str
    """Of the batch."""
    key: str
    column: str
    """Of the store."""
    events: Events | None = None
    """Those that have values; None: the values are the row's own, one or any number."""
    of_event: Literal["value", "codes", "row", "place", "feature", "target"] = "value"
    """What an event has: the column's value; the codes of its item; the row's value; its place, if its float is known;
    the feature `key` of its item; the feature `key` of the sample's target."""
    level_offsets: Ints | None = None
    """[levels]: what is added to the codes."""


def history_events(config: LoaderConfig) -> Events:
    """Return the events before the candidates."""
    return Events("begins", "history_ends", config.max_history_length)


def predicted_events(config: LoaderConfig) -> Events:
    """Return the events that have a loss: the candidates, the labeled history, or all that follow another one."""
    if config.history_labels or not (config.max_num_candidates or config.labels):
        return Events("followers", "ends", max(config.max_history_length - 1, 0) + config.max_num_candidates)
    if config.max_num_candidates:
        return Events("history_ends", "ends", config.max_num_candidates)
    return history_events(config)


def list_parts(
    config: LoaderConfig,
    schema: Schema,
    table: CodeTable | None,
    item_types: Mapping[str, str] = MappingProxyType({}),
    target_types: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Part, ...]:
    """Return the keys of the batches of a dataset with these columns, except those of negatives, which are drawn.

    Features of items and of targets have the types `int64` and `float32`.

    Raises:
        ConfigError: the dataset lacks a column, or a name is taken.
    """
    columns = {column.name: column for column in schema}
    rows = [name for name, column in columns.items() if column.kind != "event" and name != USER_ID]
    context = rows if config.context is None else config.context
    _check_known("contextual feature", context, rows, "--context-columns")
    names = (*((USER_ID,) if config.user_id else ()), *context)
    parts = [Part(_of_type("features", columns[name]), name, name) for name in names]
    made = [Column(name, "scalar", type_) for name, type_ in target_types.items()]
    parts += [Part(_of_type("features", column), column.name, "", of_event="target") for column in made]
    if table is None:
        parts += _parts_of_events(config, columns, [Column(name, "event", type_) for name, type_ in item_types.items()])
    else:
        parts += _parts_of_codes(config, table)
    keys = [part.key for part in parts if part.field.endswith("features")]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0]!r} is the name of two features of batches; give one of them another name")
    order = [field.name for field in fields(SequenceBatch)]
    return tuple(sorted(parts, key=lambda part: order.index(part.field)))


def _parts_of_events(
    config: LoaderConfig, columns: Mapping[str, Column], item_features: Sequence[Column]
) -> Iterator[Part]:
    events = {name: column for name, column in columns.items() if column.kind == "event" and name != ITEM_ID}
    floats = [name for name, column in columns.items() if column.kind != "event" and column.dtype == FLOAT]
    weight = config.weight
    _check_known("extra events", config.extra_events, [name for name in events if name != ACTION], "--event-columns")
    _check_known("column of events for label", config.labels, events, "--label")
    labels = {_of_type("labels", events[name]): name for name in config.labels}
    if len(labels) < len(config.labels):
        are_floats = ", ".join(name for name in config.labels if events[name].dtype == FLOAT) or "none"
        raise ConfigError(
            f"label can be one column of integers and one of floats, got {config.label!r}, of which {are_floats} are "
            "floats; leave one out, or preprocess the log with one as NAME:int or NAME:float"
        )
    _check_known("events or float feature for weight", [weight] if weight else (), [*events, *floats], "--weight")
    history, predicted = history_events(config), predicted_events(config)
    shown = Events("begins", "ends", history.limit + config.max_num_candidates)
    yield Part("features", ITEM_ID, ITEM_ID, shown)
    for column in item_features:
        yield Part(_of_type("features", column), column.name, ITEM_ID, shown, "feature")
    for name in (ACTION, *config.extra_events):
        # The time at which a candidate is shown is known in advance; everything else about the event is an outcome.
        is_known = name == TIMESTAMP_MS or config.candidate_actions
        yield Part(_of_type("features", columns[name]), name, name, shown if is_known else history)
    for field, name in labels.items():
        yield Part(field, LABEL, name, predicted)
        if columns[name].may_be_missing:
            yield Part("known", KNOWN, name, predicted, "place")
    if weight:
        if columns[weight].may_be_missing:
            raise ConfigError(f"weight {weight!r} may be missing in the dataset; declare it with =FILL or =drop there")
        yield Part("weights", WEIGHT, weight, predicted, "value" if weight in events else "row")


def _parts_of_codes(config: LoaderConfig, table: CodeTable) -> Iterator[Part]:
    tokens = table.level_offsets
    yield Part("features", SEMANTIC_ID, ITEM_ID, history_events(config), "codes", tokens)
    if config.candidate_feature:
        yield Part("features", CANDIDATE_ID, ITEM_ID, Events("history_ends", "ends", 1), "codes", tokens)
    of_labels = tokens if config.label_offsets else np.zeros_like(tokens)
    yield Part("labels", LABEL, ITEM_ID, predicted_events(config), "codes", of_labels)


def _of_type(field: str, column: Column) -> str:
    """Return the field of integers or, for a column of floats, the one beside it."""
    return f"float_{field}" if column.dtype == FLOAT else field


def _check_known(kind: str, names: Collection[str], known: Collection[str], option: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the dataset has no {kind} {name!r}; known: {', '.join(known) or 'none'}; preprocess the log with "
                f"{option} {name}"
            )
