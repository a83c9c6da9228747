"""CSV and Parquet files as tables: the needed columns of every row, and a description of the rows that cannot be read.

A CSV file is read in blocks of whole lines, and every line is divided into fields independently, so that a malformed
line affects no other. Blocks without anything unusual are parsed by a compiled loop or by Polars' CSV reader. All other
blocks are parsed by expressions over their lines, which are several times slower and report what is wrong.
"""

import contextlib
import csv
import gzip
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars.io.plugins import register_io_source

from evenrank.core.errors import DataError
from evenrank.core.files import check_regular
from evenrank.core.numba_cache import compiled
from evenrank.preprocess.sources.interactions import FAULT, IS_WELL_FORMED, LINE, TEXT, Table, wrap_read_errors

_FIELDS = "evenrank fields"

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".parquet": None}
_BLOCK_BYTES = 16 << 20
_MAX_LINE_BYTES = 64 << 20
_EVENT_BYTES = 28  # of an event in memory: three int64 and one int32
_BOM = b"\xef\xbb\xbf"
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_NUL_FAULT = "the line contains a NUL byte; the file is damaged there"
_QUOTE_FAULT = "a quoted field does not end at a separator or at the end of the line; Parquet can store any text"
_NEWLINE, _MINUS, _POINT, _ZERO = b"\n-.0"
_SKIPPED, _INTEGER, _DECIMAL = 0, 1, 2  # how `parse_numbers` reads a column


def open_table(path: Path, names: Sequence[str], *, is_exact: bool = False) -> Table:
    """Open a CSV, gzipped CSV, TSV or Parquet file, whose format follows from its suffix.

    Fields of a CSV file may be quoted with `"`, quotes inside a quoted field are doubled, and a quoted field ends on
    the line where it starts. All columns of a CSV file have the type String.

    Columns other than `names` are ignored; a line that lacks some of them is malformed only if `is_exact`.
    """
    suffix = next((known for known in _SEPARATORS if path.name.lower().endswith(known)), None)
    if suffix is None:
        raise DataError(f"{path} has an unknown suffix; expected one of {', '.join(_SEPARATORS)}")
    check_regular(path)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; create it again")
    separator = _SEPARATORS[suffix]
    if separator is None:
        return _open_parquet(path, names)
    with wrap_read_errors(path):
        line = _read_header(path)
        try:
            header = next(csv.reader([line], delimiter=separator, strict=True), [])
        except csv.Error as error:
            raise DataError(f"{path}: the header {line[:80]!r} cannot be parsed ({error}); fix its quotes") from error
        _check_columns(path, header, names)
        num_rows = sum(block.num_lines for block in _read_blocks(path, has_header=True))
    layout = _QuotedLayout(
        separator=separator,
        dtypes=dict.fromkeys(names, pl.String()),
        num_columns=len(header),
        positions={name: header.index(name) for name in names},
        is_exact=is_exact,
    )
    return _csv_table(path, layout, has_header=True, size=_size(path, num_rows))


def open_plain_csv(
    path: Path, columns: Mapping[str, type[pl.DataType] | None], *, has_header: bool = True, separator: str = ","
) -> Table:
    """Open a text file without quotes.

    Args:
        columns: types of all columns in file order; None: the column is not needed.
        has_header: whether the first line contains exactly the names of `columns`.
        separator: one character, or one character repeated.
    """
    expected = separator.join(columns)
    with wrap_read_errors(path):
        if has_header and (header := _read_header(path)) != expected:
            raise DataError(
                f"{path} starts with {header[:80]!r}, expected {expected!r}; check that it is the right file"
            )
        if next(_read_blocks(path, has_header=has_header), None) is None:
            raise DataError(f"{path} contains no rows; create or download it again")
    dtypes = {name: dtype() for name, dtype in columns.items() if dtype is not None}
    layout = _PlainLayout(separator=separator, dtypes=dtypes, columns=tuple(columns))
    return _csv_table(path, layout, has_header=has_header, size=path.stat().st_size)


