"""Ids of users and items: integers are kept, strings are encoded as 1..n by sorted value."""

from collections.abc import Sequence

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.sources.interactions import Table

TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)
# "007", "+7" and "-0" are strings: as integers they would be the same ids as "7" and "0".
_PLAIN_INTEGER = "^(?:0|-?[1-9][0-9]*)$"
# Floats represent all integers of so many bits; from 2^bits on they are rounded.
_FLOAT_BITS = {"Float16": 11, "Float32": 24, "Float64": 53}


def encode_ids(rows: pl.LazyFrame, column: str, vocabulary: pl.DataFrame | None) -> pl.LazyFrame:
    """Replace `column`, as returned by `raw_id`, by int64 ids, null where there is none; keep the order of rows.

    Without a vocabulary, any text that parses as an integer becomes an id, even "007".
    """
    if vocabulary is None:
        return rows.with_columns(pl.col(column).cast(pl.Int64, strict=False))
    # A join is several times faster than `replace` or an Enum here.
    ids = vocabulary.lazy().select(pl.col("value").alias(column), pl.col("id").alias(f"id of {column}"))
    encoded = rows.with_columns(pl.col(column).cast(pl.String)).join(ids, on=column, how="left", maintain_order="left")
    return encoded.with_columns(pl.col(f"id of {column}").alias(column)).drop(f"id of {column}")


def raw_id(table: Table, column: str) -> pl.Expr:
    """Return an expression for an id as string or int64, null where it is missing, a fraction, or not UTF-8."""
    dtype = table.dtypes[column]
    if dtype.base_type() in TEXT_TYPES:
        text = pl.col(column).cast(pl.String)
        return pl.when((text != "") & ~has_bad_bytes(text)).then(text).alias(column)
    if dtype.is_numeric():
        return as_integer(table, column)
    raise DataError(
        f"{table.path}: column {column!r} of type {dtype} cannot hold ids; convert it to integers or strings"
    )


def has_bad_bytes(text: pl.Expr) -> pl.Expr:
    """Return whether text was not UTF-8. Such bytes were read as U+FFFD, which would merge different ids."""
    return text.str.contains("\ufffd", literal=True)


def as_integer(table: Table, column: str) -> pl.Expr:
    """Return an expression for text, numbers or booleans as int64; null where that would not be the exact value."""
    dtype, value = table.dtypes[column], pl.col(column)
    if not (dtype.is_numeric() or dtype in (pl.String, pl.Boolean)):
        raise DataError(f"{table.path}: column {column!r} of type {dtype} cannot hold integers; convert it to integers")
    if dtype.is_float() or dtype.is_decimal():  # pandas and data warehouses store integers with missing values so
        value = pl.when(value == value.floor()).then(value)
    if dtype.is_float():
        value = pl.when(value.abs() < 1 << integer_bits(dtype)).then(value)
    return value.cast(pl.Int64, strict=False).alias(column)


def integer_bits(dtype: pl.DataType) -> int:
    """Return the number of bits of the integers from `as_integer`, besides their sign."""
    return _FLOAT_BITS.get(str(dtype), 63)


def is_plain_integer(text: pl.Expr) -> pl.Expr:
    """Return whether a string is an int64 in decimal digits, without leading zeros, plus signs and -0."""
    return text.str.contains(_PLAIN_INTEGER) & text.cast(pl.Int64, strict=False).is_not_null()


def build_vocabularies(files: Sequence[pl.LazyFrame]) -> dict[str, pl.DataFrame | None]:
    """Decide from all rows of all files which id columns are integers, and build the vocabularies of the others.

    Args:
        files: the same id columns of each file, as returned by `raw_id`, in the rows without other faults.

    Returns:
        Per column, id (int64, 1..n) and value (string), sorted by both; None if the values are the ids.
    """
    string_columns: set[str] = set()
    for rows in files:
        candidates = [name for name, dtype in rows.collect_schema().items() if dtype == pl.String]
        if candidates:
            are_integers = (
                rows.select((pl.col(name).is_null() | is_plain_integer(pl.col(name))).all() for name in candidates)
                .collect(engine="streaming")
                .row(0)
            )
            string_columns.update(name for name, is_int in zip(candidates, are_integers, strict=True) if not is_int)
    names = files[0].collect_schema().names()
    vocabularies: dict[str, pl.DataFrame | None] = dict.fromkeys(names)
    for name in string_columns:
        unique = [rows.select(pl.col(name).cast(pl.String).alias("value")).unique() for rows in files]
        values = pl.concat(unique).unique().drop_nulls().collect(engine="streaming").get_column("value").sort()
        vocabularies[name] = pl.DataFrame([pl.int_range(1, len(values) + 1, eager=True).alias("id"), values])
    return vocabularies
