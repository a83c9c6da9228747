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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from evenrank.core.errors import DataError
from evenrank.core.files import check_regular
from evenrank.preprocess.sources.interactions import FAULT, IS_WELL_FORMED, LINE, TEXT, Table, wrap_read_errors
from evenrank.preprocess.sources.parse_numbers import DECIMAL, INTEGER, SKIPPED, parse_numbers

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
_NEWLINE = ord("\n")
_KINDS: dict[pl.DataType | None, int] = {pl.Int64(): INTEGER, pl.Float64(): DECIMAL}


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
    dtypes = dict.fromkeys(names, pl.String())
    layout = _QuotedLayout(separator=separator, dtypes=dtypes, columns=header, is_exact=is_exact)
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
        has_types=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Consecutive lines of a file."""

    first_line: int  # counted from 1
    num_lines: int
    data: bytearray  # UTF-8, in which each line ends with a newline that no carriage return precedes

    def lines(self) -> pl.DataFrame:
        """Return the columns LINE (int64) and TEXT."""
        text = pl.Series(TEXT, self.data.decode().split("\n")[:-1], dtype=pl.String)
        return pl.select(pl.int_range(self.first_line, self.first_line + self.num_lines).alias(LINE), text)


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
        while True:
            data = bytearray(_BLOCK_BYTES)  # which grows in place
            del data[file.readinto(data) :]
            if not data:
                return
            last_line = data.rfind(b"\n") + 1
            if last_line < len(data):
                data += file.readline(_MAX_LINE_BYTES)
                if len(data) - last_line > _MAX_LINE_BYTES:
                    raise _too_long(path, number + data.count(b"\n", 0, last_line))
            if not data.endswith(b"\n"):
                data += b"\n"
            if b"\r" in data:
                data = data.replace(b"\r\n", b"\n")
                if b"\r\n" in data:
                    data = bytearray(_LINE_END.sub(b"\n", data))
            if not data.isascii():
                data = bytearray(data.decode(errors="replace"), "utf-8")
            num_lines = int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) == _NEWLINE))
            yield _Block(first_line=number, num_lines=num_lines, data=data)
            number += num_lines


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")


def _csv_table(path: Path, layout: "_PlainLayout | _QuotedLayout", *, has_header: bool, size: int) -> Table:
    def scan(parse: Callable[[_Block], pl.DataFrame], schema: dict[str, pl.DataType]) -> pl.LazyFrame:
        def read(
            columns: list[str] | None, predicate: pl.Expr | None, num_rows: int | None, batch_size: int | None
        ) -> Iterator[pl.DataFrame]:
            for rows in _map_ahead(parse, _read_blocks(path, has_header=has_header)):
                if predicate is not None:
                    rows = rows.filter(predicate)
                if num_rows is not None:
                    rows = rows.head(num_rows)
                    num_rows -= len(rows)
                yield rows if columns is None else rows.select(columns)
                if num_rows == 0:
                    return

        return register_io_source(read, schema=schema)

    def parse(block: _Block) -> pl.DataFrame:
        if (rows := layout.parse_quickly(block)) is not None:
            return rows
        return layout.parse_strictly(block).select(*layout.dtypes, pl.col(FAULT).is_null().alias(IS_WELL_FORMED))

    return Table(
        path=path,
        size=size,
        dtypes=layout.dtypes,
        rows=scan(parse, {**layout.dtypes, IS_WELL_FORMED: pl.Boolean()}),
        described_rows=scan(
            layout.parse_strictly, {LINE: pl.Int64(), TEXT: pl.String(), FAULT: pl.String(), **layout.dtypes}
        ),
        has_types=False,
    )


def _map_ahead(parse: Callable[[_Block], pl.DataFrame], blocks: Iterator[_Block]) -> Iterator[pl.DataFrame]:
    """Yield the rows of each block, while the next one is parsed and the one after it is read."""
    with ThreadPoolExecutor(1) as background:
        pending = [background.submit(parse, block) for block in islice(blocks, 1)]
        for block in blocks:
            pending.append(background.submit(parse, block))
            yield pending.pop(0).result()
        for last in pending:
            yield last.result()


@dataclass(frozen=True, kw_only=True)
class _Layout:
    separator: str
    dtypes: Mapping[str, pl.DataType]  # of the needed columns
    columns: Sequence[str]  # all columns of the file


class _PlainLayout(_Layout):
    """Divides lines into fields without quotes; the needed columns are in file order."""

    def parse_quickly(self, block: _Block) -> pl.DataFrame | None:
        """Return the needed columns and IS_WELL_FORMED; None if the result could differ from `parse_strictly`."""
        if not set(self.dtypes.values()) <= _KINDS.keys():
            return None
        kinds = np.array([_KINDS.get(self.dtypes.get(name), SKIPPED) for name in self.columns], dtype=np.int8)
        integers = np.empty((len(self.dtypes), block.num_lines), dtype=np.int64)
        decimals = integers.view(np.float64)  # each row is of one type
        data = np.frombuffer(block.data, dtype=np.uint8)
        if not parse_numbers(data, ord(self.separator[0]), len(self.separator), kinds, integers, decimals):
            return None
        rows = zip(self.dtypes.items(), integers, decimals, strict=True)
        columns = {name: decimal if dtype == pl.Float64 else integer for (name, dtype), integer, decimal in rows}
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


@dataclass(frozen=True, kw_only=True)
class _QuotedLayout(_Layout):
    """Divides lines into fields of text that may be quoted."""

    is_exact: bool

    def parse_quickly(self, block: _Block) -> pl.DataFrame | None:
        if self.is_exact or not self._is_simple(block.data):
            return None
        columns = [f"column {index}" for index in range(len(self.columns) + 1)]
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
        values = (pl.col(columns[self.columns.index(name)]).alias(name) for name in self.dtypes)
        return native.select(*values, (pl.col(columns[-1]).fill_null("") == "").alias(IS_WELL_FORMED)).collect()

    def _is_simple(self, data: bytearray) -> bool:
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

        positions, num_columns = {name: self.columns.index(name) for name in self.dtypes}, len(self.columns)
        min_fields = num_columns if self.is_exact else max(positions.values()) + 1
        fault = (
            pl.when(text == "")
            .then(pl.lit("the line is empty"))
            .when(text.str.contains("\0", literal=True))
            .then(pl.lit(_NUL_FAULT))
            .when(~(separator + text).str.contains(f"^(?:{field})+$"))
            .then(pl.lit(_QUOTE_FAULT))
            .when((value(num_columns).fill_null("") != "") | (num_fields < min_fields))
            .then(pl.format(f"expected {num_columns} fields, got {{}}", num_fields))
        )
        fields = block.lines().with_columns((separator + text).str.extract_all(field).alias(_FIELDS))
        values = (value(index).alias(name) for name, index in positions.items())
        return fields.select(LINE, TEXT, fault.alias(FAULT), *values)
