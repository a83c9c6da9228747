"""Data files as tables: the needed columns of every row, and a description of the rows that cannot be read.

A text file is read in blocks of whole lines, and every line is parsed independently, so that a malformed line affects
no other.
"""

import contextlib
import csv
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from evenrank.core.errors import DataError
from evenrank.core.files import check_regular
from evenrank.preprocess.files import locate
from evenrank.preprocess.files.parse_numbers import (
    DECIMAL,
    EMPTY,
    INTEGER,
    NUL,
    SKIPPED,
    UNQUOTED,
    parse_numbers,
    split_fields,
)
from evenrank.preprocess.files.table import FAULT, IS_WELL_FORMED, LINE, TEXT, Select, Table, Types, wrap_read_errors
from evenrank.preprocess.files.text_blocks import REPLACEMENT, Block, estimate_lines, read_blocks, read_first_line

_SEPARATORS = (",", "\t", ";", "|", "::")  # that are recognized
_FAULTS = {
    EMPTY: "the line is empty",
    NUL: "the line contains a NUL byte; the file is damaged there",
    UNQUOTED: "a quoted field does not end at a separator or at the end of the line; Parquet can store any text",
}
_ENCODING_FAULT = "the line is not UTF-8; convert the file, for example with iconv"
_JSON_FAULT = "the line is not a JSON object (jq -c '.[]' divides an array into lines)"
_IS_OBJECT = "evenrank is_object"
_Parsed = tuple[pl.DataFrame, Sequence[pl.Expr]]  # rows, and the columns to compute from them
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def open_table(
    path: Path, needed: Collection[str], *, separator: str | None = None, columns: Sequence[str] = ()
) -> Table:
    """Open a file of delimited text, JSON lines or Parquet, as its name says.

    Fields of delimited text may be quoted with `"` if the separator is one character; quotes inside a quoted field are
    doubled, and a quoted field ends on the line where it starts. Columns that a file lacks are taken from the names of
    its folders, such as `day=1`, as text; JSON lines have the keys of the first line. Values in JSON lines become text.

    Args:
        path: the file.
        needed: names of the columns to read.
        separator: one character, or one character repeated. None: the usual one by which the first line has all needed
            columns or, if there is no header, as many fields as `columns`.
        columns: names of all columns of delimited text in file order; empty: the first line has them.
    """
    check_regular(path)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; create it again")
    file_format, folders = locate.file_format(path), locate.partition_values(path)
    if file_format != locate.TEXT and (columns or separator):
        raise DataError(
            f"{path} is {file_format}, which has no delimiter and names its columns; leave out both options"
        )
    with wrap_read_errors(path):
        if file_format == locate.PARQUET:
            return _open_parquet(path, needed, folders)
        if file_format == locate.JSON:
            keys = _keys(read_first_line(path))  # which also checks the encoding
            own = _own_columns(path, [name for name in needed if name in keys or name not in folders], needed, folders)
            return _text_table(path, _JsonLayout(names=own), _constants(needed, own, folders), has_header=False)
        return _open_delimited(path, needed, folders, separator, columns)


def _keys(line: str) -> frozenset[str]:
    """Return the keys of a line of JSON; none if it is no object."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(line), dict):
            return frozenset(value)
    return frozenset()


def _own_columns(
    path: Path,
    present: Sequence[str],
    needed: Collection[str],
    folders: Collection[str],
    remedy: str = "choose one of them",
) -> list[str]:
    """Return the needed columns that a file has; raise a DataError if any other is not in the names of its folders."""
    own = [name for name in needed if name in present or name not in folders]
    for name in own:
        if name not in present:
            raise DataError(f"{path} has no column {name!r}; known: {', '.join(present)}; {remedy}")
        if present.count(name) > 1:
            raise DataError(f"{path} has {present.count(name)} columns {name!r}; rename all but one")
    if not own:
        raise DataError(f"{path}: all needed columns are in the names of its folders; one must be in the file")
    return own


def _constants(needed: Collection[str], own: Collection[str], folders: Mapping[str, str | None]) -> list[pl.Expr]:
    """Return the needed columns that are in the names of a file's folders."""
    return [pl.lit(folders[name], dtype=pl.String).alias(name) for name in needed if name not in own]


