"""CSV and Parquet files as tables: the needed columns of every row, and a description of the rows that cannot be read.

A CSV file is read in blocks of whole lines, and every line is divided into fields independently, so that a malformed
line affects no other. Blocks without anything unusual are parsed by a compiled loop or by Polars' CSV reader. All other
blocks are parsed by expressions over their lines, which are several times slower and report what is wrong.
"""

import contextlib
import csv
import gzip
import re
from abc import ABC, abstractmethod
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
from evenrank.datasets.schema import USER_ID
from evenrank.preprocess.sources.interactions import IS_GOOD, BadRow, EventPart, wrap_read_errors

# Columns that are added to those of a file; the prefix keeps them apart from the file's own names.
LINE, TEXT, FAULT = "evenrank line", "evenrank text", "evenrank fault"
IS_WELL_FORMED = "evenrank is_well_formed"
_FIELDS = "evenrank fields"

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
_BLOCK_BYTES = 16 << 20
_MAX_LINE_BYTES = 64 << 20
_EVENT_BYTES = 28  # of an event in memory: three int64 and one int32
_BOM = b"\xef\xbb\xbf"
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_NUL_FAULT = "the line contains a NUL byte; the file is damaged there"
_QUOTE_FAULT = "a quoted field does not end at a separator or at the end of the line; Parquet can store any text"
_SKIPPED, _INTEGER, _DECIMAL = range(3)  # how `parse_numbers` reads a column


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file, read lazily and in file order."""

    path: Path
    """The file."""
    size: int
    """Approximate number of bytes of its events in memory."""
    dtypes: Mapping[str, pl.DataType]
    """Types of the needed columns."""
    rows: pl.LazyFrame
    """The needed columns, and IS_WELL_FORMED: whether a line has the expected fields."""
    described_rows: pl.LazyFrame
    """LINE, TEXT, FAULT (null if the line is well formed) and the needed columns; may be slower to read."""

    def part(self, events: Sequence[pl.Expr], checks: Mapping[str, pl.Expr]) -> EventPart:
        """Return the events of the file.

        Args:
            events: expressions over the needed columns: user_id, item_id, action, timestamp_ms and extra columns.
            checks: conditions that hold for good rows, by the reason to report where they do not.

        """
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
        """Return user_id and features of all rows.

        Raises:
            DataError: a row is malformed or fails a check, or a user appears twice.

        """
        for row in self.find_bad(checks, 1):
            raise DataError(f"{self.path}, line {row.line} ({row.text[:80]!r}): {row.reason}; fix or remove the line")
        with wrap_read_errors(self.path):
            users = self.rows.select(*columns).collect()
        ids = users.get_column(USER_ID)
        if ids.is_duplicated().any():
            repeated = ids.filter(ids.is_duplicated()).item(0)
            raise DataError(f"{self.path}: user {repeated} appears twice; keep one row per user")
        return users


def open_table(path: Path, names: Sequence[str], *, is_exact: bool = False) -> Table:
    """Open a CSV, gzipped CSV, TSV or Parquet file, whose format follows from its suffix.

    Fields of a CSV file may be quoted with `"`, quotes inside a quoted field are doubled, and a quoted field ends on
    the line where it starts. All columns of a CSV file have the type String.

    Args:
        path: of the file.
        names: the needed columns; all others are ignored.
        is_exact: whether a line without some of the columns that are not needed is malformed.

    Raises:
        DataError: the file is missing, empty, damaged or of an unknown format, or lacks a column.

    """
    suffix = next((known for known in (*_SEPARATORS, _PARQUET) if path.name.lower().endswith(known)), None)
    if suffix is None:
        known = ", ".join((*_SEPARATORS, _PARQUET))
        raise DataError(f"{path} has an unknown suffix; expected one of {known}")
    check_regular(path)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; create it again")
    if suffix == _PARQUET:
        return _open_parquet(path, names)
    separator = _SEPARATORS[suffix]
    with wrap_read_errors(path):
        header = _parse_header(_read_header(path), path, separator)
        _check_columns(path, header, names)
        num_rows = sum(block.num_lines() for block in _read_blocks(path, has_header=True))
    layout = _QuotedLayout(
        separator=separator,
        num_columns=len(header),
        positions={name: header.index(name) for name in names},
        is_exact=is_exact,
    )
    return _csv_table(path, layout, has_header=True, size=_size(path, num_rows))


def open_plain_csv(
    path: Path, columns: Mapping[str, type[pl.DataType] | None], *, has_header: bool = True, separator: str = ","
) -> Table:
    """Open a text file with known columns and without quotes.

    Args:
        path: of the file.
        columns: all columns of the file in file order and their types; None: the column is not needed.
        has_header: whether the first line contains exactly the names of `columns`.
        separator: one character, or one character repeated.

    Raises:
        DataError: the file is missing or empty, or has an unexpected header.

    """
    expected = separator.join(columns)
    with wrap_read_errors(path):
        if has_header and (header := _read_header(path)) != expected:
            raise DataError(
                f"{path} starts with {header[:80]!r}, expected {expected!r}; check that it is the right file"
            )
        if next(_read_blocks(path, has_header=has_header), None) is None:
            raise _no_rows(path)
    layout = _PlainLayout(separator=separator, columns=columns)
    return _csv_table(path, layout, has_header=has_header, size=path.stat().st_size)


def integer_check(name: str) -> dict[str, pl.Expr]:
    """Return the check that a column contains 64-bit integers, keyed by the reason to report."""
    return {f"{name} is not an integer in -2^63..2^63-1": pl.col(name).cast(pl.Int64, strict=False).is_not_null()}


def _check_columns(path: Path, present: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        if name not in present:
            raise DataError(f"{path} has no column {name!r}; known: {', '.join(present)}")
        if present.count(name) > 1:
            raise DataError(f"{path} has {present.count(name)} columns {name!r}; rename all but one")


def _size(path: Path, num_rows: int) -> int:
    if num_rows == 0:
        raise _no_rows(path)
    return max(path.stat().st_size, num_rows * _EVENT_BYTES)  # compressed files are smaller than their events


def _no_rows(path: Path) -> DataError:
    return DataError(f"{path} contains no rows; create or download it again")


def _open_parquet(path: Path, names: Sequence[str]) -> Table:
    scanned = pl.scan_parquet(path, glob=False)
    with wrap_read_errors(path):
        schema = scanned.collect_schema()
        num_rows = scanned.select(pl.len()).collect().item()
    _check_columns(path, schema.names(), names)
    text = pl.concat_str(*(pl.col(name).cast(pl.String, strict=False).fill_null("") for name in names), separator=",")
    described = scanned.select(text.alias(TEXT), pl.lit(None, dtype=pl.String).alias(FAULT), *names)
    return Table(
        path=path,
        size=_size(path, num_rows),
        dtypes={name: schema[name] for name in names},
        rows=scanned.select(*names, pl.lit(True).alias(IS_WELL_FORMED)),
        described_rows=described.with_row_index(LINE, offset=1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Consecutive lines of a file."""

    first_line: int
    """Number of the first line; the first line of a file has number 1."""
    data: bytes
    """The lines in UTF-8, each with a final newline; carriage returns before it and bytes that are not UTF-8 are
    replaced."""

    def num_lines(self) -> int:
        return int(np.count_nonzero(np.frombuffer(self.data, dtype=np.uint8) == ord("\n")))

    def lines(self) -> pl.DataFrame:
        """Return the columns LINE (int64) and TEXT, one row per line."""
        text = self.data.decode().split("\n")[:-1]
        numbers = np.arange(self.first_line, self.first_line + len(text), dtype=np.int64)
        return pl.DataFrame({LINE: numbers, TEXT: text}, schema={LINE: pl.Int64, TEXT: pl.String})


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[gzip.GzipFile | BufferedReader]:
    """Open a file behind its byte order mark, if it has one."""
    check_regular(path)
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        yield file


