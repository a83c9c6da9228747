"""Data files as tables of the needed columns.

A text file is read in blocks of whole lines, and every line is parsed independently, so that a malformed line affects
no other.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.read.places import CODECS, JSON, PARQUET, TEXT, checked_format, partition_values
from evenrank.preprocess.read.table import FAULT, Piece, Rows, Table, Types, show_column, wrap_read_errors
from evenrank.preprocess.read.text import (
    Block,
    divide,
    estimate_lines,
    parse_delimited,
    read_blocks,
    read_first_line,
    text_pieces,
    with_encoding_faults,
)
from evenrank.preprocess.read.values import CASTS

_SEPARATORS = (",", "\t", ";", "|", "::")  # that are recognized
_JSON_FAULT = "the line is not a JSON object (jq -c '.[]' divides an array into lines)"
_BATCH_ROWS = _PIECE_ROWS = 1_000_000  # of Parquet
_Parse = Callable[..., pl.DataFrame]  # of a block and Types; returns FAULT and the columns with `names`
_Folders = Mapping[str, str | None]
_Options = Mapping[str, str]
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# What Python writes and JSON does not have, and numbers that Polars refuses or rounds: where they may be, and which.
_MAYBE_ODD = r"[:\[,][ \t]*(?:NaN|-?Infinity|-?[0-9]+\.?[0-9]*[eE]\+?[0-9]|-?[0-9]{16,}\.|-?[0-9]{38})"
_TEXT_OR_NUMBER = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?<![0-9.eE+-])(?:NaN|-?Infinity|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)'
    r"(?=[ \t\r]*[,\]}])"
)


def open_table(
    path: Path,
    needed: Collection[str],
    *,
    separator: str | None = None,
    columns: Sequence[str] = (),
    folders: _Folders = MappingProxyType({}),
    log_bytes: int = 0,
    options: _Options = MappingProxyType({}),
    optional: Collection[str] = (),
) -> Table:
    """Open a file of delimited text, JSON lines or Parquet, as its name says.

    Fields of delimited text may be quoted with `"` if the separator is one character; quotes inside a quoted field are
    doubled, and a quoted field ends on the line where it starts. Columns that a file lacks are taken from its folders,
    as text; JSON lines have the keys of the first line. Values in JSON lines become text.

    Args:
        path: the file.
        needed: names of the columns to read.
        separator: one character, or one character repeated. None: the usual one by which the first line has all needed
            columns or, if there is no header, as many fields as `columns`.
        columns: names of all columns of delimited text in file order; empty: the first line has them.
        folders: columns that its folders add, as `find_files` returns them.
        log_bytes: of all files of the log, by which it is divided into pieces.
        options: those of the command line that name columns, for messages.
        optional: needed columns that the file may lack.
    """
    file_format = checked_format(path)
    if file_format != TEXT and (columns or separator):
        raise DataError(
            f"{path} is {file_format}, which has no delimiter and names its columns; leave out both options"
        )
    remedy, names = "choose one of them", {*needed} - folders.keys() - {*optional}
    present: Sequence[str]
    parse: _Parse = _parse_json
    schema: Mapping[str, pl.DataType] = {}  # text has none
    with wrap_read_errors(path):
        if file_format == PARQUET:
            schema = _scan(path).collect_schema()
            present = [*schema]
        elif file_format == JSON:
            keys = _keys(read_first_line(path))  # which checks the encoding
            present = [name for name in needed if name in names or name in keys]
        else:
            line = read_first_line(path)
            given, separator = separator, separator or _infer_separator(path, line, names, len(columns))
            fields, _ = divide(line, separator)
            if not fields or "\r" in line:
                raise DataError(f"{path}: the first line {line[:80]!r} cannot be parsed; fix its quotes or line ends")
            if given and len(fields) == 1 < len(names):
                usual = " and ".join(repr(mark) for mark in _SEPARATORS if mark in line)
                remedy = f"it has {usual}; give that, or leave --delimiter out" if usual else "correct --delimiter"
                raise DataError(f"{path}: the first line {line[:80]!r} has no delimiter {given!r}; {remedy}")
            if len(fields) != len(columns or fields):
                counts = f"{len(fields)} fields by the delimiter {separator!r}, and {len(columns)} columns are given"
                raise DataError(f"{path}: the first line has {counts}; correct one of them")
            present = columns or fields
            parse = partial(parse_delimited, separator=separator, columns=present)
            if not columns:
                remedy += " or, if that is no header, give --columns (of --context, --context-header)"
        needed = [name for name in needed if name in present or name not in optional]
        own = _own_columns(path, present, needed, folders, options, remedy)
        from_folders = [name for name in needed if name not in own]
        constants = [pl.lit(folders[name], dtype=pl.String).alias(name) for name in from_folders]
        if file_format == PARQUET:
            num_rows = _scan(path).select(pl.len()).collect().item()
            begins = range(0, max(1, num_rows), _PIECE_ROWS)
            pieces = [Piece(begin, min(begin + _PIECE_ROWS, num_rows)) for begin in begins]
            blocks: Callable[[Types, Piece], Iterator[Rows]] = partial(_read_parquet, path, own, constants)
        else:
            num_rows, pieces = estimate_lines(path), text_pieces(path, log_bytes)
            has_header = file_format == TEXT and not columns
            blocks = partial(_read_text, path, partial(parse, names=own), constants, has_header)
        return Table(
            path=path,
            num_rows=num_rows,
            dtypes={name: schema.get(name, pl.String()) for name in [*own, *from_folders]},
            blocks=blocks,
            pieces=pieces,
            has_types=file_format == PARQUET,
            from_folders=from_folders,
            separator=separator,
            options=options,
        )


def _keys(line: str) -> frozenset[str]:
    """Return the keys of a line of JSON; none if it is no object."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(line), dict):
            return frozenset(value)
    return frozenset()


