"""Columns of files as ids and integers: which type the ids have, which values are missing, and which are exact.

Ids follow one rule in all formats: blanks around a text do not count, 7.0 is 7, and all other texts are different ids.
Texts that stand for null are missing, and floats that may have been rounded are faults.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import FLOAT_OR_MISSING, IdKind
from evenrank.preprocess.log_config import LogColumn
from evenrank.preprocess.read.table import FAULT, Dropped, Hint, Piece, Rows, Table, Types, show_column

INTEGERS: Mapping[IdKind, pl.DataType] = {"int64": pl.Int64(), "uint64": pl.UInt64()}
# Of types that text files do not have. A column without values, whose type is Null, has integers that are missing.
CASTS: Mapping[Any, pl.DataType] = {pl.Null: pl.Int64(), pl.Categorical: pl.String(), pl.Enum: pl.String()}
MISSING_TEXTS = ("", r"\N")  # the latter is null in exports of MySQL and Hive
_MISSING_IDS = (*MISSING_TEXTS, "nan", "NaN", "None", "NULL", "null", "<NA>", "N/A", "#N/A")
MISSING_NUMBERS = (*_MISSING_IDS, "-nan", "-NaN", "NAN", "NA")  # the last is null in R, and among texts may be Namibia
# "007", "+7" and "-0" are texts: as integers they would be the same ids as "7" and "0".
_PLAIN_INTEGER = "^(?:0|-?[1-9][0-9]*)$"
# With a point, or a plus: 4e18 may be hexadecimal.
_FLOAT = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]*(?:[eE]\+?[0-9]+)?|[eE]\+[0-9]+)$"
# Floats represent all integers of so many bits; from 2^bits on they are rounded.
_FLOAT_BITS = {"Float16": 11, "Float32": 24, "Float64": 53}
_SAMPLED_ROWS = 1000

Checked = tuple[pl.Expr, dict[str, pl.Expr]]  # a column, and its checks by the reason to report where they fail


def id_texts(texts: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Return texts of ids, equal ones for equal ids, and whether they may have been rounded: [n] all."""
    texts = texts.str.strip_chars()
    is_float = texts.str.contains(_FLOAT).fill_null(False)
    if not is_float.any():
        return texts, is_float
    number = texts.set(~is_float, None).cast(pl.Float64)
    # C and Excel, which drop digits, write a plus.
    is_rounded = (is_float & texts.str.contains("+", literal=True)) | (number.abs() >= 1 << _FLOAT_BITS["Float64"])
    integer = number.set(is_rounded | (number != number.floor()), None).cast(pl.Int64).cast(pl.String)
    return integer.zip_with(integer.is_not_null(), texts), is_rounded.fill_null(False)


def with_ids(table: Table, *columns: str) -> Table:
    """Return a table with `id_texts` in columns of text; those that may have been rounded are faults."""
    return replace(table, blocks=partial(_with_ids, table.blocks, columns))


def _with_ids(
    blocks: Callable[[Types, Piece], Iterable[Rows]], columns: Sequence[str], numbers: Types, piece: Piece
) -> Iterator[Rows]:
    for rows in blocks(numbers, piece):
        frame = rows.frame
        for column in (name for name in columns if frame.schema[name] == pl.String):
            texts, is_rounded = id_texts(frame.get_column(column))
            fault = pl.when(is_rounded).then(pl.lit(f"{column} may have been rounded by a float; write integers"))
            frame = frame.with_columns(texts.alias(column), pl.coalesce(FAULT, fault).alias(FAULT))
        yield rows._replace(frame=frame)


