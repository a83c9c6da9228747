"""A data file as a table of the needed columns, and the rows of it that cannot be read."""

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import DataError, first_line

# Column that is added to those of a file: why a row is malformed, else null. The prefix keeps it apart from the file's.
FAULT = "evenrank fault"
# The fault of a line after which lines may be rows or text, so that bad rows of its file cannot be skipped.
OPEN_QUOTE = "a quoted field does not end on its line, so the next lines may be its text; Parquet can store any text"
MAX_SHOWN = 3  # bad rows in an error message
_IS_GOOD = "evenrank is_good"

Types = Mapping[str, pl.DataType]  # of columns by name


class Piece(NamedTuple):
    """A part of a file: in text, the lines that begin in a range of bytes; in Parquet, a range of rows."""

    begin: int
    end: int | None  # None: the end of the file


WHOLE = Piece(0, None)


class BadRow(NamedTuple):
    """A row that cannot be read."""

    line: int  # counted from 1 with the header, from the begin of the piece; for Parquet files, the row number from 1
    text: str
    reason: str


def first_bad_rows(rows: Iterable[BadRow]) -> list[BadRow]:
    """Return the rows to show of bad ones in file order: those that cannot be skipped, then the first others."""
    return sorted(rows, key=lambda row: row.reason != OPEN_QUOTE)[:MAX_SHOWN]


class Events(NamedTuple):
    """Consecutive events, in file order, without the rows that cannot be read."""

    good: pl.DataFrame
    """Columns user_id, item_id (Int64, UInt64 or String), timestamp_ms (int64), action (int32) and extra columns; there
    are neither nulls nor, in float32 columns, values that are not finite."""
    last_line: int = 0  # counted as that of a BadRow
    num_bad: int = 0
    first_bad: Sequence[BadRow] = ()  # at most MAX_SHOWN


def _unchanged(events: dict[str, NDArray[Any]]) -> Iterable[dict[str, NDArray[Any]]]:
    return (events,)


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPart:
    """The events of one raw file, or of one block of synthetic users."""

    name: str  # for messages: the path of the file
    source: str = ""  # for the manifest
    num_events: int  # estimated; it determines the number of buckets
    read: Callable[[Piece], Iterable[Events]]
    pieces: Sequence[Piece] = (WHOLE,)  # which can be read independently
    expand: Callable[[dict[str, NDArray[Any]]], Iterable[dict[str, NDArray[Any]]]] = _unchanged
    """Called with the columns of some good rows, ids as keys; returns the events to use instead, in pieces."""


class Rows(NamedTuple):
    """Consecutive rows of a file."""

    frame: pl.DataFrame  # the needed columns, and FAULT
    first_line: int
    texts: Callable[[pl.Series], Sequence[str]]  # of the rows with these indices

    def check(self, columns: Sequence[pl.Expr], checks: Mapping[str, pl.Expr]) -> Events:
        """Compute columns of the rows that are well formed and pass all checks, whose keys are the reasons to report.

        The other rows are bad.
        """
        is_good = pl.all_horizontal(pl.col(FAULT).is_null(), *checks.values()).fill_null(False)
        good = self.frame.select(*columns, is_good.alias(_IS_GOOD))
        is_bad = ~good.drop_in_place(_IS_GOOD)
        last_line = self.first_line + len(self.frame) - 1
        if not is_bad.any():
            return Events(good, last_line)
        is_open = self.frame.get_column(FAULT).eq_missing(OPEN_QUOTE)
        places = pl.concat([is_open.arg_true(), (is_bad & ~is_open).arg_true()]).head(MAX_SHOWN)
        reasons = (pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in checks.items())
        first_reasons = self.frame[places].select(pl.coalesce(FAULT, *reasons)).to_series()
        shown = zip((places + self.first_line).to_list(), self.texts(places), first_reasons, strict=True)
        return Events(good.filter(~is_bad), last_line, int(is_bad.sum()), [BadRow(*row) for row in shown])


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file, read in file order."""

    path: Path
    num_rows: int  # estimated
    dtypes: Types  # of the needed columns: in a text file, String
    blocks: Callable[[Types, Piece], Iterable[Rows]]
    pieces: Sequence[Piece]
    has_types: bool  # whether the file knows the types of its columns
    from_folders: Collection[str] = ()  # columns of text that are the names of its folders
    separator: str | None = None  # of the fields of delimited text

    def read(self, numbers: Types | None = None, piece: Piece = WHOLE) -> Iterator[Rows]:
        """Yield all rows, or those of a piece.

        `numbers` are the types of columns of text that are probably numbers. Blocks of text in which they are, all of
        them plain digits, are parsed as such, several times faster.
        """
        with wrap_read_errors(self.path):
            yield from self.blocks(numbers or {}, piece)

    def head(self, limit: int, condition: pl.Expr | bool = True) -> pl.DataFrame:
        """Return the first well-formed rows that meet a condition, at most `limit`."""
        found = pl.DataFrame(schema={**self.dtypes, FAULT: pl.String()})
        for rows in self.read():
            well_formed = rows.frame.lazy().filter(pl.col(FAULT).is_null(), condition)
            found.extend(well_formed.select(found.columns).collect())
            if len(found) >= limit:
                break
        return found.head(limit)

    def texts(self) -> Iterator[str]:
        """Yield the text of every row."""
        for rows in self.read():
            yield from rows.texts(pl.int_range(len(rows.frame), eager=True))

    def read_distinct(self, key: str, columns: Sequence[pl.Expr], checks: Mapping[str, pl.Expr]) -> pl.DataFrame:
        """Return the distinct rows with a `key`, a column of ids; none may be malformed, fail a check or share it."""
        parts = []
        for rows in self.read():
            part = rows.check(columns, checks)
            for row in part.first_bad:
                raise DataError(
                    f"{self.path}, line {row.line} ({row.text[:80]!r}): {row.reason}; fix or remove the line"
                )
            parts.append(part.good)
        if not any(map(len, parts)):
            raise DataError(f"{self.path} contains no rows; create or download it again")
        distinct = pl.concat(parts).drop_nulls(key)  # null is text, which no event has if its ids are integers
        if distinct.get_column(key).is_duplicated().any():
            distinct = distinct.unique(maintain_order=True)
        ids, of = distinct.get_column(key), key.removesuffix("_id")
        for repeated in ids.filter(ids.is_duplicated()):
            raise DataError(f"{self.path}: {of} {repeated} appears twice with different values; keep one row per {of}")
        return distinct


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Replace an error of the operating system, a decompressor or Polars by a `DataError` that names a path."""
    try:
        yield
    except (pl.exceptions.PolarsError, OSError, EOFError, zlib.error) as error:
        # Only errors of the operating system have `strerror`; the others come from the contents of a file.
        if reason := getattr(error, "strerror", None):
            raise DataError(f"{path} cannot be read: {reason}; check the path and its permissions") from error
        raise DataError(f"{path} cannot be read: {first_line(error)}; check that the file is complete") from error