def _check_columns(path: Path, present: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        if name not in present:
            raise DataError(f"{path} has no column {name!r}; known: {', '.join(present)}")
        if present.count(name) > 1:
            raise DataError(f"{path} has {present.count(name)} columns {name!r}; rename all but one")


def _size(path: Path, num_rows: int) -> int:
    if num_rows == 0:
        raise DataError(f"{path} contains no rows; create or download it again")
    return max(path.stat().st_size, num_rows * _EVENT_BYTES)


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

    first_line: int  # counted from 1
    num_lines: int
    data: bytes  # UTF-8, in which each line ends with a newline that no carriage return precedes

    def lines(self) -> pl.DataFrame:
        """Return the columns LINE (int64) and TEXT."""
        text = self.data.decode().split("\n")[:-1]
        numbers = np.arange(self.first_line, self.first_line + self.num_lines, dtype=np.int64)
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
    with _open_text(path) as file:
        line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise _too_long(path, 1)
    return line.decode(errors="replace").rstrip("\r\n")


def _read_blocks(path: Path, *, has_header: bool) -> Iterator[_Block]:
    """Yield all lines of a file after its header."""
    with _open_text(path) as file:
        number = 1 + has_header
        if has_header:
            file.readline()
        while chunk := file.read(_BLOCK_BYTES):
            rest = b"" if chunk.endswith(b"\n") else file.readline(_MAX_LINE_BYTES)
            last_line = chunk.rfind(b"\n") + 1
            if len(chunk) - last_line + len(rest) > _MAX_LINE_BYTES:
                raise _too_long(path, number + chunk.count(b"\n"))
            ending = b"" if (rest or chunk).endswith(b"\n") else b"\n"
            data = b"".join((chunk, rest, ending)) if rest or ending else chunk
            if b"\r" in data:
                data = data.replace(b"\r\n", b"\n")
                if b"\r\n" in data:
                    data = _LINE_END.sub(b"\n", data)
            if not data.isascii():
                data = data.decode(errors="replace").encode()
            num_lines = int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) == _NEWLINE))
            yield _Block(first_line=number, num_lines=num_lines, data=data)
            number += num_lines


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")


def _csv_table(path: Path, layout: "_PlainLayout | _QuotedLayout", *, has_header: bool, size: int) -> Table:
    def parse(block: _Block) -> pl.DataFrame:
        rows = layout.parse_quickly(block)
        if rows is not None:
            return rows
        return layout.parse_strictly(block).select(*layout.dtypes, pl.col(FAULT).is_null().alias(IS_WELL_FORMED))

    described = {LINE: pl.Int64(), TEXT: pl.String(), FAULT: pl.String(), **layout.dtypes}
    return Table(
        path=path,
        size=size,
        dtypes=layout.dtypes,
        rows=_scan(path, parse, {**layout.dtypes, IS_WELL_FORMED: pl.Boolean()}, has_header=has_header),
        described_rows=_scan(path, layout.parse_strictly, described, has_header=has_header),
    )


def _scan(
    path: Path, parse: Callable[[_Block], pl.DataFrame], schema: dict[str, pl.DataType], *, has_header: bool
) -> pl.LazyFrame:

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