def _own_columns(
    path: Path, present: Sequence[str], needed: Collection[str], folders: _Folders, options: _Options, remedy: str
) -> list[str]:
    """Return the needed columns that a file has; the others are in the names of its folders."""
    own = [name for name in needed if name in present or name not in folders]
    for name in own:
        if name not in present:
            if name in partition_values(str(path)):
                remedy = f"a folder adds one only below the path that is given, or in a pattern such as {name}=*"
            raise DataError(f"{path} has no column {show_column(name, options)}; known: {', '.join(present)}; {remedy}")
        if present.count(name) > 1:
            raise DataError(f"{path} has {present.count(name)} columns {name!r}; rename all but one")
        if name == "*" or (name.startswith("^") and name.endswith("$")):  # patterns of Polars
            raise DataError(f"{path}: a column cannot be called {name!r}; rename it")
    if not own:
        raise DataError(f"{path}: all needed columns are in the names of its folders; one must be in the file")
    return own


def _scan(path: Path) -> pl.LazyFrame:
    return pl.scan_parquet(path, glob=False, hive_partitioning=False).cast(CASTS)


def _read_parquet(
    path: Path, names: Sequence[str], constants: Sequence[pl.Expr], numbers: Types, piece: Piece
) -> Iterator[Rows]:
    rows = _scan(path).select(names).slice(piece.begin, None if piece.end is None else piece.end - piece.begin)
    schema, first_row = rows.collect_schema(), 1
    values = (pl.struct(name).struct.json_encode() if schema[name].is_nested() else pl.col(name) for name in names)
    text = pl.concat_str(*(value.cast(pl.String, strict=False).fill_null("") for value in values), separator=",")

    def describe(frame: pl.DataFrame, places: pl.Series) -> pl.Series:
        return frame[places].select(text).to_series()

    rows = rows.with_columns(*constants, pl.lit(None, dtype=pl.String).alias(FAULT))
    for frame in rows.collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True):
        yield Rows(frame, first_row, partial(describe, frame))
        first_row += len(frame)