def _read_header(path: Path) -> str:
    """Return the first line of a file; empty if the file is."""
    with _open_text(path) as file:
        line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise _too_long(path, 1)
    return line.decode(errors="replace").rstrip("\r\n")


def _parse_header(line: str, path: Path, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{path}: the header {line[:80]!r} cannot be parsed ({error}); fix its quotes") from error


def _read_blocks(path: Path, *, has_header: bool) -> Iterator[_Block]:
    """Yield all lines of a file after its header."""
    with _open_text(path) as file:
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
            block = _Block(first_line=number, data=_normalize(lines))
            number += block.num_lines()
            yield block


def _normalize(lines: bytes) -> bytes:
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
        if b"\r\n" in lines:
            lines = _LINE_END.sub(b"\n", lines)
    if not lines.isascii():
        try:
            lines.decode()
        except UnicodeDecodeError:
            lines = lines.decode(errors="replace").encode()
    return lines


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")


class _Layout(ABC):
    """The columns of a CSV file and how its lines are divided into fields."""

    @property
    @abstractmethod
    def dtypes(self) -> dict[str, pl.DataType]:
        """Types of the needed columns."""

    @abstractmethod
    def parse_quickly(self, block: _Block) -> pl.DataFrame | None:
        """Return the needed columns and IS_WELL_FORMED; None if the result could differ from `parse_strictly`."""

    @abstractmethod
    def parse_strictly(self, block: _Block) -> pl.DataFrame:
        """Divide each line into fields independently; return LINE, TEXT, FAULT and the needed columns."""

    def parse(self, block: _Block) -> pl.DataFrame:
        """Return the needed columns and IS_WELL_FORMED."""
        rows = self.parse_quickly(block)
        if rows is not None:
            return rows
        return self.parse_strictly(block).select(*self.dtypes, pl.col(FAULT).is_null().alias(IS_WELL_FORMED))


def _csv_table(path: Path, layout: _Layout, *, has_header: bool, size: int) -> Table:
    def scan(parse: Callable[[_Block], pl.DataFrame], schema: dict[str, pl.DataType]) -> pl.LazyFrame:
        def read(
            columns: list[str] | None, predicate: pl.Expr | None, num_rows: int | None, batch_size: int | None
        ) -> Iterator[pl.DataFrame]:
            for block in _read_blocks(path, has_header=has_header):
                rows = parse(block)
                if predicate is not None:
                    rows = rows.filter(predicate)
                if num_rows is not None:
                    rows = rows.head(num_rows)
                    num_rows -= len(rows)
                yield rows if columns is None else rows.select(columns)
                if num_rows == 0:
                    return

        return register_io_source(read, schema=schema)

    described = {LINE: pl.Int64(), TEXT: pl.String(), FAULT: pl.String(), **layout.dtypes}
    return Table(
        path=path,
        size=size,
        dtypes=layout.dtypes,
        rows=scan(layout.parse, {**layout.dtypes, IS_WELL_FORMED: pl.Boolean()}),
        described_rows=scan(layout.parse_strictly, described),
    )


@dataclass(frozen=True, kw_only=True)
class _PlainLayout(_Layout):
    """Known columns without quotes."""

    separator: str
    columns: Mapping[str, type[pl.DataType] | None]

    @property
    def dtypes(self) -> dict[str, pl.DataType]:
        return {name: dtype() for name, dtype in self.columns.items() if dtype is not None}

    def parse_quickly(self, block: _Block) -> pl.DataFrame | None:
        kinds = {None: _SKIPPED, pl.Int64: _INTEGER, pl.Float64: _DECIMAL}
        if any(dtype not in kinds for dtype in self.columns.values()):
            return None
        kind_of = np.array([kinds[dtype] for dtype in self.columns.values()], dtype=np.int8)
        num_lines = block.num_lines()
        integers = np.empty((np.count_nonzero(kind_of == _INTEGER), num_lines), dtype=np.int64)
        decimals = np.empty((np.count_nonzero(kind_of == _DECIMAL), num_lines), dtype=np.float64)
        data = np.frombuffer(block.data, dtype=np.uint8)
        if not parse_numbers(data, ord(self.separator[0]), len(self.separator), kind_of, integers, decimals):
            return None
        values = {_INTEGER: iter(integers), _DECIMAL: iter(decimals)}
        columns = {name: next(values[kinds[self.columns[name]]]) for name in self.dtypes}
        return pl.DataFrame(columns).with_columns(pl.lit(True).alias(IS_WELL_FORMED))

    def parse_strictly(self, block: _Block) -> pl.DataFrame:
        fields = pl.col(TEXT).str.split(self.separator)
        num_fields = fields.list.len()
        fault = (
            pl.when(pl.col(TEXT).str.contains("\0", literal=True))
            .then(pl.lit(_NUL_FAULT))
            .when(num_fields != len(self.columns))
            .then(pl.format(f"expected {len(self.columns)} fields, got {{}}", num_fields))
        )
        values = (
            fields.list.get(index, null_on_oob=True).cast(dtype, strict=False).alias(name)
            for index, (name, dtype) in enumerate(self.columns.items())
            if dtype is not None
        )
        return block.lines().select(LINE, TEXT, fault.alias(FAULT), *values)


@compiled
def parse_numbers(
    data: NDArray[np.uint8],
    separator: int,
    width: int,
    kinds: NDArray[np.int8],
    integers: NDArray[np.int64],
    decimals: NDArray[np.float64],
) -> bool:
    """Parse lines of numbers in plain digits, several times as fast as a CSV reader that copes with everything else.

    Args:
        data: uint8 [bytes], the lines, each with a final newline.
        separator: the byte that separates fields.
        width: how often the separator is repeated.
        kinds: int8 [columns]: 0 for a column to skip, 1 for integers, 2 for decimal fractions without a sign.
        integers: receives the columns of kind 1 in file order, int64 [columns, lines].
        decimals: receives the columns of kind 2 in file order, float64 [columns, lines].

    Returns:
        False if a line has another form, which does not mean that it is malformed; the results are undefined then.

    """
    position = 0
    line = 0
    while position < len(data):
        integer_column = 0
        decimal_column = 0
        for column in range(len(kinds)):
            if column > 0:
                for _ in range(width):
                    if data[position] != separator:
                        return False
                    position += 1
            if kinds[column] == 0:
                while data[position] != separator and data[position] != 10:
                    if data[position] == 0:
                        return False
                    position += 1
                continue
            sign = 1
            if kinds[column] == 1 and data[position] == 45:  # a minus
                sign = -1
                position += 1
            value = 0
            num_digits = 0
            scale = 0.0  # a power of ten once there is a decimal point
            while True:
                digit = np.int64(data[position]) - 48
                if 0 <= digit <= 9:
                    value = 10 * value + digit
                    num_digits += 1
                    scale *= 10.0
                elif kinds[column] == 2 and digit == -2 and scale == 0.0:  # a decimal point
                    scale = 1.0
                else:
                    break
                position += 1
            # Integers below 10^18 fit into an int64. Below 10^15, both operands of the division are exact.
            if num_digits == 0 or num_digits > (18 if kinds[column] == 1 else 15):
                return False
            if kinds[column] == 1:
                integers[integer_column, line] = sign * value
                integer_column += 1
            else:
                decimals[decimal_column, line] = value / max(scale, 1.0)
                decimal_column += 1
        if data[position] != 10:
            return False
        position += 1
        line += 1
    return True


@dataclass(frozen=True, kw_only=True)
class _QuotedLayout(_Layout):
    """Columns of text that are found by name, with fields that may be quoted."""

    separator: str
    num_columns: int
    """Number of columns of the file."""
    positions: Mapping[str, int]
    """Positions of the needed columns among them."""
    is_exact: bool
    """Whether a line without some of the columns that are not needed is malformed."""

    @property
    def dtypes(self) -> dict[str, pl.DataType]:
        return dict.fromkeys(self.positions, pl.String())

    def parse_quickly(self, block: _Block) -> pl.DataFrame | None:
        if self.is_exact or not self._is_simple(block.data):
            return None
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

    def _is_simple(self, data: bytes) -> bool:
        """Return whether Polars' CSV reader divides lines as `parse_strictly` does.

        Its result for unbalanced quotes depends on where it splits its input to read it in parallel; it also drops
        some carriage returns, rejects some doubled quotes, and takes a byte order mark for one wherever its input
        begins.
        """
        if b"\0" in data or b"\r" in data or data.startswith(_BOM):
            return False
        if b'"' not in data:
            return True
        field = f'(?:"[^"\n]*"|[^"\n{self.separator}]*)'
        return bool(pl.Series([data.decode()]).str.contains(f"^(?:{field}(?:{self.separator}{field})*\n)*$").item())

    def parse_strictly(self, block: _Block) -> pl.DataFrame:
        # Quotes in a field that starts without one are plain characters. The pattern for a field includes the
        # separator before it, so that no match is empty: after an empty match, the next field would not be found. The
        # line therefore gets a separator before its first field.
        separator = self.separator
        field = f'{separator}(?:"(?:[^"]|"")*"|[^"{separator}][^{separator}]*|)'
        text, num_fields = pl.col(TEXT), pl.col(_FIELDS).list.len()

        def value(index: int) -> pl.Expr:
            raw = pl.col(_FIELDS).list.get(index, null_on_oob=True).str.slice(1)
            inner = raw.str.slice(1, raw.str.len_chars().cast(pl.Int64) - 2).str.replace_all('""', '"', literal=True)
            return pl.when(raw.str.starts_with('"')).then(inner).otherwise(raw)

        min_fields = self.num_columns if self.is_exact else max(self.positions.values()) + 1
        fault = (
            pl.when(text == "")
            .then(pl.lit("the line is empty"))
            .when(text.str.contains("\0", literal=True))
            .then(pl.lit(_NUL_FAULT))
            .when(~(separator + text).str.contains(f"^(?:{field})+$"))
            .then(pl.lit(_QUOTE_FAULT))
            .when((value(self.num_columns).fill_null("") != "") | (num_fields < min_fields))
            .then(pl.format(f"expected {self.num_columns} fields, got {{}}", num_fields))
        )
        fields = block.lines().with_columns((separator + text).str.extract_all(field).alias(_FIELDS))
        values = (value(index).alias(name) for name, index in self.positions.items())
        return fields.select(LINE, TEXT, fault.alias(FAULT), *values)
