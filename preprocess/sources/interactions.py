"""The common form in which every source returns its interactions, whatever its raw files look like."""

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import DataError, first_line
from evenrank.datasets.schema import FLOAT, ITEM_ID, MULTI_VALUED, USER_ID, IdKind, SourceFile

# Boolean column, true for rows that were parsed and whose values are in range. In other rows, the values of all other
# columns are undefined.
IS_GOOD = "is_good"
# Columns that are added to those of a file; the prefix keeps them apart from the file's own names.
LINE, TEXT, FAULT = "evenrank line", "evenrank text", "evenrank fault"
IS_WELL_FORMED = "evenrank is_well_formed"
# The last millisecond of the year 9999; the first time stamp allowed is 0, the start of 1970.
MAX_TIMESTAMP_MS = 253_402_300_799_999
TimestampUnit = Literal["auto", "s", "ms", "us", "ns", "iso", "date"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be read."""

    line: int  # counted from 1 with the header; for Parquet files, the row number from 1
    text: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPart:
    """The events of one raw file, or of one block of synthetic users."""

    name: str  # for messages: the path of the file
    size: int  # approximate number of bytes; it determines the number of buckets
    events: pl.LazyFrame
    """Columns user_id, item_id (Int64, UInt64 or String), timestamp_ms (int64), action (int32), extra columns and
    IS_GOOD; in file order. Good rows have neither nulls nor, in float32 columns, values that are not finite."""
    find_bad: Callable[[int], Sequence[BadRow]] = lambda limit: ()  # the first `limit` bad rows; may be slow
    find_texts: Callable[[], frozenset[str]] = frozenset  # columns of ids that were taken for integers, but are text
    expand: Callable[[dict[str, NDArray[Any]]], Iterable[dict[str, NDArray[Any]]]] = lambda events: (events,)
    """Called with the columns of some good rows, ids as keys; returns the events to use instead, in pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file, read lazily and in file order."""

    path: Path
    size: int  # approximate number of bytes of the events in memory
    dtypes: Mapping[str, pl.DataType]  # of the needed columns
    rows: pl.LazyFrame  # the needed columns, and IS_WELL_FORMED: whether a line has the expected fields
    described_rows: pl.LazyFrame  # slower: LINE, TEXT, FAULT (null if well formed) and the needed columns
    has_types: bool  # whether the file knows the types of its columns
    separator: str | None = None  # of the fields of delimited text

    def part(self, events: Sequence[pl.Expr], checks: Mapping[str, pl.Expr]) -> EventPart:
        """Return the file with the columns `events`; `checks` hold for good rows, and their keys are the reasons."""
        is_good = pl.all_horizontal(*checks.values(), pl.col(IS_WELL_FORMED)).fill_null(False).alias(IS_GOOD)
        return EventPart(
            name=str(self.path),
            size=self.size,
            events=self.rows.select(*events, is_good),
            find_bad=lambda limit: self.find_bad(checks, limit),
        )

    def find_bad(self, checks: Mapping[str, pl.Expr], limit: int) -> list[BadRow]:
        """Return the first `limit` rows that are malformed or fail a check."""
        reasons = (pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in checks.items())
        first_reason = pl.coalesce(FAULT, *reasons).alias("reason")
        bad = self.described_rows.select(LINE, TEXT, first_reason).drop_nulls("reason").head(limit)
        with wrap_read_errors(self.path):
            rows = bad.collect(engine="streaming")  # which stops at the limit
        return [BadRow(line=line, text=text or "", reason=reason) for line, text, reason in rows.iter_rows()]

    def read_users(self, columns: Sequence[pl.Expr], checks: Mapping[str, pl.Expr]) -> pl.DataFrame:
        """Return user_id and features of all rows, none of which may be malformed, fail a check or repeat a user."""
        for row in self.find_bad(checks, 1):
            raise DataError(f"{self.path}, line {row.line} ({row.text[:80]!r}): {row.reason}; fix or remove the line")
        with wrap_read_errors(self.path):
            users = self.rows.select(*columns).collect()
        if users.is_empty():
            raise DataError(f"{self.path} contains no rows; create or download it again")
        ids = users.get_column(USER_ID)
        for repeated in ids.filter(ids.is_duplicated()):
            raise DataError(f"{self.path}: user {repeated} appears twice; keep one row per user")
        return users


def integer_checks(*names: str) -> dict[str, pl.Expr]:
    """Return the checks that columns contain 64-bit integers, by the reason to report where they do not."""
    return {
        f"{name} is not an integer in -2^63..2^63-1": pl.col(name).cast(pl.Int64, strict=False).is_not_null()
        for name in names
    }


def time_checks(name: str, *, unit_ms: int = 1) -> dict[str, pl.Expr]:
    """Return the checks that a column contains times since 1970, in units of `unit_ms` milliseconds."""
    is_in_range = pl.col(name).is_between(0, MAX_TIMESTAMP_MS // unit_ms)
    return {**integer_checks(name), f"{name} is not in the years 1970 to 9999": is_in_range}


_DTYPES: Mapping[Any, str] = {pl.Int64(): "int64", pl.List(pl.Int64()): MULTI_VALUED, pl.Float32(): FLOAT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The contextual features of users, encoded as integers: 0 if missing, else 1..n by sorted value; or floats."""

    features: pl.DataFrame  # user_id (int64, the user's key), then per feature Int64, List(Int64) or Float32
    labels: Mapping[str, tuple[str | None, ...]]  # of the ids 0 (always None), 1, 2, ... of each feature of integers

    @property
    def dtypes(self) -> dict[str, str]:
        """Type of each feature, as in the manifest."""
        return {name: _DTYPES[dtype] for name, dtype in self.features.drop(USER_ID).schema.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """A dataset before its events are grouped by user."""

    parts: Sequence[EventPart]  # in file order
    sources: Callable[[], tuple[SourceFile, ...]]  # reads the raw files for their checksums
    context: Context | None = None
    num_actions: int | None  # None if the largest action is only known once all events are read
    time_unit: TimestampUnit = "ms"  # of the raw times
    extra_events: Mapping[str, str] = field(default_factory=dict)  # types of further columns: int64, int32 or float32
    options: Mapping[str, object] = field(default_factory=dict)  # of the source, for the manifest
    id_kinds: Mapping[str, IdKind] = field(default_factory=lambda: {USER_ID: "int64", ITEM_ID: "int64"})


def encode_context(raw: pl.DataFrame, floats: Collection[str] = ()) -> Context:
    """Encode columns of sortable values, except `user_id`, as 1..n by sorted value, and as 0 where a value is null.

    The elements of lists are encoded alike, without nulls. Columns named in `floats` become float32, 0 where a value is
    null; raises a DataError if one is not finite.
    """
    columns, labels = [raw.get_column(USER_ID)], {}
    for feature in raw.drop(USER_ID).iter_columns():
        if feature.name in floats:
            encoded = feature.cast(pl.Float32).fill_null(0)
            for value in feature.filter(~encoded.is_finite()):
                raise DataError(f"the feature {feature.name!r} has the value {value}, no finite float32; change it")
        else:
            is_list = feature.dtype == pl.List
            values = (feature.explode() if is_list else feature).drop_nulls().unique().sort()
            if is_list:
                ids = pl.int_range(1, len(values) + 1, eager=True)
                element = pl.element().replace_strict(values, ids, return_dtype=pl.Int64)
                encoded = feature.list.drop_nulls().list.eval(element).cast(pl.List(pl.Int64)).fill_null([])
            else:
                encoded = (values.search_sorted(feature).cast(pl.Int64) + 1).set(feature.is_null(), 0)
            labels[feature.name] = (None, *map(str, values))
        columns.append(encoded.alias(feature.name))
    return Context(features=pl.DataFrame(columns), labels=labels)


class ContextLookup:
    """Look up features by the key of a user; one without features gets 0, a missing value, or an empty list."""

    def __init__(self, context: Context | None) -> None:
        features = pl.DataFrame(schema={USER_ID: pl.Int64}) if context is None else context.features.sort(USER_ID)
        missing: dict[str, list[Any]] = {
            name: [[] if dtype == pl.List else 0] for name, dtype in features.schema.items()
        }
        features = features.vstack(pl.DataFrame(missing, schema=features.schema))
        self._users: NDArray[np.int64] = features.get_column(USER_ID).to_numpy()  # and a last row, of any other user
        self._features = features.drop(USER_ID)
        self._requested = np.zeros(len(self._users) - 1, dtype=bool)
        self.dtypes = {} if context is None else context.dtypes

    def lookup(self, user_keys: NDArray[np.int64]) -> pl.DataFrame:
        """Return the features of the given users: a row of each."""
        positions = np.searchsorted(self._users[:-1], user_keys)
        is_known = (positions < len(self._requested)) & (self._users[positions] == user_keys)
        self._requested[positions[is_known]] = True
        return self._features[np.where(is_known, positions, len(self._requested))]

    def count_unrequested(self) -> int:
        """Return the number of users that have features and were never looked up."""
        return int(np.count_nonzero(~self._requested))


@contextlib.contextmanager
def wrap_read_errors(*paths: Path | str) -> Iterator[None]:
    """Replace an error of the operating system, a decompressor or Polars by a `DataError` that names `paths`."""
    try:
        yield
    except (pl.exceptions.PolarsError, OSError, EOFError, zlib.error) as error:
        names = ", ".join(map(str, paths))
        # Only errors of the operating system have `strerror`; the others come from the contents of a file.
        if reason := getattr(error, "strerror", None):
            raise DataError(f"{names} cannot be read: {reason}; check the path and its permissions") from error
        raise DataError(f"{names} cannot be read: {first_line(error)}; check that the file is complete") from error
