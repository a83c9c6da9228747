"""A text file as blocks of whole lines.

The quick and the strict reading of a file both start from these blocks, so that they cannot disagree about where a line
begins or ends, which bytes belong to it, or what its number is.
"""

import contextlib
import csv
import gzip
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars.io.plugins import register_io_source

from evenrank.core.errors import DataError
from evenrank.core.files import check_regular
from evenrank.core.numba_cache import compiled
from evenrank.preprocess.sources.interactions import IS_GOOD, BadRow, EventPart, reading

# Columns of the frames of lines; the prefix keeps them apart from the columns of files.
LINE, TEXT = "evenrank line", "evenrank text"
NUL_FAULT = "the line contains a NUL byte; the file is damaged there"

_BLOCK_BYTES = 16 << 20
_MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive lines of a file."""

    first_line: int
    """Number of the first line; those of a file are counted from 1."""
    data: bytes
    """The lines in UTF-8, each with a final newline; carriage returns before it and bytes that are not UTF-8 are
    replaced."""

    def num_lines(self) -> int:
        """Return the number of lines."""
        return count_byte(np.frombuffer(self.data, dtype=np.uint8), _NEWLINE)

    def lines(self) -> pl.DataFrame:
        """Return the columns LINE (int64) and TEXT, one row per line."""
        text = self.data.decode().split("\n")[:-1]
        numbers = np.arange(self.first_line, self.first_line + len(text), dtype=np.int64)
        return pl.DataFrame({LINE: numbers, TEXT: text}, schema={LINE: pl.Int64, TEXT: pl.String})


def read_header(path: Path) -> str:
    """Return the first line of a file; empty if the file is.

    Raises:
        DataError: the line is too long.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    with _opened(path) as file:
        line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise _too_long(path, 1)
    return line.decode(errors="replace").rstrip("\r\n")


def read_blocks(path: Path, *, has_header: bool) -> Iterator[Block]:
    """Yield all lines of a file after its header, which is the first line if `has_header`.

    Raises:
        DataError: a line is too long.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    with _opened(path) as file:
        number = 1
        if has_header:
            file.readline()
            number = 2
        while chunk := file.read(_BLOCK_BYTES):
            rest = b"" if chunk.endswith(b"\n") else file.readline(_MAX_LINE_BYTES)
            last_line = chunk.rfind(b"\n") + 1
            if len(chunk) - last_line + len(rest) > _MAX_LINE_BYTES:
                raise _too_long(path, number + chunk.count(b"\n"))
            ending = b"" if (rest or chunk).endswith(b"\n") else b"\n"
            lines = b"".join((chunk, rest, ending)) if rest or ending else chunk
            block = _block(number, lines)
            number += block.num_lines()
            yield block


@compiled
def count_byte(data: NDArray[np.uint8], byte: int) -> int:
    """Return how often a byte occurs in data, uint8 [n]; several times as fast as `bytes.count` where that is often."""
    count = 0
    for value in data:
        count += value == byte
    return count


def count_lines(path: Path) -> int:
    """Return the number of lines of a file after its header.

    Raises:
        DataError: a line is too long.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    return sum(block.num_lines() for block in read_blocks(path, has_header=True))