def id_kinds(
    tables: Sequence[Table], columns: Mapping[str, str], checks: Callable[[Table], Mapping[str, pl.Expr]]
) -> dict[str, IdKind]:
    """Return the types of the ids in columns of all files, by their names.

    Text without types is judged by its first rows that pass the checks.
    """
    kinds: dict[str, IdKind] = dict.fromkeys(columns, "int64")
    for table in tables:
        sample = None  # of all columns
        for name, column in columns.items():
            dtype = table.dtypes[column]
            if kinds[name] == "text":
                continue
            if dtype == pl.String and table.has_types:
                kinds[name] = "text"
            elif dtype == pl.String:
                sample = table.head(_SAMPLED_ROWS).filter(*checks(table).values()) if sample is None else sample
                if sample.get_column(column).null_count() == len(sample) > 0:  # in JSON lines, which name no columns
                    shown = show_column(column, table.options)
                    raise DataError(f"{table.path}: column {shown} is missing in the first rows; check its name")
                is_plain = [is_missing(table, column) | is_plain_integer(pl.col(column), kind) for kind in INTEGERS]
                is_int64, is_uint64 = sample.select(i=is_plain[0].all(), u=is_plain[1].all()).row(0)
                if not is_int64:
                    kinds[name] = "uint64" if is_uint64 else "text"
            elif not dtype.is_numeric():
                raise DataError(
                    f"{table.path}: column {column!r} of type {dtype} cannot hold ids; convert it to integers or texts"
                )
            elif dtype.is_unsigned_integer():
                kinds[name] = "uint64"
    return kinds


def raw_id(table: Table, column: str, kind: IdKind) -> pl.Expr:
    """Return an expression for an id as String, Int64 or UInt64; null where there is none of this kind."""
    dtype, text = table.dtypes[column], pl.col(column).cast(pl.String)
    if kind != "text":
        plain = pl.when(is_plain_integer(text, kind)).then(text).cast(INTEGERS[kind])
        return plain if dtype == pl.String else as_integer(table, column, kind)
    if dtype == pl.String:
        return pl.when(~is_missing(table, column, kind) & ~_has_bad_bytes(text)).then(text)
    return as_integer(table, column, "uint64" if dtype.is_unsigned_integer() else "int64").cast(pl.String)


def id_checks(table: Table, column: str, kind: IdKind, *, is_row: bool = False) -> dict[str, pl.Expr]:
    """Return the checks of ids by the reason to report where they fail; with `is_row`, ids are rows of a table."""
    dtype, checks = table.dtypes[column], {f"{column} is missing": ~is_missing(table, column, kind)}
    if dtype == pl.String:
        checks[f"{column} is not UTF-8"] = ~_has_bad_bytes(pl.col(column))
    ids, bits = raw_id(table, column, kind), integer_bits(dtype)
    if kind != "text" or dtype != pl.String:
        exact = f", where {dtype} is exact" if dtype.is_float() else ""
        is_unsigned = kind == "uint64" or (kind == "text" and dtype.is_unsigned_integer())
        limits = "0..2^64-1" if is_unsigned else f"-2^{bits}{'+1' * dtype.is_float()}..2^{bits}-1"
        checks[f"{column} is not an integer in {limits}{exact}"] = ids.is_not_null()
    if is_row:
        checks[f"{column} must not be negative"] = ids >= 0
    return checks


class TextIdsError(Exception):
    """Columns of ids that were taken for integers have others; the argument says where, by the name of the id."""


def check_kinds(table: Table, rows: pl.DataFrame, columns: Mapping[str, str], kinds: Mapping[str, IdKind]) -> None:
    """Raise a TextIdsError if columns of ids have others than integers of their kinds, in some rows of a table.

    `columns` are those of the file by the name of the id.
    """
    found = {}
    for name, column in columns.items():
        text = pl.col(column).cast(pl.String)
        if table.dtypes[column] in (pl.String, pl.UInt64):
            is_integer = is_plain_integer(text) | is_plain_integer(text, kinds[name])
            is_other = ~is_integer & ~is_missing(table, column) & ~_has_bad_bytes(text)
            for value in rows.select(text.filter(is_other).head(1)).to_series():
                found[name] = f"{table.path} has {value[:80]!r} in column {column!r}"
    if found:
        raise TextIdsError(found)


def as_integer(table: Table, column: str, kind: IdKind = "int64") -> pl.Expr:
    """Return an expression for text, numbers or booleans as integers; null where that would not be the exact value."""
    dtype, value = table.dtypes[column], pl.col(column)
    if not (dtype.is_numeric() or dtype in (pl.String, pl.Boolean)):
        raise DataError(f"{table.path}: column {column!r} of type {dtype} cannot hold integers; convert it to integers")
    if dtype.is_float() or dtype.is_decimal():  # pandas and data warehouses store integers with missing values so
        value = pl.when(value == value.floor()).then(value)
    if dtype.is_float():
        value = pl.when(value.abs() < 1 << integer_bits(dtype)).then(value)
    return value.cast(INTEGERS[kind], strict=False).alias(column)