def _open_parquet(path: Path, needed: Collection[str], folders: Mapping[str, str | None]) -> Table:
    scanned = pl.scan_parquet(path, glob=False, hive_partitioning=False)
    schema = scanned.collect_schema()
    names = _own_columns(path, schema.names(), needed, folders)
    values = (pl.struct(name).struct.json_encode() if schema[name].is_nested() else pl.col(name) for name in names)
    text = pl.concat_str(*(value.cast(pl.String, strict=False).fill_null("") for value in values), separator=",")
    described = scanned.select(text.alias(TEXT), pl.lit(None, dtype=pl.String).alias(FAULT), *names)
    constants = _constants(needed, names, folders)
    rows = scanned.select(*names, pl.lit(True).alias(IS_WELL_FORMED)).with_columns(constants)
    dtypes = dict(rows.drop(IS_WELL_FORMED).collect_schema())
    return Table(
        path=path,
        num_rows=scanned.select(pl.len()).collect().item(),
        dtypes=dtypes,
        select=lambda select, numbers: rows.select(select(dtypes)),
        described_rows=described.with_row_index(LINE, offset=1).with_columns(constants),
        has_types=True,
    )


def _open_delimited(
    path: Path,
    needed: Collection[str],
    folders: Mapping[str, str | None],
    separator: str | None,
    columns: Sequence[str],
) -> Table:
    line = read_first_line(path)
    if separator is None:
        separator = _infer_separator(path, line, {name for name in needed if name not in folders}, len(columns))
    fields = _divide(line, separator)
    if not fields:
        raise DataError(f"{path}: the first line {line[:80]!r} cannot be parsed; fix its quotes or line ends")
    if len(fields) != len(columns or fields):
        counts = f"{len(fields)} fields by the delimiter {separator!r}, and {len(columns)} columns are given"
        raise DataError(f"{path}: the first line has {counts}; correct one of them")
    remedy = "choose one of them"
    if not columns:
        remedy += " or, if that is no header, give --columns (of --context, --context-header)"
    own = _own_columns(path, columns or fields, needed, folders, remedy)
    layout = _CsvLayout(separator=separator, columns=columns or fields, names=own)
    table = _text_table(path, layout, _constants(needed, own, folders), has_header=not columns)
    return replace(table, separator=separator)


def _infer_separator(path: Path, line: str, names: Collection[str], num_columns: int) -> str:
    """Return the separator by which a header has all `names` or, if it is not 0, a line has `num_columns` fields."""
    divided = {separator: _divide(line, separator) for separator in _SEPARATORS}
    if num_columns:
        fitting = [separator for separator, fields in divided.items() if len(fields) == num_columns]
    else:
        fitting = [separator for separator, fields in divided.items() if set(names) <= set(fields)]
    if any(divided[separator] != divided[fitting[0]] for separator in fitting):
        raise DataError(f"{path}: the delimiter could be any of {fitting} by the first line, {line[:80]!r}; give it")
    return fitting[0] if fitting else max(_SEPARATORS, key=line.count)


def _divide(line: str, separator: str) -> list[str]:
    """Return the fields of a line; none if its quotes are not balanced."""
    if len(separator) > 1:
        return line.split(separator)
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error:
        return []