def _infer_separator(path: Path, line: str, names: Collection[str], num_columns: int) -> str:
    """Return the separator by which a header has all `names` or, if it is not 0, a line has `num_columns` fields."""
    divided = {separator: divide(line, separator)[0] for separator in _SEPARATORS}
    if num_columns:
        fitting = [separator for separator, fields in divided.items() if len(fields) == num_columns]
    else:
        fitting = [separator for separator, fields in divided.items() if set(names) <= set(fields)]
    if any(divided[separator] != divided[fitting[0]] for separator in fitting):
        raise DataError(f"{path}: the delimiter could be any of {fitting} by the first line, {line[:80]!r}; give it")
    return fitting[0] if fitting else max(_SEPARATORS, key=line.count)


def _read_text(
    path: Path, parse: _Parse, constants: Sequence[pl.Expr], has_header: bool, numbers: Types, piece: Piece
) -> Iterator[Rows]:
    """Yield the rows of each block; of compressed ones, while the next is parsed and the one after it is read."""

    def rows(block: Block) -> Rows:
        frame = parse(block, numbers)
        return Rows(frame.with_columns(constants) if constants else frame, block.first_line, block.texts)

    blocks = read_blocks(path, piece, has_header=has_header)
    if path.suffix.lower() not in CODECS:  # its pieces keep all cores busy
        yield from map(rows, blocks)
        return
    background = ThreadPoolExecutor(1)
    try:
        pending = list[Future[Rows]]()
        for block in blocks:
            pending.append(background.submit(rows, block))
            if len(pending) > 1:
                yield pending.pop(0).result()
        for last in pending:
            yield last.result()
    finally:
        background.shutdown(wait=False)  # an unfinished generator may be collected on that very thread


def _parse_json(block: Block, numbers: Types, *, names: Sequence[str]) -> pl.DataFrame:
    """Read one object per line, as text. Integers keep their digits; 1.50 becomes 1.5, and null stays null."""
    rows = None
    # Polars reads half a surrogate pair as NUL.
    if not block.has(b"\0") and not _SURROGATE.search(data := block.data.tobytes()):
        rows = _read_objects(data, block.num_lines, names)
    if rows is None or rows.select(pl.any_horizontal(pl.col(names).str.contains("[0-9]{16}").any())).item():
        lines = block.lines()
        if len(odd := lines.str.contains(_MAYBE_ODD).arg_true()) or rows is None:
            text = pl.lit(lines.scatter(odd, [_TEXT_OR_NUMBER.sub(_quote_if_odd, line) for line in lines[odd]]))
            # Another parser, which does not stop at an invalid line, leaves few of them to search for.
            is_likely = text.str.json_path_match("$").str.starts_with("{")
            rows = _read_each(pl.select(pl.when(is_likely).then(text).otherwise(pl.lit(""))).to_series(), names)
    return with_encoding_faults(block, names, rows)


def _quote_if_odd(found: re.Match[str]) -> str:
    """Return a text or number of a line of JSON, as text if it is no number of JSON, or too large for a float."""
    text = found[0]
    is_integer = text.lstrip("-").isdigit() and len(text) < 38  # which Polars reads
    if text[0] == '"' or is_integer or (text[-1].isdigit() and abs(float(text)) < 1 << 53):
        return text
    return '"' + re.sub(r"[eE]\+?", "e+", text) + '"'


def _read_objects(data: bytes, num_lines: int, names: Sequence[str]) -> pl.DataFrame | None:
    try:
        rows = pl.read_ndjson(data, schema=dict.fromkeys(names, pl.String()))
    except pl.exceptions.PolarsError:
        return None
    return rows if len(rows) == num_lines else None  # empty lines are skipped


def _read_each(lines: pl.Series, names: Sequence[str]) -> pl.DataFrame:
    """Read lines that are objects or empty; only few others."""
    text = lines.replace("", "{}").str.join("\n").item()
    if (rows := _read_objects(f"{text}\n".encode(), len(lines), names)) is not None:
        return rows.with_columns(pl.when(lines == "").then(pl.lit(_JSON_FAULT)).alias(FAULT))
    if len(lines) == 1:
        return _read_each(pl.Series([""]), names)
    half = len(lines) // 2
    return pl.concat([_read_each(lines[:half], names), _read_each(lines[half:], names)])
