"""Custom logs in any files -> interactions. Columns are found by name; all others are ignored."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import polars as pl

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import open_regular
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, IdKind, check_new_names
from evenrank.preprocess.build.ids import KEEP
from evenrank.preprocess.build.key_table import keys_of
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.interactions import (
    MAX_TIMESTAMP_MS,
    Context,
    EventPart,
    Interactions,
    Table,
    TimestampUnit,
    encode_context,
)
from evenrank.preprocess.sources.locate import find_files
from evenrank.preprocess.sources.raw_values import (
    TEXT_TYPES,
    as_integer,
    find_texts,
    id_checks,
    id_kind,
    integer_bits,
    is_plain_integer,
    raw_id,
)
from evenrank.preprocess.sources.tabular import open_table
from evenrank.preprocess.sources.times import UNITS, decide_unit, timestamp_ms

_DELIMITER = r'([^\x80-\U0010ffff0-9A-Za-z".+\-\r\n\0])\1*'
_MAX_FLAGS = 31  # the bits of a non-negative int32


@dataclass(frozen=True, kw_only=True, slots=True)
class TabularConfig:
    """The files of a custom dataset and the names of their columns. The suffix of a file determines its format."""

    events: tuple[Path, ...]
    """Files, patterns such as `logs/*.csv.gz`, or folders, whose files are read in sorted order: delimited text (.csv,
    .tsv, .txt, .dat), JSON lines (.json, .jsonl, .ndjson), each also with .gz, .zst or .bz2, or .parquet. A folder
    `day=1` adds a column `day`."""
    user_column: str
    """Column of user ids: integers or strings."""
    item_column: str
    """Column of item ids: integers or strings."""
    timestamp_column: str
    """Column of event times."""
    timestamp_unit: TimestampUnit = "auto"
    """Unit of numeric times, counted from 1970: `s`, `ms`, `us` or `ns`; `iso` for ISO 8601 text, in UTC unless it has
    an offset; `date` for 2015-01-06 or 20150106; `auto`: as the first values look. Parquet's date and time types need
    no unit."""
    action_columns: tuple[str, ...] = ()
    """None: every action is 0. One: the action. Several: columns of 0 and 1, bits of the action, lowest bit first."""
    delimiter: str | None = None
    """Separator of the fields of delimited events, one character or one character repeated; None: found by the first
    line among comma, tab, semicolon, `|` and `::`."""
    columns: tuple[str, ...] = ()
    """Names of all columns of delimited events without a header; empty: the first line has them."""
    context: Path | None = None
    """File with the users' features: `user_column` and `context_columns`, one row per user."""
    context_columns: tuple[str, ...] = ()
    """Columns of `context` that are contextual features."""

    def __post_init__(self) -> None:
        if not self.events:
            raise ConfigError("events is empty; give at least one file")
        if self.timestamp_unit not in get_args(TimestampUnit):
            units = ", ".join(get_args(TimestampUnit))
            raise ConfigError(f"timestamp_unit must be one of {units}, got {self.timestamp_unit!r}")
        if len(self.action_columns) > _MAX_FLAGS:
            raise ConfigError(f"action_columns may have at most {_MAX_FLAGS} columns, got {len(self.action_columns)}")
        if (self.context is None) != (not self.context_columns):
            raise ConfigError("context and context_columns go together; give both or none")
        if self.delimiter is not None and not re.fullmatch(_DELIMITER, self.delimiter):
            raise ConfigError(f"delimiter must be a punctuation mark or a tab, or one repeated, got {self.delimiter!r}")
        for names in (self.event_columns, (self.user_column, *self.context_columns)):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"column {twice[0]!r} is given twice; use each column for one purpose")
        check_new_names(self.context_columns)

    @property
    def event_columns(self) -> tuple[str, ...]:
        """The columns to read from the event files."""
        return (self.user_column, self.item_column, self.timestamp_column, *self.action_columns)


def read_toml(path: Path, **options: Any) -> TabularConfig:
    """Read a configuration from a TOML file whose keys are the names of the fields; paths are relative to the file.

    Further fields, `options`, come from the command line.
    """
    with open_regular(path) as file:
        try:
            raw = tomllib.load(file)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not valid TOML ({first_line(error)}); fix it") from error
    known = {field.name: field.default is MISSING for field in fields(TabularConfig)}
    if unknown := sorted(raw.keys() - known):
        raise ConfigError(f"{path} has an unknown key {unknown[0]!r}; known: {', '.join(known)}")
    if twice := [name for name in options if name in raw]:
        raise ConfigError(f"--{twice[0].replace('_', '-')} is also in {path} ({twice[0]}); give it once")
    values = dict(options)
    for key, value in raw.items():
        is_list = key in ("events", "action_columns", "columns", "context_columns")
        items = value if is_list and isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{path}: {key} must be a string{' or a list of strings' * is_list}, got {value!r}")
        if key in ("events", "context"):
            items = [path.parent / name for name in items]
        values[key] = tuple(items) if is_list else items[0]
    if missing := [name for name, is_required in known.items() if is_required and name not in values]:
        raise ConfigError(f"{path} lacks {missing[0]}; add it")
    return TabularConfig(**values)


_MAX_ACTION = 2**31 - 1