@dataclass(frozen=True, kw_only=True)
class _PlainLayout:
    """Divides lines into fields without quotes."""

    separator: str
    dtypes: dict[str, pl.DataType]  # of the needed columns
    columns: Sequence[str]  # all columns of the file

    def parse_quickly(self, block: _Block) -> pl.DataFrame | None:
        """Return the needed columns and IS_WELL_FORMED; None if the result could differ from `parse_strictly`."""
        kind_of_dtype: dict[pl.DataType | None, int] = {None: _SKIPPED, pl.Int64(): _INTEGER, pl.Float64(): _DECIMAL}
        if not kind_of_dtype.keys() >= set(self.dtypes.values()):
            return None
        kinds = [kind_of_dtype[self.dtypes.get(name)] for name in self.columns]
        integers = np.empty((kinds.count(_INTEGER), block.num_lines), dtype=np.int64)
        decimals = np.empty((kinds.count(_DECIMAL), block.num_lines), dtype=np.float64)
        data, codes = np.frombuffer(block.data, dtype=np.uint8), np.array(kinds, dtype=np.int8)
        if not parse_numbers(data, ord(self.separator[0]), len(self.separator), codes, integers, decimals):
            return None
        rows: dict[int, Iterator[NDArray[Any]]] = {_INTEGER: iter(integers), _DECIMAL: iter(decimals)}
        columns = {name: next(rows[kind]) for name, kind in zip(self.columns, kinds, strict=True) if kind != _SKIPPED}
        return pl.DataFrame(columns).with_columns(pl.lit(True).alias(IS_WELL_FORMED))

    def parse_strictly(self, block: _Block) -> pl.DataFrame:
        """Divide each line independently; return LINE, TEXT, FAULT and the needed columns."""
        fields = pl.col(TEXT).str.split(self.separator)
        num_fields = fields.list.len()
        fault = (
            pl.when(pl.col(TEXT).str.contains("\0", literal=True))
            .then(pl.lit(_NUL_FAULT))
            .when(num_fields != len(self.columns))
            .then(pl.format(f"expected {len(self.columns)} fields, got {{}}", num_fields))
        )
        values = (
            fields.list.get(self.columns.index(name), null_on_oob=True).cast(dtype, strict=False).alias(name)
            for name, dtype in self.dtypes.items()
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
    """Parse lines of numbers in plain digits; several times as fast as a CSV reader that copes with everything else.

    Fields are separated by `width` repetitions of the byte `separator`, and `kinds` tells how to read each column:
    _SKIPPED, _INTEGER, or _DECIMAL for fractions without a sign. The columns are written to `integers` and `decimals`
    in file order: [columns, lines]. Return False if a line has another form, which does not mean that it is malformed;
    the results are undefined then.
    """
    position = line = 0
    while position < len(data):
        num_integers = num_decimals = 0
        for column in range(len(kinds)):
            for _ in range(width if column > 0 else 0):
                if data[position] != separator:
                    return False
                position += 1
            if kinds[column] == _SKIPPED:
                while data[position] != separator and data[position] != _NEWLINE:
                    if data[position] == 0:
                        return False
                    position += 1
                continue
            is_integer = kinds[column] == _INTEGER
            is_negative = is_integer and data[position] == _MINUS
            position += is_negative
            value = np.int64(0)
            num_digits = 0
            scale = 0.0  # a power of ten once there is a decimal point
            while True:
                digit = np.int64(data[position]) - _ZERO
                if 0 <= digit <= 9:
                    value = 10 * value + digit
                    num_digits += 1
                    scale *= 10.0
                elif data[position] == _POINT and not is_integer and scale == 0.0:
                    scale = 1.0
                else:
                    break
                position += 1
            # Integers below 10^18 fit into an int64. Below 10^15, both operands of the division are exact.
            if num_digits == 0 or num_digits > (18 if is_integer else 15):
                return False
            if is_integer:
                integers[num_integers, line] = -value if is_negative else value
                num_integers += 1
            else:
                decimals[num_decimals, line] = value / max(scale, 1.0)
                num_decimals += 1
        if data[position] != _NEWLINE:
            return False
        position += 1
        line += 1
    return True


@dataclass(frozen=True, kw_only=True)
class _QuotedLayout:
    """Divides lines into fields of text that may be quoted."""

    separator: str
    dtypes: dict[str, pl.DataType]  # of the needed columns
    num_columns: int  # of the file
    positions: Mapping[str, int]  # of the needed columns among them
    is_exact: bool

    def parse_quickly(self, block: _Block) -> pl.DataFrame | None:
        if self.is_exact or not self._is_simple(block.data):
            return None
        columns = [f"column {index}" for index in range(self.num_columns + 1)]
        native = pl.scan_csv(
            b"\n" + block.data,  # the first bytes could be those of a compressed file; the empty line is skipped
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
        # Polars' reader splits its input at any place to read it in parallel, so its result for unbalanced quotes
        # depends on the place. It also drops some carriage returns, rejects some doubled quotes, and takes a byte order
        # mark for one wherever its input begins.
        if b"\0" in data or b"\r" in data or data.startswith(_BOM):
            return False
        if b'"' not in data:
            return True
        field = f'(?:"[^"\n]*"|[^"\n{self.separator}]*)'
        return bool(pl.Series([data.decode()]).str.contains(f"^(?:{field}(?:{self.separator}{field})*\n)*$").item())

    def parse_strictly(self, block: _Block) -> pl.DataFrame:
        # Quotes in a field that starts without one are plain characters. The pattern for a field includes the
        # separator before it, which the first field gets too: after an empty match, the next field would not be found.
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