def _text_table(
    path: Path, layout: "_CsvLayout | _JsonLayout", constants: Sequence[pl.Expr], *, has_header: bool
) -> Table:
    is_well_formed = pl.col(FAULT).is_null().alias(IS_WELL_FORMED)
    names = [*layout.names, *(constant.meta.output_name() for constant in constants)]
    dtypes: Types = dict.fromkeys(names, pl.String())

    def scan(parse: Callable[[Block], _Parsed], schema: Types) -> pl.LazyFrame:
        def read(
            columns: list[str] | None, predicate: pl.Expr | None, num_rows: int | None, batch_size: int | None
        ) -> Iterator[pl.DataFrame]:
            for parsed, outputs in _map_ahead(parse, read_blocks(path, has_header=has_header)):
                rows = parsed.with_columns(constants).select(outputs)
                if predicate is not None:
                    rows = rows.filter(predicate)
                if num_rows is not None:
                    rows = rows.head(num_rows)
                    num_rows -= len(rows)
                yield rows if columns is None else rows.select(columns)
                if num_rows == 0:
                    return

        return register_io_source(read, schema=schema)

    def select(of_types: Select, numbers: Types) -> pl.LazyFrame:
        of_text = of_types(dtypes)
        numbers = {name: numbers[name] for name in layout.names if name in numbers}
        of_numbers = of_types({**dtypes, **numbers})

        def parse(block: Block) -> _Parsed:
            rows = layout.parse_numbers(block, numbers) if len(numbers) == len(layout.names) else None
            outputs = of_text if rows is None else of_numbers
            return (layout.parse(block) if rows is None else rows).with_columns(is_well_formed), outputs

        empty = pl.DataFrame(schema={**dtypes, IS_WELL_FORMED: pl.Boolean()})
        return scan(parse, empty.select(of_text).schema)

    def describe(block: Block) -> _Parsed:
        rows = pl.concat([block.lines(), layout.parse(block)], how="horizontal")
        return rows, [pl.col(LINE, TEXT, FAULT, *dtypes)]

    return Table(
        path=path,
        num_rows=estimate_lines(path),
        dtypes=dtypes,
        select=select,
        described_rows=scan(describe, {LINE: pl.Int64(), TEXT: pl.String(), FAULT: pl.String(), **dtypes}),
        has_types=False,
    )


def _map_ahead(parse: Callable[[Block], _Parsed], blocks: Iterator[Block]) -> Iterator[_Parsed]:
    """Yield what becomes of each block, while the next one is parsed and the one after it is read."""
    background = ThreadPoolExecutor(1)
    try:
        pending = [background.submit(parse, block) for block in islice(blocks, 1)]
        for block in blocks:
            pending.append(background.submit(parse, block))
            yield pending.pop(0).result()
        for last in pending:
            yield last.result()
    finally:
        background.shutdown(wait=False)  # an unfinished generator may be collected on that very thread