def scan_blocks(
    path: Path, *, has_header: bool, schema: Mapping[str, pl.DataType], parse: Callable[[Block], pl.DataFrame]
) -> pl.LazyFrame:
    """Return the rows of all blocks of a file, in file order, read lazily and in bounded memory.

    Args:
        path: of the file.
        has_header: whether the first line is left out.
        schema: of the frames that `parse` returns.
        parse: turns a block into rows.

    """

    def read(
        columns: list[str] | None, predicate: pl.Expr | None, num_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        for block in read_blocks(path, has_header=has_header):
            rows = parse(block)
            if predicate is not None:
                rows = rows.filter(predicate)
            if num_rows is not None:
                rows = rows.head(num_rows)
                num_rows -= len(rows)
            yield rows if columns is None else rows.select(columns)
            if num_rows == 0:
                return

    return register_io_source(read, schema=dict(schema))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of a file.

    Raises:
        DataError: a line is too long or contains a NUL byte.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    for block in read_blocks(path, has_header=False):
        for number, text in block.lines().iter_rows():
            if "\0" in text:
                raise DataError(f"{path}, line {number} ({text[:80]!r}): {NUL_FAULT}; unpack or download it again")
            yield number, text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[gzip.GzipFile | BufferedReader]:
    """Open a file behind its byte order mark, if it has one."""
    check_regular(path)
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        yield file


def _block(first_line: int, lines: bytes) -> Block:
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
        if b"\r\n" in lines:
            lines = _LINE_END.sub(b"\n", lines)
    if not lines.isascii():
        try:
            lines.decode()
        except UnicodeDecodeError:
            lines = lines.decode(errors="replace").encode()
    return Block(first_line=first_line, data=lines)


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")


# A raw CSV file as events: parsed fast with types where all rows of a block are good, and strictly elsewhere.


_FAULT = "evenrank fault"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvEvents:
    """How to turn a CSV file into events."""

    path: Path
    """The file."""
    columns: Mapping[str, type[pl.DataType]]
    """All columns of the file, in file order; those that are not used as pl.String."""
    has_header: bool
    """Whether the first line contains exactly the names of `columns`."""
    separator: str = ","
    """Separator between fields: one character, or one character repeated."""
    events: Sequence[pl.Expr]
    """Expressions over `columns`: user_id, item_id, action, timestamp_ms and extra columns."""
    checks: Mapping[str, pl.Expr]
    """Conditions over `columns` that hold for good rows, by the reason to report where they do not."""

    def part(self) -> EventPart:
        """Check the start of the file and return its events, to be read lazily.

        Raises:
            DataError: the file is missing or empty, or has an unexpected header.

        """
        self._check_header()
        no_rows = pl.LazyFrame(schema=self.columns).select(*self.events, self._is_good())
        events = scan_blocks(
            self.path, has_header=self.has_header, schema=no_rows.collect_schema(), parse=self._parse_events
        )
        return EventPart(name=str(self.path), size=self.path.stat().st_size, events=events, find_bad=self._find_bad)

    def _check_header(self) -> None:
        expected = self.separator.join(self.columns)
        with reading(self.path):
            if self.has_header and (header := read_header(self.path)) != expected:
                raise DataError(
                    f"{self.path} starts with {header[:80]!r}, expected {expected!r}; check that it is the right file"
                )
            if next(read_blocks(self.path, has_header=self.has_header), None) is None:
                raise DataError(f"{self.path} contains no events; unpack or download it again")

    def _is_good(self) -> pl.Expr:
        return pl.all_horizontal(*self.checks.values()).fill_null(False).alias(IS_GOOD)

    def _parse_events(self, block: Block) -> pl.DataFrame:
        # As good rows have a value in the last column, a block with as many separators as they need has no others.
        num_separators = (len(self.columns) - 1) * len(self.separator) * block.num_lines()
        if _count_separators(np.frombuffer(block.data, dtype=np.uint8), ord(self.separator[0])) == num_separators:
            events = self._parse_quickly(block)
            if events.get_column(IS_GOOD).all():
                return events
        is_good = pl.col(_FAULT).is_null().alias(IS_GOOD)
        return self._parse_strictly(block).select(*self.events, is_good)

    def _parse_quickly(self, block: Block) -> pl.DataFrame:
        """Parse a block with Polars' CSV reader; what it makes of bad rows depends on the rows before them."""
        # A separator of two characters, `::`, is parsed as `:` with an empty column between any two fields.
        num_gaps = len(self.separator) - 1
        schema: dict[str, type[pl.DataType]] = {}
        for name, dtype in self.columns.items():
            if schema:
                schema.update({f"gap before {name} {gap}": pl.String for gap in range(num_gaps)})
            schema[name] = dtype
        gaps_are_empty = [pl.col(name).is_null() for name in schema if name not in self.columns]
        events = pl.scan_csv(
            block.data,
            separator=self.separator[0],
            has_header=False,
            schema=schema,
            missing_columns="insert",
            ignore_errors=True,  # fields that cannot be parsed become null, and good rows contain no null
            truncate_ragged_lines=True,
            extra_columns="ignore",
            quote_char=None,
        )
        is_good = pl.all_horizontal(self._is_good(), *gaps_are_empty).alias(IS_GOOD)
        return events.select(*self.events, is_good).collect()

    def _parse_strictly(self, block: Block) -> pl.DataFrame:
        """Split each line independently; return LINE, TEXT, _FAULT and all columns of the file."""
        fields = pl.col(TEXT).str.split(self.separator)
        rows = block.lines().with_columns(
            fields.list.get(index, null_on_oob=True).cast(dtype, strict=False).alias(name)
            for index, (name, dtype) in enumerate(self.columns.items())
        )
        num_fields = fields.list.len()
        faults = [
            pl.when(pl.col(TEXT).str.contains("\0", literal=True)).then(pl.lit(NUL_FAULT)),
            pl.when(num_fields != len(self.columns)).then(
                pl.format(f"expected {len(self.columns)} fields, got {{}}", num_fields)
            ),
            *(pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in self.checks.items()),
        ]
        return rows.with_columns(pl.coalesce(faults).alias(_FAULT))

    def _find_bad(self, limit: int) -> list[BadRow]:
        bad: list[BadRow] = []
        for block in read_blocks(self.path, has_header=self.has_header):
            rows = self._parse_strictly(block).select(LINE, TEXT, _FAULT).drop_nulls(_FAULT).head(limit - len(bad))
            bad += [BadRow(line=line, text=text, reason=reason) for line, text, reason in rows.iter_rows()]
            if len(bad) == limit:
                break
        return bad


@compiled
def _count_separators(data: NDArray[np.uint8], separator: int) -> int:
    """Return the number of separators in data, uint8 [n]; -1 if it is not made up of numbers.

    These consist of digits and the characters from `,` to `:`. Polars' reader trims blanks.
    """
    num_separators = num_others = 0
    for value in data:
        num_separators += value == separator
        num_others += not (value == 10 or 44 <= value <= 58)
    return -1 if num_others else num_separators


def integer_check(name: str) -> dict[str, pl.Expr]:
    """Return the check that a column contains 64-bit integers, keyed by the reason to report."""
    return {f"{name} is not an integer in -2^63..2^63-1": pl.col(name).is_not_null()}


# The needed columns of a CSV or Parquet file, and a description of the lines that cannot be read.
#
# Fields of a CSV file may be quoted with `"`, and quotes inside a quoted field are doubled. A quoted field must end on
# the line where it starts, so that every line is a row and a malformed line does not affect any other.


_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
# Columns that are added to those of the file; the prefix keeps them apart from the file's own names.
IS_WELL_FORMED = "evenrank is_well_formed"
_FAULT, _FIELDS = "evenrank fault", "evenrank fields"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file."""

    path: Path
    """The file."""
    dtypes: Mapping[str, pl.DataType]
    """Types of the needed columns."""
    num_rows: int
    """Number of rows, bad ones included."""
    rows: pl.LazyFrame
    """The needed columns, and IS_WELL_FORMED: whether a line has the expected fields. In file order."""
    described_rows: pl.LazyFrame
    """The same rows with their line number, their text and the fault of a malformed line; may be slower to read."""

    def find_bad(self, checks: Mapping[str, pl.Expr], limit: int) -> list[BadRow]:
        """Return the first `limit` rows that are malformed or fail a check.

        Args:
            checks: conditions that hold for good rows, by the reason to report where they do not.
            limit: maximum number of rows to return.

        """
        reasons = (pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in checks.items())
        first_reason = pl.coalesce(_FAULT, *reasons).alias("reason")
        bad = self.described_rows.select(LINE, TEXT, first_reason).drop_nulls("reason").head(limit)
        with reading(self.path):
            rows = bad.collect(engine="streaming")  # which stops at the limit
        return [BadRow(line=line, text=text or "", reason=reason) for line, text, reason in rows.iter_rows()]


def open_table(path: Path, names: Sequence[str]) -> Table:
    """Open a file, whose format follows from its suffix; its rows are read lazily.

    Args:
        path: a CSV, gzipped CSV, TSV or Parquet file.
        names: the needed columns.

    Raises:
        DataError: the file is missing, empty, damaged or of an unknown format, or lacks a column.

    """
    suffix = next((known for known in (*_SEPARATORS, _PARQUET) if path.name.lower().endswith(known)), None)
    if suffix is None:
        known = ", ".join((*_SEPARATORS, _PARQUET))
        raise DataError(f"{path} has an unknown suffix; expected one of {known}")
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a file; check the path")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; create it again")
    table = _open_parquet(path, names) if suffix == _PARQUET else _open_csv(path, names, _SEPARATORS[suffix])
    if table.num_rows == 0:
        raise DataError(f"{path} contains no rows; create it again, or leave it out")
    return table


def _check_columns(path: Path, present: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        if name not in present:
            raise DataError(f"{path} has no column {name!r}; known: {', '.join(present)}")
        if present.count(name) > 1:
            raise DataError(f"{path} has {present.count(name)} columns {name!r}; rename all but one")


def _open_parquet(path: Path, names: Sequence[str]) -> Table:
    scanned = pl.scan_parquet(path, glob=False)
    with reading(path):
        schema = scanned.collect_schema()
        num_rows = scanned.select(pl.len()).collect().item()
    _check_columns(path, schema.names(), names)
    rows = scanned.select(*names, pl.lit(True).alias(IS_WELL_FORMED))
    text = pl.concat_str(*(pl.col(name).cast(pl.String, strict=False).fill_null("") for name in names), separator=",")
    return Table(
        path=path,
        dtypes={name: schema[name] for name in names},
        num_rows=num_rows,
        rows=rows,
        described_rows=rows.with_columns(text.alias(TEXT), pl.lit(None, dtype=pl.String).alias(_FAULT)).with_row_index(
            LINE, offset=1
        ),
    )


def _open_csv(path: Path, names: Sequence[str], separator: str) -> Table:
    with reading(path):
        header = _parse_header(path, separator)
        num_rows = count_lines(path)
    _check_columns(path, header, names)
    layout = _Layout(
        separator=separator, num_columns=len(header), positions={name: header.index(name) for name in names}
    )
    dtypes: dict[str, pl.DataType] = dict.fromkeys(names, pl.String())
    described = {LINE: pl.Int64(), TEXT: pl.String(), _FAULT: pl.String(), **dtypes}
    return Table(
        path=path,
        dtypes=dtypes,
        num_rows=num_rows,
        rows=scan_blocks(path, has_header=True, schema={**dtypes, IS_WELL_FORMED: pl.Boolean()}, parse=layout.parse),
        described_rows=scan_blocks(path, has_header=True, schema=described, parse=layout.parse_strictly),
    )


def _parse_header(path: Path, separator: str) -> list[str]:
    line = read_header(path)
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{path}: the header {line[:80]!r} cannot be parsed ({error}); fix its quotes") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """How the lines of a CSV file are divided into fields."""

    separator: str
    num_columns: int
    """Number of columns of the file."""
    positions: Mapping[str, int]
    """Positions of the needed columns among them."""

    def parse(self, block: Block) -> pl.DataFrame:
        """Return the needed columns of a block and IS_WELL_FORMED."""
        if self._is_simple(block):
            return self._parse_quickly(block)
        rows = self.parse_strictly(block)
        return rows.select(*self.positions, pl.col(_FAULT).is_null().alias(IS_WELL_FORMED))

    def _is_simple(self, block: Block) -> bool:
        """Return whether Polars' CSV reader divides the lines of a block as `parse_strictly` does.

        It is several times faster than regular expressions. But its result for unbalanced quotes depends on where it
        splits its input to read it in parallel; it also drops some carriage returns, rejects some doubled quotes, and
        takes a byte order mark for one wherever its input begins.
        """
        data = block.data
        if b"\0" in data or b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
            return False
        if b'"' not in data:
            return True
        field = f'(?:"[^"\n]*"|[^"\n{self.separator}]*)'
        return bool(pl.Series([data.decode()]).str.contains(f"^(?:{field}(?:{self.separator}{field})*\n)*$").item())

    def _parse_quickly(self, block: Block) -> pl.DataFrame:
        columns = [f"column {index}" for index in range(self.num_columns + 1)]
        native = pl.scan_csv(
            # The empty first line, which is skipped, keeps the reader from taking the first bytes for those of a
            # compressed file.
            b"\n" + block.data,
            separator=self.separator,
            has_header=False,
            skip_lines=1,
            schema=dict.fromkeys(columns, pl.String),
            missing_columns="insert",
            truncate_ragged_lines=True,
            extra_columns="ignore",
            quote_char='"' if b'"' in block.data else None,
        )
        values = (pl.col(columns[index]).alias(name) for name, index in self.positions.items())
        return native.select(*values, (pl.col(columns[-1]).fill_null("") == "").alias(IS_WELL_FORMED)).collect()

    def parse_strictly(self, block: Block) -> pl.DataFrame:
        """Divide each line into fields independently; return LINE, TEXT, _FAULT and the needed columns.

        Quotes in a field that starts without one are plain characters.
        """
        # The pattern for a field includes the separator before it, so that no match is empty: after an empty match, the
        # next field would not be found. The line therefore gets a separator before its first field.
        separator = self.separator
        field = f'{separator}(?:"(?:[^"]|"")*"|[^"{separator}][^{separator}]*|)'
        text, num_fields = pl.col(TEXT), pl.col(_FIELDS).list.len()

        def value(index: int) -> pl.Expr:
            raw = pl.col(_FIELDS).list.get(index, null_on_oob=True).str.slice(1)
            inner = raw.str.slice(1, raw.str.len_chars().cast(pl.Int64) - 2).str.replace_all('""', '"', literal=True)
            return pl.when(raw.str.starts_with('"')).then(inner).otherwise(raw)

        fault = (
            pl.when(text == "")
            .then(pl.lit("the line is empty"))
            .when(text.str.contains("\0", literal=True))
            .then(pl.lit(NUL_FAULT))
            .when(~(separator + text).str.contains(f"^(?:{field})+$"))
            .then(
                pl.lit(
                    "a quoted field does not end at a separator or at the end of the line; Parquet can store any text"
                )
            )
            .when((value(self.num_columns).fill_null("") != "") | (num_fields <= max(self.positions.values())))
            .then(pl.format(f"expected {self.num_columns} fields, got {{}}", num_fields))
            .otherwise(None)
        )
        fields = block.lines().with_columns((separator + text).str.extract_all(field).alias(_FIELDS))
        values = (value(index).alias(name) for name, index in self.positions.items())
        return fields.select(LINE, TEXT, fault.alias(_FAULT), *values)
