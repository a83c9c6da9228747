"""Computed columns: expressions over columns of a log, evaluated by Polars, as further columns of its tables."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
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


class _Series(Arrays):
    """How an expression is evaluated on columns of Polars."""

    def known(self, condition: Any) -> Any:
        return _literal(condition).fill_null(False)

    def is_in(self, value: Any, members: tuple[Any, ...]) -> Any:
        return _literal(value).is_in(list(members))

    def choose(self, condition: Any, then: Any, otherwise: Any) -> Any:
        return pl.when(condition).then(_literal(then)).otherwise(_literal(otherwise))

    def fraction(self, values: Any, salt: int) -> Any:
        hashed = values.fill_null(0).map_batches(partial(_fractions, salt), return_dtype=_FLOAT, is_elementwise=True)
        return pl.when(values.is_not_null()).then(hashed)


def _literal(value: Any) -> pl.Expr:
    return value if isinstance(value, pl.Expr) else pl.lit(value)


def _fractions(salt: int, values: pl.Series) -> pl.Series:
    if values.dtype != _INT:
        raise pl.exceptions.InvalidOperationError(f"fraction is of integers, and {values.name} has {values.dtype}")
    return pl.Series(values.name, fraction(values.to_numpy(), salt))


@dataclass(frozen=True, slots=True)
class ComputedColumns:
    """The computed columns of a log, the types of their values, and of the columns that they need, in all files."""

    config: TabularConfig  # whose unit of times is known
    inputs: Types
    types: Types

    @staticmethod
    def of(config: TabularConfig, tables: Sequence[Table]) -> "ComputedColumns":
        """Check the expressions of a log; raises a ConfigError about one that does not fit its columns."""
        inputs, types = {name: _type_in(tables, name) for name in config.inputs}, {}
        empty = pl.DataFrame(schema={**inputs, TIMESTAMP_MS: _INT}).clear(1)
        kinds = {name: "text" if dtype == _TEXT else "number" for name, dtype in inputs.items()}
        kinds |= {TIMESTAMP_MS: "number"} if config.timestamp_unit != "row" else {}
        for column in config.computed:
            text = column.expression.text
            if column.expression.kind(kinds) == "text":
                raise ConfigError(f"{text!r} is text, where {column.name} needs a number; choose one by if and else")
            try:
                found = empty.select(_evaluated(column, {name: pl.col(name) for name in empty.columns})).dtypes[0]
            except pl.exceptions.PolarsError as error:
                raise ConfigError(f"{text!r} cannot be computed: {first_line(error)}; change it") from error
            types[column.name] = _FLOAT if found.is_float() else _INT
        return ComputedColumns(config, inputs, types)

    def added_to(self, table: Table) -> Table:
        """Return a table with the computed columns; texts where numbers are needed are faults."""
        blocks = partial(self._blocks, table, table.blocks)
        return replace(table, dtypes={**table.dtypes, **self.types}, blocks=blocks) if self.types else table

    def _blocks(
        self, table: Table, blocks: Callable[[Types, Piece], Iterable[Rows]], numbers: Types, piece: Piece
    ) -> Iterator[Rows]:
        for rows in blocks(numbers, piece):
            typed = replace(table, dtypes=rows.frame.schema)
            values: dict[str, pl.Expr] = {name: _input(typed, name, dtype) for name, dtype in self.inputs.items()}
            faults = [
                pl.when(values[name].is_null() & ~is_missing(typed, name)).then(
                    pl.lit(f"{name} is not a number, which --compute needs")
                )
                for name, dtype in self.inputs.items()
                if dtype != _TEXT and rows.frame.schema[name] == _TEXT
            ]
            if self.config.timestamp_unit != "row":
                time = timestamp_ms(typed, self.config.timestamp_column, self.config.timestamp_unit)
                values[TIMESTAMP_MS] = time
            computed = (_evaluated(column, values).cast(self.types[column.name]) for column in self.config.computed)
            frame = rows.frame.lazy().with_columns(*computed, pl.coalesce(FAULT, *faults).alias(FAULT)).collect()
            yield rows._replace(frame=frame)


def _evaluated(column: Computed, values: Mapping[str, pl.Expr]) -> pl.Expr:
    return _literal(column.expression(values, _Series())).alias(column.name)


def _type_in(tables: Sequence[Table], name: str) -> Any:
    """Return the type of a column in expressions: text if it has texts in any file, as its first rows are."""
    found = set()
    for table in tables:
        dtype = table.dtypes[name]
        if dtype == pl.String and not table.has_types:
            texts = table.head(_SAMPLED_ROWS).filter(~is_missing(table, name)).get_column(name)
            are_integers = pl.select(is_plain_integer(pl.lit(texts)).all()).item()
            are_numbers = texts.cast(pl.Float64, strict=False).is_finite().fill_null(False).all()
            found.add(_INT if are_integers else _FLOAT if are_numbers else _TEXT)
        elif dtype == pl.String:
            found.add(_TEXT)
        elif dtype.is_numeric() or dtype == pl.Boolean:
            found.add(_FLOAT if dtype.is_float() or dtype.is_decimal() else _INT)
        else:
            raise DataError(
                f"{table.path}: column {name!r} of type {dtype} cannot be computed with; convert it to numbers or text"
            )
    return next(dtype for dtype in (_TEXT, _FLOAT, _INT) if dtype in found)


def _input(table: Table, name: str, dtype: pl.DataType) -> pl.Expr:
    if dtype == _TEXT:
        return pl.col(name).cast(pl.String)
    return as_integer(table, name) if dtype == _INT else as_number(table, name)


def as_computed(column: Computed, dtype: pl.DataType) -> Checked:
    """Return a computed column, whose values have a type, as a column of events."""
    name, value = column.name, pl.col(column.name)
    reason = f"{name} has no value, as a column that it needs has none; compare that first: 'a if a >= 0 else 0'"
    checks = {reason: value.is_not_null()}
    if column.dtype == FLOAT:
        number = value.cast(pl.Float32, strict=False)
        return number, checks | {f"{name} is not a finite float32": number.is_finite()}
    integer = value.cast(pl.Int64, strict=False)
    if dtype.is_float():
        checks[f"{name} is not an integer; compute it with //, or declare {name}:float"] = value == integer
    if name == ACTION:
        checks[f"{name} is not in 0..2^31-1"] = integer.is_between(0, int(np.iinfo(np.int32).max))
    return integer, checks