def read_tabular(config: TabularConfig, rules: Mapping[str, str], text_ids: frozenset[str]) -> Interactions:
    """Open the files of a custom log, and encode the users' features.

    Args:
        config: the files and their columns.
        rules: of the ids of `user_id` and `item_id`; see `preprocess.build.ids`.
        text_ids: those of the two that are text even if they begin with integers.
    """
    files = find_files(config.events)
    tables = [
        open_table(path, config.event_columns, separator=config.delimiter, columns=config.columns) for path in files
    ]
    if config.timestamp_unit == "auto":
        config = replace(config, timestamp_unit=decide_unit(tables, config.timestamp_column))
    columns = {USER_ID: config.user_column, ITEM_ID: config.item_column}
    kinds: dict[str, IdKind] = {
        name: "int64" if rules[name] == KEEP else "text" if name in text_ids else id_kind(tables, column)
        for name, column in columns.items()
    }
    context = None if config.context is None else _read_context(config, config.context, kinds[USER_ID])
    folder = Path(os.path.commonpath([path.absolute().parent for path in files]))

    def part(table: Table) -> EventPart:
        ids = [raw_id(table, column, kinds[name]).alias(name) for name, column in columns.items()]
        action, time = _action(config, table), timestamp_ms(table, config.timestamp_column, config.timestamp_unit)
        value_checks = _value_checks(config, table)
        checks = value_checks.copy()
        for name, column in columns.items():
            checks |= id_checks(table, column, kinds[name], is_row=name == ITEM_ID and rules[name] == KEEP)
        guessed = {name: column for name, column in columns.items() if kinds[name] == "int64" and rules[name] != KEEP}
        events = table.part([*ids, action.alias(ACTION), time.alias(TIMESTAMP_MS)], checks)
        return replace(events, find_texts=lambda: find_texts(table, guessed, value_checks))

    return Interactions(
        parts=tuple(map(part, tables)),
        sources=lambda: (
            *source_files(folder, [path.absolute() for path in files]),
            *(source for path in filter(None, [config.context]) for source in source_files(path.parent, [path])),
        ),
        context=context,
        num_actions=None if len(config.action_columns) == 1 else 1 << len(config.action_columns),
        time_unit=config.timestamp_unit,
        options={
            **asdict(config),
            "events": [path.name for path in config.events],
            "delimiter": next((table.separator for table in tables if table.separator is not None), None),
            "columns": list(config.columns),
            "action_columns": list(config.action_columns),
            "context": None if config.context is None else config.context.name,
            "context_columns": list(config.context_columns),
        },
        id_kinds=kinds,
    )


def _value_checks(config: TabularConfig, table: Table) -> dict[str, pl.Expr]:
    """Return the checks of time and actions by the reason to report where they fail."""
    column, unit = config.timestamp_column, config.timestamp_unit
    time_reason = f"{column} is not a time in {UNITS[unit]} up to the year 9999"
    checks = {time_reason: timestamp_ms(table, column, unit).is_between(0, MAX_TIMESTAMP_MS)}
    for name in config.action_columns:
        if len(config.action_columns) > 1:
            checks[f"{name} is not 0 or 1"] = _flag(table, name).is_between(0, 1)
        else:
            action = as_integer(table, name)
            largest = min(_MAX_ACTION, 2 ** integer_bits(table.dtypes[name]) - 1)
            checks[f"{name} is not an integer in 0..{largest}"] = action.is_between(0, largest)
    return checks


def _action(config: TabularConfig, table: Table) -> pl.Expr:
    match config.action_columns:
        case ():
            action = pl.lit(0)
        case (name,):
            action = as_integer(table, name)
        case names:
            action = pl.sum_horizontal(_flag(table, name) * (1 << bit) for bit, name in enumerate(names))
    return action.cast(pl.Int32, strict=False)


def _flag(table: Table, name: str) -> pl.Expr:
    if table.dtypes[name] != pl.String:
        return as_integer(table, name)
    values = {"0": 0, "1": 1, "false": 0, "true": 1}
    return pl.col(name).str.to_lowercase().replace_strict(values, default=None, return_dtype=pl.Int64)


def _read_context(config: TabularConfig, path: Path, kind: IdKind) -> Context:
    table = open_table(path, (config.user_column, *config.context_columns))
    ids, texts = raw_id(table, config.user_column, kind), raw_id(table, config.user_column, "text")
    users = table.read_users(
        [ids.alias(USER_ID), *map(pl.col, config.context_columns)],
        {f"{config.user_column} is empty or not an id": texts.is_not_null()},
    ).drop_nulls(USER_ID)  # text, which no event has if users are integers
    keys = pl.Series(USER_ID, keys_of(users.get_column(USER_ID)))
    return encode_context(
        users.with_columns(keys, *(_feature(path, users.get_column(name)) for name in config.context_columns))
    )


def _feature(path: Path, values: pl.Series) -> pl.Series:
    """Return a feature ready for sorting: text as integers if all of it is, empty text and NaN as null."""
    if values.dtype.is_nested() or values.dtype == pl.Binary:
        raise DataError(
            f"{path}: column {values.name!r} of type {values.dtype} cannot be a feature; convert it to text or numbers"
        )
    if values.dtype.base_type() not in TEXT_TYPES:
        return values.fill_nan(None) if values.dtype.is_float() else values
    text = values.cast(pl.String)
    text = text.set(text == "", None)
    are_integers = pl.select(is_plain_integer(pl.lit(text.drop_nulls())).all()).item()
    return text.cast(pl.Int64) if are_integers else text
