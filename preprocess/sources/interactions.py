"""The common form in which every source returns its interactions, whatever its raw files look like."""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError, first_line
from evenrank.datasets.schema import USER_ID, SourceFile

# Boolean column, true for rows that were parsed and whose values are in range. In other rows, the values of all other
# columns are undefined.
IS_GOOD = "is_good"

# The last millisecond of the year 9999; the first time stamp allowed is 0, the start of 1970.
MAX_TIMESTAMP_MS = 253_402_300_799_999


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be read."""

    line: int
    """Line number from 1, counting the header; for Parquet files, the row number from 1."""
    text: str
    """The line as it is in the file."""
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPart:
    """The events of one raw file, or of one block of synthetic users."""

    name: str
    """How messages refer to this part: the path of the file."""
    size: int
    """Approximate number of bytes; it determines the number of buckets."""
    events: pl.LazyFrame
    """Columns user_id, item_id, timestamp_ms (int64), action (int32), extra columns and IS_GOOD; in file order."""
    find_bad: Callable[[int], Sequence[BadRow]] = lambda limit: ()
    """Returns the first `limit` bad rows. May be slow: it is only called if there are any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The contextual features of users, encoded as integers."""

    features: pl.DataFrame
    """user_id (int64), then one int64 column per feature: 0 if missing, else 1..n by sorted value."""
    labels: Mapping[str, tuple[str | None, ...]]
    """Per feature, the labels of ids 0 (always None), 1, 2, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """A dataset before its events are grouped by user."""

    parts: Sequence[EventPart]
    """The parts, whose concatenated events are those of the dataset in file order."""
    sources: Callable[[], tuple[SourceFile, ...]]
    """Returns the raw files with their checksums. Called once, in a background thread."""
    context: Context | None = None
    """The users' features; None if the dataset has none."""
    num_actions: int | None
    """Actions are 0..num_actions-1; None if the largest action is only known once all events are read."""
    extra_events: Mapping[str, str] = field(default_factory=dict)
    """Names of further event columns, and their types: int64 or int32."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The options of the source, for the manifest."""
    vocabularies: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    """For user_id and item_id if their raw ids are strings: columns id (int64) and value (string)."""


def encode_context(raw: pl.DataFrame) -> Context:
    """Encode each column except `user_id` as 1..n by sorted value, and as 0 where the value is null.

    Args:
        raw: user_id (int64, unique), and the features as they were read, of any sortable type.

    Raises:
        DataError: a user appears twice.

    """
    if raw.get_column(USER_ID).is_duplicated().any():
        repeated = raw.filter(pl.col(USER_ID).is_duplicated()).get_column(USER_ID).item(0)
        raise DataError(f"user {repeated} appears twice among the users' features; keep one row per user")
    columns, labels = [raw.get_column(USER_ID)], {}
    for feature in raw.drop(USER_ID).iter_columns():
        values = feature.drop_nulls().unique().sort()
        columns.append((values.search_sorted(feature).cast(pl.Int64) + 1).set(feature.is_null(), 0).alias(feature.name))
        labels[feature.name] = (None, *map(str, values))
    return Context(features=pl.DataFrame(columns), labels=labels)


def encode_text_context(
    rows: Sequence[Sequence[str]], columns: Sequence[str], *, integer_columns: Sequence[str]
) -> Context:
    """Encode features that were read as text; an empty field is a missing value.

    Args:
        rows: the fields of each user.
        columns: the names of the fields, `user_id` among them.
        integer_columns: the columns to sort as integers rather than as text; their fields are digits, or empty.

    Raises:
        DataError: a user appears twice.

    """
    text = pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String), orient="row")
    features = text.with_columns(pl.when(pl.all() != "").then(pl.all()))
    return encode_context(features.with_columns(pl.col(integer_columns).cast(pl.Int64)))


# Errors of reading raw files as one-line `DataError`s that name the file.


@contextlib.contextmanager
def reading(*paths: Path | str) -> Iterator[None]:
    """Replace an error of the operating system, a decompressor or Polars by a `DataError` that names `paths`."""
    try:
        yield
    except (pl.exceptions.PolarsError, OSError, EOFError, zlib.error) as error:
        names = ", ".join(map(str, paths))
        # Only errors of the operating system have `strerror`; the others come from the contents of a file.
        if reason := getattr(error, "strerror", None):
            raise DataError(f"{names} cannot be read: {reason}; check the path and its permissions") from error
        raise DataError(f"{names} cannot be read: {first_line(error)}; check that the file is complete") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prepend the path of a file to the message of a `DataError`, for checks that only know its columns."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
