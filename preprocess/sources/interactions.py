"""What every source hands on: interactions in one common form, whatever the raw files looked like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import USER_ID, SourceFile

# True for a row that could be read and lies in its ranges; the other columns of a row where it is false mean nothing.
IS_GOOD = "is_good"

# Time stamps are counted from 1970 to the end of the year 9999.
MAX_TIMESTAMP_MS = 253_402_300_799_999


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that could not be read."""

    line: int  # from 1, the header included
    text: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPart:
    """One raw file, or one drawn block, of events."""

    name: str  # as people know it: a path
    size: int  # bytes, for telling progress and choosing the number of buckets
    events: pl.LazyFrame  # user_id, item_id, timestamp_ms int64, action int32, extra columns, IS_GOOD; in file order
    find_bad: Callable[[int], Sequence[BadRow]] = lambda limit: ()  # the first so many bad rows; may be slow


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The contextual features of users, coded as numbers."""

    features: pl.DataFrame  # user_id int64, then one int64 column a feature: 0 = missing, 1..n by sorted value
    labels: Mapping[str, tuple[str | None, ...]]  # per feature: the label of id 0 (None), 1, 2, ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """A dataset before it is grouped by user."""

    parts: Sequence[EventPart]  # their events one behind the other are the dataset's, in file order
    sources: Callable[[], tuple[SourceFile, ...]]  # raw files with checksums; called once, beside other work
    context: Context | None = None
    num_actions: int | None  # actions are 0..num_actions-1; None: whatever there is
    extra_events: Mapping[str, str] = field(default_factory=dict)  # further columns of events: int64 or int32
    options: Mapping[str, object] = field(default_factory=dict)  # what the source was told, for the manifest
    vocabularies: Mapping[str, pl.DataFrame] = field(default_factory=dict)  # of user_id, item_id: id int64, value


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
