"""Logs in files of any layout -> interactions. Columns are found by name; all others are ignored."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType

import polars as pl

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import ACTION, EVENTS, ITEM_ID, TIMESTAMP_MS, USER_ID, Column, IdKind
from evenrank.preprocess.log_config import LogColumn, TabularConfig, parse_action_map, parse_column
from evenrank.preprocess.options import KEEP
from evenrank.preprocess.read.features import Interactions, read_features
from evenrank.preprocess.read.places import find_files, source_files
from evenrank.preprocess.read.table import FAULT, Dropped, EventPart, Events, Piece, Table
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.times import (
    MAX_TIMESTAMP_MS,
    PER_SECOND,
    UNITS,
    decide_unit,
    least_ms,
    time_hints,
    timestamp_ms,
)
from evenrank.preprocess.read.values import (
    as_float32,
    as_integer,
    as_number,
    check_json_keys,
    check_kinds,
    id_checks,
    id_kinds,
    integer_bits,
    is_missing,
    number_hints,
    raw_id,
    with_ids,
)

_MAX_ACTION = 2**31 - 1
_PER_STAR = {"stars": 1, "half-stars": 2}  # steps of the scale, which ends with 5 stars

Checked = tuple[pl.Expr, dict[str, pl.Expr]]  # a column, and its checks by the reason to report where they fail
Described = tuple[list[pl.Expr], dict[str, pl.Expr]]  # columns and their checks


def read_tabular(
    config: TabularConfig,
    rules: Mapping[str, str],
    known: Mapping[str, IdKind],
    first_ms: Mapping[str, int] = MappingProxyType({}),
) -> Interactions:
    """Open the files of a log, and encode the users' features.

    Args:
        config: the files and their columns.
        rules: of the ids of `user_id` and `item_id`; see `preprocess.build.vocabulary`.
        known: types of ids that the first rows do not decide. A TextIdsError tells, while events are read, of ids that
            are not of the type, known or not, unless only integers are kept.
        first_ms: least times by the reason to report of events that are earlier.
    """
    files, columns = find_files(config.events), {USER_ID: config.user_column, ITEM_ID: config.item_column}
    opener = partial(open_table, needed=config.needed_columns, separator=config.delimiter, columns=config.columns)
    tables = [with_ids(opener(path, folders=file.folders), *columns.values()) for path, file in files.items()]
    if config.timestamp_unit not in ("auto", "row"):
        dtype = tables[0].dtypes[config.timestamp_column]
        if all(table.dtypes[config.timestamp_column].is_temporal() for table in tables):
            column = f"{config.timestamp_column}, which is of type {dtype}"
            raise ConfigError(f"timestamp_unit {config.timestamp_unit!r} does not apply to {column}; leave it out")
    if config.timestamp_unit == "auto":
        config = replace(config, timestamp_unit=decide_unit(tables, config.timestamp_column))
    first_ms = {**first_ms, **least_ms(tables, config.timestamp_column, config.timestamp_unit)}
    check_json_keys(tables, [column.name for column in config.extra_columns if column[2:] != (None, False)])

    fixed: dict[str, IdKind] = {**known, **{name: "int64" for name in columns if rules[name] == KEEP}}
    judged = {name: column for name, column in columns.items() if name not in fixed}
    reading = _Rows(config=config, first_ms=first_ms, is_row=rules[ITEM_ID] == KEEP)
    found = id_kinds(tables, judged, lambda table: reading.values(table)[1])
    kinds = {name: fixed.get(name) or found[name] for name in columns}
    may_differ = [name for name in columns if kinds[name] != "text" and (name in known or rules[name] != KEEP)]
    guessed = {name: columns[name] for name in may_differ}
    reading = replace(reading, kinds=kinds, guessed=guessed)
    others = [file.path for file in config.feature_files.values()]
    names = [*((path, file.source) for path, file in files.items()), *((path, path.name) for path in others)]

    def part(table: Table) -> EventPart:
        reading.describe(table)  # which raises an error now if a type is unsuitable
        name, source, read = str(table.path), files[table.path].source, partial(reading.read, table)
        return EventPart(name=name, source=source, num_events=table.num_rows, read=read, pieces=table.pieces)

    return Interactions(
        parts=tuple(map(part, tables)),
        sources=partial(source_files, names),
        files=(*files, *others),
        context=read_features(config, USER_ID, kinds[USER_ID]),
        item_features=read_features(config, ITEM_ID, kinds[ITEM_ID]),
        has_item_table=config.item_features is not None and config.item_features_as == "table",
        num_actions=_num_actions(config),
        time_unit=config.timestamp_unit,
        events=(*EVENTS, *(Column(column.name, "event", column.dtype) for column in config.extra_columns)),
        options={
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "events": [path.name for path in config.events],
            "delimiter": next((table.separator for table in tables if table.separator is not None), None),
            "context": None if config.context is None else config.context.name,
            "item_features": None if config.item_features is None else config.item_features.name,
        },
        id_kinds=kinds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """How the rows of a log become events."""

    config: TabularConfig
    first_ms: Mapping[str, int]
    is_row: bool  # whether ids of items are rows of a table
    kinds: Mapping[str, IdKind] = field(default_factory=dict)  # of ids, once they are known
    guessed: Mapping[str, str] = field(default_factory=dict)  # columns of ids that may turn out to be of another kind
    valued: dict[object, Described] = field(default_factory=dict)  # by types: files are many, types few
    described: dict[object, Described] = field(default_factory=dict)

    def values(self, table: Table) -> Described:
        """Return all columns of events besides the ids, and their checks."""
        types = tuple(table.dtypes.items())
        if types not in self.valued:
            self.valued[types] = _values(self.config, table)
        return self.valued[types]

    def describe(self, table: Table) -> Described:
        """Return all columns of events, and their checks."""
        types = tuple(table.dtypes.items())
        if types not in self.described:
            config, columns = self.config, {USER_ID: self.config.user_column, ITEM_ID: self.config.item_column}
            values, checks = self.values(table)
            for name, column in columns.items():
                is_row = name == ITEM_ID and self.is_row
                checks = checks | id_checks(table, column, self.kinds[name], is_row=is_row)
            late = {f"{config.timestamp_column} {why}": values[1] >= least for why, least in self.first_ms.items()}
            ids = (raw_id(table, column, self.kinds[name]).alias(name) for name, column in columns.items())
            self.described[types] = [*ids, *values], checks | late
        return self.described[types]

    def read(self, table: Table, piece: Piece) -> Iterator[Events]:
        """Yield the events of a piece of a file."""
        for rows in table.read(_numbers(self.config, self.kinds), piece):
            typed = replace(table, dtypes=rows.frame.schema)
            events = rows.check(*self.describe(typed))
            if len(events.bad):
                passing = rows.frame.filter(pl.col(FAULT).is_null(), *self.values(typed)[1].values())
                check_kinds(typed, passing, self.guessed, self.kinds)
            yield events


def _numbers(config: TabularConfig, kinds: Mapping[str, IdKind]) -> dict[str, pl.DataType]:
    """Return the types of the columns that are probably numbers in plain digits, also if a file has text."""
    of_action = pl.Int64() if config.action_map == "" else pl.Float64()
    is_text = {config.user_column: kinds[USER_ID] == "text", config.item_column: kinds[ITEM_ID] == "text"}
    is_text[config.timestamp_column] = config.timestamp_unit not in PER_SECOND
    is_text |= dict.fromkeys(config.action_columns, config.action_map.startswith("values:"))
    numbers = {name: of_action if name in config.action_columns else pl.Int64() for name in config.needed_columns}
    numbers |= {column.name: pl.Float64() for column in config.extra_columns if column.dtype == "float32"}
    return {name: dtype for name, dtype in numbers.items() if not is_text.get(name)}


def _values(config: TabularConfig, table: Table) -> Described:
    """Return all columns of events besides the ids, and their checks."""
    action, checks = _action(config, table)
    time = pl.lit(0, dtype=pl.Int64)
    if config.timestamp_unit != "row":
        time = timestamp_ms(table, config.timestamp_column, config.timestamp_unit)
        reason = f"{config.timestamp_column} is not a time in {UNITS[config.timestamp_unit]} up to the year 9999"
        hints = time_hints(table, config.timestamp_column, config.timestamp_unit)
        checks = hints | {reason: time.is_between(0, MAX_TIMESTAMP_MS)} | checks
    columns = [action.cast(pl.Int32, strict=False).alias(ACTION), time.alias(TIMESTAMP_MS)]
    for extra in config.extra_columns:
        value, of_column = _event_column(table, extra)
        columns.append(value)
        checks |= of_column
        if config.weight and extra == parse_column(config.weight, is_feature=False):
            checks[f"{extra.name} is a negative weight"] = value >= 0
    return columns, checks


def _num_actions(config: TabularConfig) -> int | None:
    name, values = parse_action_map(config.action_map)
    of_map = {**{scale: 5 * steps for scale, steps in _PER_STAR.items()}, "bins": len(values) + 1, "float": 1}
    if len(config.action_columns) != 1:
        return 1 << len(config.action_columns)
    return of_map.get(name, len(values) or None)


def _action(config: TabularConfig, table: Table) -> Checked:
    action_map, values = parse_action_map(config.action_map)
    if not config.action_columns or action_map == "float":
        return pl.lit(0), {}
    if len(config.action_columns) > 1:
        flags = [_flag(table, name) for name in config.action_columns]
        bits = pl.sum_horizontal(flag * (1 << bit) for bit, flag in enumerate(flags))
        names = zip(config.action_columns, flags, strict=True)
        return bits, {f"{name} is not 0 or 1": flag.is_between(0, 1) for name, flag in names}
    (name,) = config.action_columns
    if action_map == "values":
        position = dict(zip(values, range(len(values)), strict=True))
        action = pl.col(name).cast(pl.String).replace_strict(position, default=None, return_dtype=pl.Int64)
        return action, {f"{name} is not one of {', '.join(values)}": action.is_not_null()}
    hints = number_hints(table, name)
    if action_map == "bins":
        number = as_number(table, name)
        checks = hints | {f"{name} is not a number": number.is_not_null()}
        return pl.sum_horizontal(number >= limit for limit in values), checks
    if action_map:
        steps = as_number(table, name) * _PER_STAR[action_map]
        lowest = 1 / _PER_STAR[action_map]
        reason = f"{name} is not on the scale {lowest:g} to 5 in steps of {lowest:g}"
        return steps - 1, hints | {reason: (steps == steps.round()) & steps.is_between(1, 5 * _PER_STAR[action_map])}
    action, largest = as_integer(table, name), min(_MAX_ACTION, 2 ** integer_bits(table.dtypes[name]) - 1)
    return action, hints | {f"{name} is not an integer in 0..{largest}": action.is_between(0, largest)}


def _flag(table: Table, name: str) -> pl.Expr:
    if table.dtypes[name] != pl.String:
        return as_integer(table, name)
    values = {"0": 0, "1": 1, "false": 0, "true": 1}
    return pl.col(name).str.to_lowercase().replace_strict(values, default=None, return_dtype=pl.Int64)


def _event_column(table: Table, column: LogColumn) -> Checked:
    name, is_float, checks = column.name, column.dtype == "float32", dict[str, pl.Expr]()
    typed, fill = name if is_float else f"{name}:int", 0 if column.drops_missing else column.fill
    if fill is None:
        reason = f"{name} is missing; declare a value instead, such as {typed}=0, or {typed}=drop"
        checks[reason] = ~is_missing(table, name)
    if column.drops_missing:
        checks[Dropped(name)] = ~is_missing(table, name)
    if is_float:
        value, of_number = as_float32(table, name, fill, f"declare {name}:int")
        return value, checks | of_number
    missing, number = pl.lit(fill, dtype=pl.Int64), as_integer(table, name)
    value = pl.when(is_missing(table, name)).then(missing).otherwise(number).alias(name)
    hints = number_hints(table, name)
    return value, checks | hints | {f"{name} is not an integer in -2^63..2^63-1": value.is_not_null()}
