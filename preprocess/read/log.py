"""Logs in files of any layout -> interactions. Columns are found by name; all others are ignored."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import polars as pl

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import ACTION, EVENTS, ITEM_ID, TIMESTAMP_MS, USER_ID, IdKind, event_column
from evenrank.preprocess.log_config import KEEP, TabularConfig, parse_action_map, parse_column
from evenrank.preprocess.read.computed import as_computed, with_computed
from evenrank.preprocess.read.features import Interactions, read_features
from evenrank.preprocess.read.places import find_files, source_files
from evenrank.preprocess.read.table import FAULT, EventPart, Events, Piece, Table, Types
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.times import PER_SECOND, as_time, decide_unit, least_ms
from evenrank.preprocess.read.values import (
    Checked,
    as_declared,
    as_integer,
    as_number,
    check_json_keys,
    check_kinds,
    id_checks,
    id_kinds,
    integer_bits,
    number_hints,
    raw_id,
    with_ids,
)
from evenrank.preprocess.read.vectors import read_vectors

_MAX_ACTION = 2**31 - 1
_PER_STAR = {"stars": 1, "half-stars": 2}  # steps of the scale, which ends with 5 stars


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
    opener = partial(
        open_table,
        needed=dict.fromkeys((*config.needed_columns, *config.inputs)),
        separator=config.delimiter,
        columns=config.columns,
        options=config.options_of_columns,
        log_bytes=sum(path.stat().st_size for path in files),
    )
    tables = [with_ids(opener(path, folders=file.folders), *columns.values()) for path, file in files.items()]
    if config.timestamp_unit == "auto":
        config = replace(config, timestamp_unit=decide_unit(tables, config.timestamp_column))
    elif config.timestamp_unit != "row":
        types = [table.dtypes[config.timestamp_column] for table in tables]
        if all(dtype.is_temporal() for dtype in types):
            column = f"{config.timestamp_column}, which is of type {types[0]}"
            raise ConfigError(f"timestamp_unit {config.timestamp_unit!r} does not apply to {column}; leave it out")
    first_ms = {**first_ms, **least_ms(tables, config.timestamp_column, config.timestamp_unit)}
    may_lack = [column.name for column in config.given_columns if column[2:] != (None, False)]
    check_json_keys(tables, dict.fromkeys((*may_lack, *config.inputs)))
    tables, inputs = with_computed(config, tables)

    fixed: dict[str, IdKind] = {**known, **{name: "int64" for name in columns if rules[name] == KEEP}}
    judged = {name: column for name, column in columns.items() if name not in fixed}
    reading = _Rows(config=config, ids=columns, first_ms=first_ms, is_row=rules[ITEM_ID] == KEEP, inputs=inputs)
    found = id_kinds(tables, judged, lambda table: reading.describe(table).of_values)
    kinds = {name: fixed.get(name) or found[name] for name in columns}
    may_differ = [name for name in columns if kinds[name] != "text" and (name in known or rules[name] != KEEP)]
    guessed = {name: columns[name] for name in may_differ}
    reading = replace(reading, kinds=kinds, guessed=guessed, described={})
    vectors = {name: read_vectors(*given, name, kinds[name]) for name, given in config.vector_files.items()}
    others = [path for files_of in config.feature_files.values() for path in files_of.paths]
    others += [path for of in vectors.values() for path in of.files]
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
        vectors=vectors,
        has_item_table=bool(config.item_features) and config.item_features_as == "table",
        num_actions=_num_actions(config),
        time_unit=config.timestamp_unit,
        events=(*EVENTS, *(event_column(column.name, column.dtype) for column in config.extra_columns)),
        options={
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "events": [path.name for path in config.events],
            "delimiter": next((table.separator for table in tables if table.separator is not None), None),
            "context": None if config.context is None else config.context.name,
            "item_features": [path.name for path in config.item_features],
            "item_vectors": config.item_vectors and config.item_vectors.name,
            "user_vectors": config.user_vectors and config.user_vectors.name,
        },
        id_kinds=kinds,
    )


class _Described(NamedTuple):
    columns: list[pl.Expr]
    checks: dict[str, pl.Expr]
    of_values: dict[str, pl.Expr]  # the checks of all columns but ids


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """How the rows of a log become events."""

    config: TabularConfig
    ids: Mapping[str, str]  # columns
    first_ms: Mapping[str, int]
    is_row: bool  # whether ids of items are rows of a table
    inputs: Types  # of columns that expressions need
    kinds: Mapping[str, IdKind] = field(default_factory=dict)  # of ids, once they are known
    guessed: Mapping[str, str] = field(default_factory=dict)  # columns of ids that may turn out to be of another kind
    described: dict[object, _Described] = field(default_factory=dict)  # by types: files are many, types few

    def describe(self, table: Table) -> _Described:
        """Return the columns of events and their checks, without ids as long as their kinds are not known."""
        types = tuple(table.dtypes.items())
        if types in self.described:
            return self.described[types]
        config, time, of_time = self.config, pl.lit(0, dtype=pl.Int64).alias(TIMESTAMP_MS), dict[str, pl.Expr]()
        if config.timestamp_unit != "row":
            time, of_time = as_time(table, config.timestamp_column, config.timestamp_unit)
        action, of_action = _action(config, table)
        columns, of_values = {ACTION: action, TIMESTAMP_MS: time}, of_time | of_action
        for given in config.given_columns:
            columns[given.name], of_column = as_declared(table, given)
            of_values |= of_column
        for computed in config.computed:
            columns[computed.name], of_column = as_computed(computed, table.dtypes[computed.name])
            of_values |= of_column
        if config.weight:
            name = parse_column(config.weight, is_feature=False).name
            of_values[f"{name} is a negative weight"] = columns[name] >= 0
        columns[ACTION] = columns[ACTION].cast(pl.Int32, strict=False)
        values = [column.alias(name) for name, column in columns.items()]
        ids, checks = [], of_values
        for name, kind in self.kinds.items():
            ids.append(raw_id(table, self.ids[name], kind).alias(name))
            checks = checks | id_checks(table, self.ids[name], kind, is_row=name == ITEM_ID and self.is_row)
        late = {f"{config.timestamp_column} {why}": time >= least for why, least in self.first_ms.items()}
        self.described[types] = _Described([*ids, *values], checks | late, of_values)
        return self.described[types]

    def read(self, table: Table, piece: Piece) -> Iterator[Events]:
        """Yield the events of a piece of a file."""
        for rows in table.read(_numbers(self.config, self.kinds, self.inputs), piece):
            typed = replace(table, dtypes=rows.frame.schema)
            columns, checks, of_values = self.describe(typed)
            events = rows.check(columns, checks)
            if len(events.bad):
                passing = rows.frame.filter(pl.col(FAULT).is_null(), *of_values.values())
                check_kinds(typed, passing, self.guessed, self.kinds)
            yield events


def _numbers(config: TabularConfig, kinds: Mapping[str, IdKind], inputs: Types) -> Types:
    """Return the types of the columns that are probably numbers in plain digits, also if a file has text."""
    of_action = pl.Int64() if config.action_map == "" else pl.Float64()
    is_text = {config.user_column: kinds[USER_ID] == "text", config.item_column: kinds[ITEM_ID] == "text"}
    is_text[config.timestamp_column] = config.timestamp_unit not in PER_SECOND
    is_text |= dict.fromkeys(config.action_columns, config.action_map.startswith("values:"))
    is_text |= {name: True for name, dtype in inputs.items() if dtype == pl.String()}
    numbers = dict(inputs)
    numbers |= {name: of_action if name in config.action_columns else pl.Int64() for name in config.needed_columns}
    numbers |= {column.name: pl.Float64() for column in config.given_columns if column.dtype != "int64"}
    return {name: dtype for name, dtype in numbers.items() if not is_text.get(name)}


def _num_actions(config: TabularConfig) -> int | None:
    name, values = parse_action_map(config.action_map)
    of_map = {**{scale: 5 * steps for scale, steps in _PER_STAR.items()}, "bins": len(values) + 1, "float": 1}
    if any(column.name == ACTION for column in config.computed):
        return None
    if len(config.action_columns) != 1:
        return 1 << len(config.action_columns)
    return of_map.get(name, len(values) or None)


def _action(config: TabularConfig, table: Table) -> Checked:
    action_map, values = parse_action_map(config.action_map)
    if not config.action_columns or action_map == "float":
        return pl.lit(0), {}
    if len(config.action_columns) > 1:
        flags = {name: _flag(table, name) for name in config.action_columns}
        bits = pl.sum_horizontal(flag * (1 << bit) for bit, flag in enumerate(flags.values()))
        return bits, {f"{name} is not 0 or 1": flag.is_between(0, 1) for name, flag in flags.items()}
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
    reason = f"{name} is not an integer in 0..{largest} (ratings and words need --action-map)"
    return action, hints | {reason: action.is_between(0, largest)}


def _flag(table: Table, name: str) -> pl.Expr:
    if table.dtypes[name] != pl.String:
        return as_integer(table, name)
    values = {"0": 0, "1": 1, "false": 0, "true": 1}
    return pl.col(name).str.to_lowercase().replace_strict(values, default=None, return_dtype=pl.Int64)
