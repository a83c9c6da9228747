"""A data file as a table of the needed columns, and the rows of it that cannot be read."""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import DataError, first_line
from evenrank.datasets.schema import USER_ID

# Boolean column, true for rows that were parsed and whose values are in range. In other rows, the values of all other
# columns are undefined.
IS_GOOD = "is_good"
# Columns that are added to those of a file; the prefix keeps them apart from the file's own names.
LINE, TEXT, FAULT = "evenrank line", "evenrank text", "evenrank fault"
IS_WELL_FORMED = "evenrank is_well_formed"


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
    num_events: int  # estimated; it determines the number of buckets
    events: pl.LazyFrame
    """Columns user_id, item_id (Int64, UInt64 or String), timestamp_ms (int64), action (int32), extra columns and
    IS_GOOD; in file order. Good rows have neither nulls nor, in float32 columns, values that are not finite."""
    find_bad: Callable[[int], Sequence[BadRow]] = lambda limit: ()  # the first `limit` bad rows; may be slow
    find_texts: Callable[[], frozenset[str]] = frozenset  # columns of ids that were taken for integers, but are text
    expand: Callable[[dict[str, NDArray[Any]]], Iterable[dict[str, NDArray[Any]]]] = lambda events: (events,)
    """Called with the columns of some good rows, ids as keys; returns the events to use instead, in pieces."""


Types = Mapping[str, pl.DataType]  # of columns by name
Select = Callable[[Types], Sequence[pl.Expr]]  # new columns, computed from columns of these types and IS_WELL_FORMED


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file, read lazily and in file order."""

    path: Path
    num_rows: int  # estimated
    dtypes: Types  # of the needed columns: in a text file, String
    select: Callable[[Select, Types], pl.LazyFrame]
    """Called with the columns to compute and the types of numbers that columns of text probably are. Blocks of a text
    file in which they are, all of them plain digits, are parsed as such, several times faster; others as text."""
    described_rows: pl.LazyFrame  # slower: LINE, TEXT, FAULT (null if well formed) and the needed columns
    has_types: bool  # whether the file knows the types of its columns
    separator: str | None = None  # of the fields of delimited text

    @property
    def rows(self) -> pl.LazyFrame:
        """The needed columns, and IS_WELL_FORMED: whether a line has the expected fields."""
        return self.select(lambda dtypes: [*map(pl.col, dtypes), pl.col(IS_WELL_FORMED)], {})

    def part(
        self, describe: Callable[["Table"], tuple[Sequence[pl.Expr], Mapping[str, pl.Expr]]], numbers: Types
    ) -> EventPart:
        """Return the file as events.

        Args:
            describe: returns columns of events for a table of given types, and checks that hold for good rows, whose
                keys are the reasons to report. Numbers in plain digits and their texts must give the same.
            numbers: types of the columns that are probably numbers; see `select`.
        """

        def select(dtypes: Types) -> list[pl.Expr]:
            columns, checks = describe(replace(self, dtypes=dtypes))
            is_good = pl.all_horizontal(*checks.values(), pl.col(IS_WELL_FORMED)).fill_null(False)
            return [*columns, is_good.alias(IS_GOOD)]

        return EventPart(
            name=str(self.path),
            num_events=self.num_rows,
            events=self.select(select, numbers),
            find_bad=lambda limit: self.find_bad(describe(self)[1], limit),
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