def _fault(block: Block, names: Sequence[str], fault: pl.Expr) -> pl.Expr:
    """Return FAULT, which is `fault` or that needed text is not UTF-8; such bytes would merge different ids."""
    names = names if REPLACEMENT.encode() in block.data else []
    is_damaged = pl.any_horizontal(False, *(pl.col(name).str.contains(REPLACEMENT, literal=True) for name in names))
    return pl.coalesce(fault, pl.when(is_damaged).then(pl.lit(_ENCODING_FAULT))).alias(FAULT)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CsvLayout:
    """Divides lines into fields, which may be quoted if the separator is one character."""

    separator: str
    columns: Sequence[str]  # all columns of the file
    names: Sequence[str]  # the needed columns

    def parse_numbers(self, block: Block, numbers: Types) -> pl.DataFrame | None:
        """Return FAULT and the needed columns as Int64 or Float64 if all of them are plain digits, without quotes."""
        if len(self.separator) == 1 and b'"' in block.data:
            return None
        kinds = {name: DECIMAL if dtype == pl.Float64 else INTEGER for name, dtype in numbers.items()}
        integers = np.empty((len(kinds), block.num_lines), dtype=np.int64)
        decimals = integers.view(np.float64)  # each row is of one type
        data = np.frombuffer(block.data, dtype=np.uint8)
        columns = np.array([kinds.get(name, SKIPPED) for name in self.columns], dtype=np.int8)
        if not parse_numbers(data, ord(self.separator[0]), len(self.separator), columns, integers, decimals):
            return None
        names = (name for name in self.columns if name in kinds)
        values = zip(names, integers, decimals, strict=True)
        rows = {name: decimal if kinds[name] == DECIMAL else integer for name, integer, decimal in values}
        return pl.DataFrame(rows).with_columns(pl.lit(None, dtype=pl.String).alias(FAULT))

    def parse(self, block: Block) -> pl.DataFrame:
        """Return FAULT and the needed columns as text."""
        names, data = list(self.names), np.frombuffer(block.data, dtype=np.uint8)
        outputs = np.array([names.index(name) if name in names else -1 for name in self.columns])
        texts = np.empty((len(names), len(data)), dtype=np.uint8)  # whose pages take no memory before they are used
        ends = np.zeros((len(names), block.num_lines + 1), dtype=np.int64)
        num_fields = np.empty(block.num_lines, dtype=np.int64)
        split_fields(data, ord(self.separator[0]), len(self.separator), outputs, texts, ends, num_fields)
        buffers = zip(map(pa.py_buffer, ends), map(pa.py_buffer, texts), strict=True)
        columns = (pa.LargeStringArray.from_buffers(block.num_lines, *pair) for pair in buffers)
        rows = pl.DataFrame(pa.table(dict(zip(names, columns, strict=True))))
        count, is_ragged = pl.lit(pl.Series(num_fields)), num_fields != len(self.columns)
        others = pl.format(f"expected {len(self.columns)} fields, got {{}}", count)
        fault = pl.lit(None, dtype=pl.String)
        if is_ragged.any():
            fault = pl.when(pl.Series(is_ragged)).then(
                count.replace_strict(_FAULTS, default=others, return_dtype=pl.String)
            )
        return rows.select(_fault(block, names, fault), *names)


@dataclass(frozen=True, kw_only=True, slots=True)
class _JsonLayout:
    """Reads one object per line. Integers keep their digits; 1.50 becomes 1.5, and null stays null."""

    names: Sequence[str]  # the needed keys

    def parse_numbers(self, block: Block, numbers: Types) -> pl.DataFrame | None:
        """Return None: there is no faster way."""
        return None

    def parse(self, block: Block) -> pl.DataFrame:
        """Return FAULT and the needed keys."""
        rows = None
        # Polars reads half a surrogate pair as NUL.
        if b"\0" not in block.data and not _SURROGATE.search(block.data):
            rows = self._read(bytes(block.data), block.num_lines)
        if rows is None:
            # Another parser, which does not stop at an invalid line, leaves few of them to search for.
            is_likely = pl.col(TEXT).str.json_path_match("$").str.starts_with("{")
            lines = block.lines().select(pl.when(is_likely).then(TEXT).otherwise(pl.lit("")))
            rows = self._read_each(lines.to_series())
        fault = pl.when(~pl.col(_IS_OBJECT)).then(pl.lit(_JSON_FAULT))
        return rows.select(_fault(block, self.names, fault), *self.names)

    def _read(self, data: bytes, num_lines: int) -> pl.DataFrame | None:
        try:
            rows = pl.read_ndjson(data, schema=dict.fromkeys(self.names, pl.String()))
        except pl.exceptions.PolarsError:
            return None
        # Empty lines are skipped.
        return rows.with_columns(pl.lit(True).alias(_IS_OBJECT)) if len(rows) == num_lines else None

    def _read_each(self, lines: pl.Series) -> pl.DataFrame:
        """Read lines that are objects or empty; only few others."""
        text = lines.replace("", "{}").str.join("\n").item()
        if (rows := self._read(f"{text}\n".encode(), len(lines))) is not None:
            return rows.with_columns((lines != "").alias(_IS_OBJECT))
        if len(lines) == 1:
            return self._read_each(pl.Series([""]))
        half = len(lines) // 2
        return pl.concat([self._read_each(lines[:half]), self._read_each(lines[half:])])