def as_number(table: Table, column: str) -> pl.Expr:
    """Return an expression for text, numbers or booleans as Float64; null where that is not a finite number."""
    dtype = table.dtypes[column]
    if not (dtype.is_numeric() or dtype in (pl.String, pl.Boolean)):
        raise DataError(f"{table.path}: column {column!r} of type {dtype} cannot hold numbers; convert it to numbers")
    value = pl.col(column).cast(pl.Float64, strict=False)
    return pl.when(value.is_finite()).then(value).alias(column)


def number_hints(table: Table, column: str) -> dict[str, pl.Expr]:
    """Return the checks that tell why a text is no number."""
    if table.dtypes[column] != pl.String:
        return {}
    has_comma = pl.col(column).str.contains(r"^[+-]?[0-9.]*,[0-9]+$").fill_null(False)
    return {Hint(f"{column} has a decimal comma; write a decimal point"): ~has_comma}


def as_declared(table: Table, column: LogColumn, remedy: str = "") -> Checked:
    """Return a column of numbers as it is declared; `remedy` is that of integers which float32 would round."""
    (name, dtype, fill, _), missing, checks = column, is_missing(table, column.name), dict[str, pl.Expr]()
    if column.drops_missing:
        checks[Dropped(name)], fill = ~missing, 0
    if fill is None:
        typed = f"{name}:int" if dtype == "int64" else name
        reason = f"{name} is missing; declare a value instead, such as {typed}=0, {typed}=drop or {name}:float?"
        checks[reason] = ~missing
    checks |= number_hints(table, name)
    if dtype == "int64":
        value = pl.when(missing).then(pl.lit(fill, dtype=pl.Int64)).otherwise(as_integer(table, name)).alias(name)
        return value, checks | {f"{name} is not an integer in -2^63..2^63-1": value.is_not_null()}
    value = pl.when(missing).then(fill).otherwise(as_number(table, name)).cast(pl.Float32).alias(name)
    checks[f"{name} is not a finite float32"] = ~value.is_infinite()
    if table.dtypes[name] != pl.Float32:
        reason = f"{name} is 2^24 or more, where float32 rounds integers; {remedy or f'declare {name}:int'}"
        is_exact = value.abs() < 1 << _FLOAT_BITS["Float32"]
        checks[reason] = missing | is_exact if dtype == FLOAT_OR_MISSING else is_exact  # NaN is above all numbers
    return value, checks


def integer_bits(dtype: pl.DataType) -> int:
    """Return the number of bits of the integers from `as_integer`, besides their sign."""
    return _FLOAT_BITS.get(str(dtype), 63)


def is_plain_integer(text: pl.Expr, kind: IdKind = "int64") -> pl.Expr:
    """Return whether a text is an integer in decimal digits, without leading zeros, plus signs and -0."""
    return text.str.contains(_PLAIN_INTEGER) & text.cast(INTEGERS[kind], strict=False).is_not_null()


def is_missing(table: Table, column: str, kind: IdKind = "int64") -> pl.Expr:
    """Return whether a value is null, NaN, or a text that stands for null, as NA does unless ids are texts."""
    dtype, value = table.dtypes[column], pl.col(column)
    if dtype.is_float():
        return value.is_null() | value.is_nan()
    missing = _MISSING_IDS if kind == "text" else MISSING_NUMBERS
    return value.is_null() | value.is_in(missing) if dtype == pl.String else value.is_null()


def check_json_keys(tables: Sequence[Table], columns: Iterable[str]) -> None:
    """Raise a DataError if the rows of JSON lines, which name no columns, never have one of these keys."""
    if any(table.has_types or table.separator is not None for table in tables):
        return
    for column in columns:
        key = json.dumps(column, ensure_ascii=False)
        if any(column in table.from_folders for table in tables):
            continue
        texts = (rows.texts(pl.int_range(len(rows.frame), eager=True)) for table in tables for rows in table.read())
        if not any(of_rows.str.contains(key, literal=True).any() for of_rows in texts):
            shown = show_column(column, tables[-1].options)
            raise DataError(f"{tables[-1].path} has no column {shown} in any row; check its name")


def _has_bad_bytes(text: pl.Expr) -> pl.Expr:
    """Return whether text was not UTF-8. Such bytes were read as U+FFFD, which would merge different ids."""
    return text.str.contains("\ufffd", literal=True)
