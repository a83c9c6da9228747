"""Custom logs in any files -> interactions. Columns are found by name; all others are ignored."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

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

TimestampUnit = Literal["s", "ms", "us", "iso"]
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
    timestamp_unit: TimestampUnit = "s"
    """Unit of numeric times, counted from 1970; `iso` for ISO 8601 text, in UTC unless it has an offset. Parquet's date
    and time types need no unit."""
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
_TIME_FORMATS: Mapping[TimestampUnit, str] = {
    "s": "in seconds since 1970",
    "ms": "in whole ms since 1970",
    "us": "in whole us since 1970",
    "iso": "in ISO 8601",
}
# Not `\d`, which matches the digits of all scripts. Leap seconds cannot be expressed in ms since 1970.
_ISO = (
    "^([0-9]{4}-[0-9]{2}-[0-9]{2})"
    "(?:[T ]([0-9]{2}:[0-9]{2})(?::([0-5][0-9])(?:[.,]([0-9]{1,3})[0-9]*)?)?"
    "(?:Z|([+-])([01][0-9]|2[0-3])(?::?([0-5][0-9]))?)?)?$"
)


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
    columns = {USER_ID: config.user_column, ITEM_ID: config.item_column}
    kinds: dict[str, IdKind] = {
        name: "int64" if rules[name] == KEEP else "text" if name in text_ids else id_kind(tables, column)
        for name, column in columns.items()
    }
    context = None if config.context is None else _read_context(config, config.context, kinds[USER_ID])
    folder = Path(os.path.commonpath([path.absolute().parent for path in files]))

    def part(table: Table) -> EventPart:
        ids = [raw_id(table, column, kinds[name]).alias(name) for name, column in columns.items()]
        action, time = _action(config, table).alias(ACTION), _timestamp_ms(config, table).alias(TIMESTAMP_MS)
        value_checks = _value_checks(config, table)
        checks = value_checks.copy()
        for name, column in columns.items():
            checks |= id_checks(table, column, kinds[name], is_row=name == ITEM_ID and rules[name] == KEEP)
        guessed = {name: column for name, column in columns.items() if kinds[name] == "int64" and rules[name] != KEEP}
        events = table.part([*ids, action, time], checks)
        return replace(events, find_texts=lambda: find_texts(table, guessed, value_checks))

    return Interactions(
        parts=tuple(map(part, tables)),
        sources=lambda: (
            *source_files(folder, [path.absolute() for path in files]),
            *(source for path in filter(None, [config.context]) for source in source_files(path.parent, [path])),
        ),
        context=context,
        num_actions=None if len(config.action_columns) == 1 else 1 << len(config.action_columns),
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
    time_reason = f"{config.timestamp_column} is not a time {_TIME_FORMATS[config.timestamp_unit]} up to the year 9999"
    checks = {time_reason: _timestamp_ms(config, table).is_between(0, MAX_TIMESTAMP_MS)}
    for name in config.action_columns:
        if len(config.action_columns) > 1:
            checks[f"{name} is not 0 or 1"] = _flag(table, name).is_between(0, 1)
        else:
            action = as_integer(table, name)
            largest = min(_MAX_ACTION, 2 ** integer_bits(table.dtypes[name]) - 1)
            checks[f"{name} is not an integer in 0..{largest}"] = action.is_between(0, largest)
    return checks


def _timestamp_ms(config: TabularConfig, table: Table) -> pl.Expr:
    """Return event times as int64, rounded down; null where they cannot be read."""
    name, unit = config.timestamp_column, config.timestamp_unit
    time, dtype = pl.col(name), table.dtypes[name]
    described = f"{table.path}: column {name!r} of type {dtype}"
    if dtype.base_type() in (pl.Datetime, pl.Date):
        return (time.cast(pl.Datetime("ms")) if dtype == pl.Date else time).dt.epoch("ms")
    if unit == "iso":
        if dtype != pl.String:
            raise DataError(f"{described} is not text; set timestamp_unit to s, ms or us")
        return _iso_ms(time)
    if dtype != pl.String and not dtype.is_numeric():
        raise DataError(f"{described} cannot hold times; convert it to numbers or text")
    if integer_bits(dtype) < integer_bits(pl.Float64()):
        raise DataError(f"{described} is too coarse for times; store the times as Float64 or integers")
    if unit == "s":
        # Decimals are exact where floats may be off by a millisecond; the digits of a float below 1 us are noise.
        seconds = time.cast(pl.Decimal(24, 6 if dtype.is_float() else 9), strict=False)
        return (seconds * 1000).floor().cast(pl.Int64, strict=False)
    count = as_integer(table, name)
    return count if unit == "ms" else count // 1000


def _iso_ms(text: pl.Expr) -> pl.Expr:
    # Polars' parser expects a single format for a column, but logs mix several.
    part = text.str.extract_groups(_ISO).struct
    date, clock, seconds, millis, sign, offset_hours, offset_minutes = (part.field(str(i)) for i in range(1, 8))
    moment = pl.concat_str(date, clock.fill_null("00:00"), seconds.fill_null("00"), separator=" ")
    local = moment.str.to_datetime("%Y-%m-%d %H:%M %S", time_unit="ms", strict=False).dt.epoch("ms")
    minutes = offset_hours.cast(pl.Int64) * 60 + offset_minutes.cast(pl.Int64).fill_null(0)
    offset = pl.when(sign == "-").then(-minutes).otherwise(minutes).fill_null(0)
    return local + millis.str.pad_end(3, "0").cast(pl.Int64).fill_null(0) - offset * 60_000


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
