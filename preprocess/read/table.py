"""A data file as a table of the needed columns, and the rows of it that cannot be read."""

import contextlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import DataError, first_line

# Column that is added to those of a file: why a row is malformed, else null. The prefix keeps it apart from the file's.
FAULT = "evenrank fault"
# The fault of a line after which lines may be rows or text, so that bad rows of its file cannot be skipped.
OPEN_QUOTE = "a quoted field does not end on its line, so the next lines may be its text; Parquet can store any text"
MAX_SHOWN = 3  # bad rows of each kind of reason in an error message
_IS_GOOD, _LACKS = "evenrank is_good", "evenrank lacks"

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


_NO_BAD_ROWS = pl.DataFrame(schema={"line": pl.Int64(), "text": pl.String(), "reason": pl.String()})


class Events(NamedTuple):
    """Consecutive events, in file order, without the rows that cannot be read."""

    good: pl.DataFrame
    """Columns user_id, item_id (Int64, UInt64 or String), timestamp_ms (int64), action (int32) and extra columns; there
    are neither nulls nor, in float32 columns, values that are not finite."""
    last_line: int = 0  # counted as that of a BadRow
    bad: pl.DataFrame = _NO_BAD_ROWS
    """Rows that cannot be read, with the columns of a BadRow."""
    dropped: Mapping[str, int] = MappingProxyType({})
    """Numbers of rows that are left out because they have no value, by column."""


class BadRows:
    """How many rows cannot be read, by the kind of the reason, and the first ones of each kind."""

    def __init__(self) -> None:
        self.counts, self.first = Counter[str](), defaultdict[str, list[BadRow]](list)

    def add(self, rows: pl.DataFrame) -> None:
        """Count further rows of a piece, which have the columns of a BadRow."""
        kind = pl.col("reason").str.replace(", got .*", "")
        for (of,), alike in rows.group_by(kind, maintain_order=True):
            self._add(of, len(alike), map(BadRow._make, alike.head(MAX_SHOWN).iter_rows()))

    def add_piece(self, piece: "BadRows", num_lines: int) -> None:
        """Count the rows of the next piece of a file, after so many lines."""
        for kind, count in piece.counts.items():
            self._add(kind, count, (row._replace(line=row.line + num_lines) for row in piece.first[kind]))

    def _add(self, kind: str, count: int, first: Iterable[BadRow]) -> None:
        self.counts[kind] += count
        self.first[kind] = [*self.first[kind], *first][:MAX_SHOWN]

    def describe(self) -> tuple[str, dict[str, int]]:
        """Return a description of all rows, those first that cannot be skipped, and one of each kind with the count."""
        kinds = sorted(self.counts, key=lambda kind: kind != OPEN_QUOTE)
        shown = {
            kind: "; ".join(f"line {row.line} ({row.text[:80]!r}): {row.reason}" for row in self.first[kind])
            for kind in kinds
        }
        described = {f"{_num_rows('bad', self.counts[kind])}, first {shown[kind]}": self.counts[kind] for kind in kinds}
        if len(kinds) == 1:
            return next(iter(described)), described
        each = "; ".join(f"{shown[kind]} ({_num_rows('such', self.counts[kind])})" for kind in kinds)
        return f"{_num_rows('bad', self.counts.total())}, first {each}", described


def _num_rows(adjective: str, count: int) -> str:
    return f"{count:,} {adjective} row{'s' if count > 1 else ''}"


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


class Hint(str):
    """A reason why rows fail one of the next checks, with a remedy; so it is looked for in bad rows alone."""


class Dropped(str):
    """A column, whose check tells which rows have a value; those without are left out, and not bad."""


