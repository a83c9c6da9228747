"""Computed columns: expressions over columns of a log, evaluated by Polars, as further columns of its tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.expressions import Arrays, fraction
from evenrank.datasets.schema import ACTION, FLOAT, TIMESTAMP_MS
from evenrank.preprocess.log_config import Computed, TabularConfig
from evenrank.preprocess.read.table import FAULT, Piece, Rows, Table, Types
from evenrank.preprocess.read.times import timestamp_ms
from evenrank.preprocess.read.values import Checked, as_integer, as_number, is_missing, is_plain_integer

_SAMPLED_ROWS = 1000
_INT, _FLOAT, _TEXT = pl.Int64(), pl.Float64(), pl.String()  # of the inputs of expressions


class _Columns(Arrays):
    """How an expression is evaluated on columns of Polars."""

    def known(self, condition: Any) -> Any:
        return _literal(condition).fill_null(False)

    def is_in(self, value: Any, members: tuple[Any, ...]) -> Any:
        return pl.any_horizontal(_literal(value) == member for member in members)

    def choose(self, condition: Any, then: Any, otherwise: Any) -> Any:
        return pl.when(condition).then(_literal(then)).otherwise(_literal(otherwise))

    def fraction(self, values: Any, salt: int) -> Any:
        return values.map_batches(partial(_fractions, salt), return_dtype=_FLOAT, is_elementwise=True)


def _literal(value: Any) -> pl.Expr:
    return value if isinstance(value, pl.Expr) else pl.lit(value)


def _fractions(salt: int, values: pl.Series) -> pl.Series:
    if values.dtype != _INT:
        raise pl.exceptions.InvalidOperationError(f"fraction is of integers, and {values.name} has {values.dtype}")
    return pl.Series(values.name, fraction(values.fill_null(0).to_numpy(), salt)).set(values.is_null(), None)


def with_computed(config: TabularConfig, tables: Sequence[Table]) -> tuple[list[Table], Types]:
    """Return tables with the computed columns, and the types of the columns that expressions need, in all files.

    Texts where numbers are needed are faults. Raises a ConfigError about an expression that does not fit its columns.
    """
    inputs, types = {name: _type_in(tables, name) for name in config.inputs}, dict[str, pl.DataType]()
    kinds = {name: "text" if dtype == _TEXT else "number" for name, dtype in inputs.items()}
    kinds |= {TIMESTAMP_MS: "number"} if config.timestamp_unit != "row" else {}
    row = pl.DataFrame(schema={**inputs, TIMESTAMP_MS: _INT}).clear(1)
    for column in config.computed:
        text = column.expression.text
        if column.expression.kind(kinds) == "text":
            raise ConfigError(f"{text!r} is text, where {column.name} needs a number; choose one by if and else")
        try:
            found = row.select(_evaluated(column, {name: pl.col(name) for name in row.columns})).dtypes[0]
        except pl.exceptions.PolarsError as error:
            raise ConfigError(f"{text!r} cannot be computed: {first_line(error)}; change it") from error
        types[column.name] = _FLOAT if found.is_float() else _INT
    if not types:
        return [*tables], {}
    blocks = partial(_blocks, config, inputs, types)
    return [replace(of, dtypes={**of.dtypes, **types}, blocks=partial(blocks, of)) for of in tables], inputs


def _blocks(
    config: TabularConfig, inputs: Types, types: Types, table: Table, numbers: Types, piece: Piece
) -> Iterator[Rows]:
    for rows in table.blocks(numbers, piece):
        typed, values, faults = replace(table, dtypes=rows.frame.schema), dict[str, pl.Expr](), []
        for name, dtype in inputs.items():
            as_type = as_integer if dtype == _INT else as_number
            values[name] = pl.col(name).cast(_TEXT) if dtype == _TEXT else as_type(typed, name)
            if dtype != rows.frame.schema[name] == _TEXT:
                reason = pl.lit(f"{name} is not a number, which --compute needs")
                faults.append(pl.when(values[name].is_null() & ~is_missing(typed, name)).then(reason))
        if config.timestamp_unit != "row":
            values[TIMESTAMP_MS] = timestamp_ms(typed, config.timestamp_column, config.timestamp_unit)
        computed = (_evaluated(column, values).cast(types[column.name]) for column in config.computed)
        frame = rows.frame.lazy().with_columns(*computed, pl.coalesce(FAULT, *faults).alias(FAULT)).collect()
        yield rows._replace(frame=frame)


def _evaluated(column: Computed, values: Mapping[str, pl.Expr]) -> pl.Expr:
    return _literal(column.expression(values, _Columns())).alias(column.name)


def _type_in(tables: Sequence[Table], name: str) -> pl.DataType:
    """Return the type of a column in expressions: text if it has texts in any file, as its first rows are."""
    found = set()
    for table in tables:
        dtype = table.dtypes[name]
        if dtype == pl.String and not table.has_types:
            texts = table.head(_SAMPLED_ROWS).filter(~is_missing(table, name)).get_column(name)
            are_integers = pl.select(is_plain_integer(pl.lit(texts)).all()).item()
            are_numbers = texts.cast(pl.Float64, strict=False).is_finite().fill_null(False).all()
            found.add(_INT if are_integers else _FLOAT if are_numbers else _TEXT)
        elif dtype == pl.String or dtype.is_numeric() or dtype == pl.Boolean:
            is_float = dtype.is_float() or dtype.is_decimal()
            found.add(_TEXT if dtype == pl.String else _FLOAT if is_float else _INT)
        else:
            raise DataError(f"{table.path}: column {name!r} of type {dtype} is no number or text; convert it")
    return next(dtype for dtype in (_TEXT, _FLOAT, _INT) if dtype in found)


def as_computed(column: Computed, dtype: pl.DataType) -> Checked:
    """Return a computed column, whose values have a type, as a column of events."""
    name, value = column.name, pl.col(column.name)
    reason = f"{name} has no value, as a column that it needs has none; compare that first: 'a if a >= 0 else 0'"
    number = value.cast(pl.Float32 if column.dtype == FLOAT else pl.Int64, strict=False)
    checks = {reason: value.is_not_null()}
    if column.dtype == FLOAT:
        checks[f"{name} is not a finite float32"] = number.is_finite()
    elif dtype.is_float():
        checks[f"{name} is not an integer; compute it with //, or declare {name}:float"] = value == number
    if name == ACTION:
        checks[f"{name} is not in 0..2^31-1"] = number.is_between(0, 2**31 - 1)
    return number, checks
