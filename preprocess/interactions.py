"""What every source hands on: interactions in one common form, whatever the raw files looked like."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from evenrank.datasets.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, SourceFile

INTERACTION_COLUMNS = (USER_ID, ITEM_ID, ACTION, TIMESTAMP_MS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The contextual features of users, coded as numbers."""

    features: pl.DataFrame  # user_id int64, then one int64 column a feature: 0 = missing, 1..n by sorted value
    labels: Mapping[str, tuple[str | None, ...]]  # per feature: the label of id 0 (None), 1, 2, ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """A dataset before it is grouped by user."""

    events: pl.LazyFrame  # user_id, item_id, timestamp_ms int64, action int32; in file order
    sources: tuple[SourceFile, ...]
    context: Context | None = None
    num_actions: int  # actions are 0..num_actions-1
    options: Mapping[str, object] = field(default_factory=dict)  # what the source was told, for the manifest


def encode_context(raw: pl.DataFrame) -> Context:
    """Code each column but `user_id` as 1..n by sorted value; a missing value is 0.

    Args:
        raw: user_id int64, once each, and the features as they were read, of any sortable type.

    Raises:
        DataError: a user appears twice.

    """
    if raw.get_column(USER_ID).is_duplicated().any():
        twice = raw.filter(pl.col(USER_ID).is_duplicated()).get_column(USER_ID).item(0)
        raise DataError(f"user {twice} appears twice among the users' features; keep one row per user")
    columns, labels = [raw.get_column(USER_ID)], {}
    for feature in raw.drop(USER_ID).iter_columns():
        values = feature.drop_nulls().unique().sort()
        columns.append((values.search_sorted(feature).cast(pl.Int64) + 1).set(feature.is_null(), 0).alias(feature.name))
        labels[feature.name] = (None, *map(str, values))
    return Context(features=pl.DataFrame(columns), labels=labels)