class Rows(NamedTuple):
    """Consecutive rows of a file."""

    frame: pl.DataFrame  # the needed columns, and FAULT
    first_line: int
    texts: Callable[[pl.Series], pl.Series]  # of the rows with these indices

    def check(self, columns: Sequence[pl.Expr], checks: Mapping[str, pl.Expr]) -> Events:
        """Compute columns of the rows that are well formed and pass all checks, whose keys are the reasons to report.

        The other rows are bad.
        """
        of_rows = {reason: check for reason, check in checks.items() if not isinstance(reason, Dropped)}
        needed = (check for reason, check in of_rows.items() if not isinstance(reason, Hint))
        is_good = pl.all_horizontal(pl.col(FAULT).is_null(), *needed).fill_null(False)
        lacking = [pl.when(~check).then(pl.lit(name)) for name, check in checks.items() if name not in of_rows]
        computed = [*columns, is_good.alias(_IS_GOOD), *([pl.coalesce(lacking).alias(_LACKS)] if lacking else [])]
        good = self.frame.lazy().select(computed).collect()  # so that what they have in common is computed once
        is_bad = is_left_out = ~good.drop_in_place(_IS_GOOD)
        last_line, counts = self.first_line + len(self.frame) - 1, dict[str, int]()
        if lacking:
            lacks = good.drop_in_place(_LACKS)
            counts = dict(sorted(lacks.filter(~is_bad).drop_nulls().value_counts().iter_rows()))  # in any order
            is_left_out = is_bad | lacks.is_not_null()
        if not is_left_out.any():
            return Events(good, last_line)
        places = is_bad.arg_true()
        reasons = (pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in of_rows.items())
        first_reasons = self.frame[places].select(pl.coalesce(FAULT, *reasons)).to_series()
        lines = places.cast(pl.Int64) + self.first_line
        bad = pl.DataFrame([lines, self.texts(places), first_reasons], schema=_NO_BAD_ROWS.schema)
        return Events(good.filter(~is_left_out), last_line, bad, counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file, read in file order."""

    path: Path
    num_rows: int  # estimated
    dtypes: Types  # of the needed columns: in a text file, String
    blocks: Callable[[Types, Piece], Iterable[Rows]]
    pieces: Sequence[Piece]
    has_types: bool  # whether the file knows the types of its columns
    options: Mapping[str, str]  # that name columns
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

    def read_good(self, columns: Sequence[pl.Expr], checks: Mapping[str, pl.Expr]) -> pl.DataFrame:
        """Return columns of all rows, none of which may be malformed or fail a check."""
        parts = []
        for rows in self.read():
            part = rows.check(columns, checks)
            for row in map(BadRow._make, part.bad.iter_rows()):
                raise DataError(
                    f"{self.path}, line {row.line} ({row.text[:80]!r}): {row.reason}; fix or remove the line"
                )
            parts.append(part.good)
        if not any(map(len, parts)):
            raise DataError(f"{self.path} contains no rows; create or download it again")
        return pl.concat(parts)

    def read_distinct(
        self, key: str, columns: Sequence[pl.Expr], checks: Mapping[str, pl.Expr], *, keeps_first: bool = False
    ) -> tuple[pl.DataFrame, int]:
        """Return the distinct rows with a `key`, a column of ids; none may be malformed, fail a check or share it.

        With `keeps_first`, the first row of each key is returned, and also how many others there are.
        """
        # Null is text, which no event has if its ids are integers.
        distinct = self.read_good(columns, checks).drop_nulls(key)
        if distinct.get_column(key).is_duplicated().any():
            distinct = distinct.unique(maintain_order=True)
        num_rows = len(distinct)
        if keeps_first:
            distinct = distinct.unique(key, keep="first", maintain_order=True)
        ids, of = distinct.get_column(key), key.removesuffix("_id")
        for repeated in ids.filter(ids.is_duplicated()):
            raise DataError(f"{self.path}: {of} {repeated} appears twice with different values; keep one row per {of}")
        return distinct, num_rows - len(distinct)


def show_column(column: str, options: Mapping[str, str]) -> str:
    """Return a column for a message, with the option that names it."""
    return f"{column!r} ({options[column]})" if column in options else repr(column)


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
