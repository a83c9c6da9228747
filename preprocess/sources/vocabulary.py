"""Ids of users and items: numbers stay as they are, strings become 1..n by sorted value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError

TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)

# "007" and "1e3" are strings: as numbers they could not be told from "7" and "1000".
_PLAIN_NUMBER = "^[+-]?(?:0|[1-9][0-9]*)$"


@dataclass(frozen=True, kw_only=True, slots=True)
class IdCoder:
    """How the values of an id column become int64."""

    vocabulary: pl.DataFrame | None  # id int64 (1..n), value string, sorted by both; None: values are the ids

    def code(self, rows: pl.LazyFrame, column: str) -> pl.LazyFrame:
        """Replace `column` of what `raw_id` returns by int64 ids, null where there is none; the rows keep their order.

        A number that is plain text must have been checked by `is_plain_number` where it matters.
        """
        if self.vocabulary is None:
            return rows.with_columns(pl.col(column).cast(pl.Int64, strict=False))
        # A join is several times faster than `replace` or an Enum here.
        ids = self.vocabulary.lazy().select(pl.col("value").alias(column), pl.col("id").alias(f"id of {column}"))
        coded = rows.with_columns(pl.col(column).cast(pl.String)).join(
            ids, on=column, how="left", maintain_order="left"
        )
        return coded.with_columns(pl.col(f"id of {column}").alias(column)).drop(f"id of {column}")


def raw_id(column: str, dtype: pl.DataType) -> pl.Expr:
    """Return an id as string or int64, null where it is missing, a fraction, or not UTF-8.

    Raises:
        DataError: the column's type can hold no ids.

    """
    value = pl.col(column)
    if dtype.base_type() in TEXT_TYPES:
        text = value.cast(pl.String)
        return pl.when((text != "") & ~has_bad_bytes(text)).then(text).alias(column)
    if dtype.is_numeric():
        return whole_number(column, dtype)
    raise DataError(f"column {column!r} is of type {dtype}, which holds no ids; make it integers or strings")


def has_bad_bytes(text: pl.Expr) -> pl.Expr:
    """Return whether text was not UTF-8: such bytes were read as U+FFFD, and different ids would become one."""
    return text.str.contains("\ufffd", literal=True)


def whole_number(column: str, dtype: pl.DataType) -> pl.Expr:
    """Return a column of text, numbers or booleans as int64, null where it is not a whole number of 64 bits.

    Raises:
        DataError: the column is of another type.

    """
    if not (dtype.is_numeric() or dtype in (pl.String, pl.Boolean)):
        raise DataError(f"column {column!r} is of type {dtype}, which holds no whole numbers; make it integers")
    value = pl.col(column)
    if dtype.is_float() or dtype.is_decimal():  # what pandas and warehouses write for integers with gaps
        value = pl.when(value == value.floor()).then(value)
    return value.cast(pl.Int64, strict=False).alias(column)


def is_plain_number(text: pl.Expr) -> pl.Expr:
    """Return whether a string is an int64 in digits, perhaps with a sign, without leading zeros."""
    return text.str.contains(_PLAIN_NUMBER) & text.cast(pl.Int64, strict=False).is_not_null()


def survey_ids(files: Sequence[pl.LazyFrame]) -> dict[str, IdCoder]:
    """Decide from all rows of all files which columns of ids are numeric, and collect the values of the others.

    Args:
        files: each with the same columns, every one as `raw_id` returns it; only the rows that count.

    """
    strings: set[str] = set()
    for rows in files:
        texts = [name for name, dtype in rows.collect_schema().items() if dtype == pl.String]
        if texts:
            are_numbers = rows.select((pl.col(name).is_null() | is_plain_number(pl.col(name))).all() for name in texts)
            verdicts = are_numbers.collect(engine="streaming").row(0)
            strings.update(name for name, is_number in zip(texts, verdicts, strict=True) if not is_number)
    names = files[0].collect_schema().names()
    return {name: IdCoder(vocabulary=_vocabulary(files, name) if name in strings else None) for name in names}


def _vocabulary(files: Sequence[pl.LazyFrame], name: str) -> pl.DataFrame:
    unique = [rows.select(pl.col(name).cast(pl.String).alias("value")).unique() for rows in files]
    values = pl.concat(unique).unique().drop_nulls().collect(engine="streaming").get_column("value").sort()
    return pl.DataFrame([pl.int_range(1, len(values) + 1, eager=True).alias("id"), values])


def write_vocabularies(vocabularies: Mapping[str, pl.DataFrame], folder: Path) -> None:
    """Write `folder/vocabulary_NAME.parquet` for each, with columns id (int64) and value (string), ordered by id."""
    for name, vocabulary in vocabularies.items():
        vocabulary.write_parquet(folder / f"vocabulary_{name}.parquet")
