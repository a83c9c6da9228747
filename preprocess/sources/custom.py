"""Custom logs in any files -> interactions. Columns are found by name; all others are ignored."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import polars as pl

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import open_regular
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, check_new_names
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.interactions import (
    IS_GOOD,
    MAX_TIMESTAMP_MS,
    Context,
    EventPart,
    Interactions,
    Table,
    encode_context,
    wrap_read_errors,
)
from evenrank.preprocess.sources.locate import find_files
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
            raise ConfigError(
                "delimiter must be one ASCII character, or one repeated, other than letters, digits, line ends and "
                f'".+-, got {self.delimiter!r}'
            )
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


def read_tabular(config: TabularConfig) -> Interactions:
    """Open the files, decide from all their rows which ids are integers, and encode the users' features.

    Ids are kept if all values of their column, in otherwise good rows, are 64-bit integers in plain digits. If not,
    they are encoded as 1..n by sorted value.
    """
    files = find_files(config.events)
    tables = [
        open_table(
            path,
            config.event_columns,
            separator=config.delimiter,
            columns=config.columns,
            may_be_empty=len(files) > 1,
        )
        for path in files
    ]
    raw_ids = [  # of the rows that pass all other checks
        table.part(_raw_ids(config, table), _value_checks(config, table)).events.filter(IS_GOOD).drop(IS_GOOD)
        for table in tables
    ]
    with wrap_read_errors(*config.events):
        vocabularies = _build_vocabularies(raw_ids)
    context = None
    if config.context is not None:
        users = [_encode_ids(ids.select(USER_ID), USER_ID, vocabularies[USER_ID]).unique() for ids in raw_ids]
        with wrap_read_errors(*config.events):
            users_with_events = pl.concat(users).collect(engine="streaming")
        context = _read_context(config, config.context, vocabularies[USER_ID], users_with_events)
    folder = Path(os.path.commonpath([path.absolute().parent for path in files]))
    return Interactions(
        parts=tuple(_part(config, table, vocabularies) for table in tables),
        sources=lambda: (
            *source_files(folder, [path.absolute() for path in files]),
            *(() if config.context is None else source_files(config.context.parent, [config.context])),
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
        vocabularies={name: vocabulary for name, vocabulary in vocabularies.items() if vocabulary is not None},
    )


def _raw_ids(config: TabularConfig, table: Table) -> list[pl.Expr]:
    ids = {USER_ID: config.user_column, ITEM_ID: config.item_column}
    return [_raw_id(table, column).alias(name) for name, column in ids.items()]


def _part(config: TabularConfig, table: Table, vocabularies: Mapping[str, pl.DataFrame | None]) -> EventPart:
    action, time = _action(config, table).alias(ACTION), _timestamp_ms(config, table).alias(TIMESTAMP_MS)
    checks = _value_checks(config, table) | _id_checks(config, table, vocabularies)
    part = table.part([*_raw_ids(config, table), action, time], checks)
    encoded = part.events
    for name, vocabulary in vocabularies.items():
        encoded = _encode_ids(encoded, name, vocabulary)
    return replace(part, events=encoded)


def _value_checks(config: TabularConfig, table: Table) -> dict[str, pl.Expr]:
    """Return the checks of time and actions by the reason to report where they fail."""
    time_reason = f"{config.timestamp_column} is not a time {_TIME_FORMATS[config.timestamp_unit]} up to the year 9999"
    checks = {time_reason: _timestamp_ms(config, table).is_between(0, MAX_TIMESTAMP_MS)}
    for name in config.action_columns:
        if len(config.action_columns) > 1:
            checks[f"{name} is not 0 or 1"] = _flag(table, name).is_between(0, 1)
        else:
            action = _as_integer(table, name)
            largest = min(_MAX_ACTION, 2 ** _integer_bits(table.dtypes[name]) - 1)
            checks[f"{name} is not an integer in 0..{largest}"] = action.is_between(0, largest)
    return checks


def _id_checks(
    config: TabularConfig, table: Table, vocabularies: Mapping[str, pl.DataFrame | None]
) -> dict[str, pl.Expr]:
    checks = {}
    for name, column in ((USER_ID, config.user_column), (ITEM_ID, config.item_column)):
        dtype = table.dtypes[column]
        raw = _raw_id(table, column)
        if dtype.base_type() in _TEXT_TYPES:
            text = pl.col(column).cast(pl.String)
            checks[f"{column} is empty"] = text != ""
            checks[f"{column} is not UTF-8"] = ~_has_bad_bytes(text)
        else:
            checks[f"{column} is empty"] = pl.col(column).is_not_null()
        is_numeric = vocabularies[name] is None
        ids = raw.cast(pl.Int64, strict=False) if is_numeric else raw
        bits = _integer_bits(dtype)
        integers = f"-2^{bits}+1..2^{bits}-1, where {dtype} is exact" if dtype.is_float() else f"-2^{bits}..2^{bits}-1"
        checks[f"{column} is not an integer in {integers}"] = ids.is_not_null()
        if is_numeric and name == ITEM_ID:
            checks[f"{column} must not be negative"] = ids >= 0
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
    if _integer_bits(dtype) < _integer_bits(pl.Float64()):
        raise DataError(f"{described} is too coarse for times; store the times as Float64 or integers")
    if unit == "s":
        # Decimals are exact where floats may be off by a millisecond; the digits of a float below 1 us are noise.
        seconds = time.cast(pl.Decimal(24, 6 if dtype.is_float() else 9), strict=False)
        return (seconds * 1000).floor().cast(pl.Int64, strict=False)
    count = _as_integer(table, name)
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
            action = _as_integer(table, name)
        case names:
            action = pl.sum_horizontal(_flag(table, name) * (1 << bit) for bit, name in enumerate(names))
    return action.cast(pl.Int32, strict=False)


def _flag(table: Table, name: str) -> pl.Expr:
    if table.dtypes[name] != pl.String:
        return _as_integer(table, name)
    values = {"0": 0, "1": 1, "false": 0, "true": 1}
    return pl.col(name).str.to_lowercase().replace_strict(values, default=None, return_dtype=pl.Int64)


def _read_context(
    config: TabularConfig, path: Path, vocabulary: pl.DataFrame | None, users_with_events: pl.DataFrame
) -> Context:
    """Encode the features of the users that have events; leave out the others."""
    table = open_table(path, (config.user_column, *config.context_columns))
    raw = _raw_id(table, config.user_column).alias(USER_ID)
    users = table.read_users(
        [raw, *map(pl.col, config.context_columns)], {f"{config.user_column} is empty or not an id": raw.is_not_null()}
    )
    if vocabulary is None and users.schema[USER_ID] == pl.String:
        users = users.filter(_is_plain_integer(pl.col(USER_ID)))
    encoded = _encode_ids(users.lazy(), USER_ID, vocabulary).collect()
    known = encoded.join(users_with_events, on=USER_ID, how="semi", maintain_order="left")
    return encode_context(known.with_columns(_feature(path, known.get_column(name)) for name in config.context_columns))


def _feature(path: Path, values: pl.Series) -> pl.Series:
    """Return a feature ready for sorting: text as integers if all of it is, empty text and NaN as null."""
    if values.dtype.is_nested() or values.dtype == pl.Binary:
        raise DataError(
            f"{path}: column {values.name!r} of type {values.dtype} cannot be a feature; convert it to text or numbers"
        )
    if values.dtype.base_type() not in _TEXT_TYPES:
        return values.fill_nan(None) if values.dtype.is_float() else values
    text = values.cast(pl.String)
    text = text.set(text == "", None)
    are_integers = pl.select(_is_plain_integer(pl.lit(text.drop_nulls())).all()).item()
    return text.cast(pl.Int64) if are_integers else text


# Ids of users and items: integers are kept, strings are encoded as 1..n by sorted value.

_TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)
# "007", "+7" and "-0" are strings: as integers they would be the same ids as "7" and "0".
_PLAIN_INTEGER = "^(?:0|-?[1-9][0-9]*)$"
# Floats represent all integers of so many bits; from 2^bits on they are rounded.
_FLOAT_BITS = {"Float16": 11, "Float32": 24, "Float64": 53}


def _encode_ids(rows: pl.LazyFrame, column: str, vocabulary: pl.DataFrame | None) -> pl.LazyFrame:
    """Replace `column`, as returned by `_raw_id`, by int64 ids, null where there is none; keep the order of rows.

    Without a vocabulary, any text that parses as an integer becomes an id, even "007".
    """
    if vocabulary is None:
        return rows.with_columns(pl.col(column).cast(pl.Int64, strict=False))
    # A join is several times faster than `replace` or an Enum here.
    ids = vocabulary.lazy().select(pl.col("value").alias(column), pl.col("id").alias(f"id of {column}"))
    encoded = rows.with_columns(pl.col(column).cast(pl.String)).join(ids, on=column, how="left", maintain_order="left")
    return encoded.with_columns(pl.col(f"id of {column}").alias(column)).drop(f"id of {column}")


def _raw_id(table: Table, column: str) -> pl.Expr:
    """Return an expression for an id as string or int64, null where it is missing, a fraction, or not UTF-8."""
    dtype = table.dtypes[column]
    if dtype.base_type() in _TEXT_TYPES:
        text = pl.col(column).cast(pl.String)
        return pl.when((text != "") & ~_has_bad_bytes(text)).then(text).alias(column)
    if dtype.is_numeric():
        return _as_integer(table, column)
    raise DataError(
        f"{table.path}: column {column!r} of type {dtype} cannot hold ids; convert it to integers or strings"
    )


def _has_bad_bytes(text: pl.Expr) -> pl.Expr:
    """Return whether text was not UTF-8. Such bytes were read as U+FFFD, which would merge different ids."""
    return text.str.contains("\ufffd", literal=True)


def _as_integer(table: Table, column: str) -> pl.Expr:
    """Return an expression for text, numbers or booleans as int64; null where that would not be the exact value."""
    dtype, value = table.dtypes[column], pl.col(column)
    if not (dtype.is_numeric() or dtype in (pl.String, pl.Boolean)):
        raise DataError(f"{table.path}: column {column!r} of type {dtype} cannot hold integers; convert it to integers")
    if dtype.is_float() or dtype.is_decimal():  # pandas and data warehouses store integers with missing values so
        value = pl.when(value == value.floor()).then(value)
    if dtype.is_float():
        value = pl.when(value.abs() < 1 << _integer_bits(dtype)).then(value)
    return value.cast(pl.Int64, strict=False).alias(column)


def _integer_bits(dtype: pl.DataType) -> int:
    """Return the number of bits of the integers from `_as_integer`, besides their sign."""
    return _FLOAT_BITS.get(str(dtype), 63)


def _is_plain_integer(text: pl.Expr) -> pl.Expr:
    """Return whether a string is an int64 in decimal digits, without leading zeros, plus signs and -0."""
    return text.str.contains(_PLAIN_INTEGER) & text.cast(pl.Int64, strict=False).is_not_null()


def _build_vocabularies(files: Sequence[pl.LazyFrame]) -> dict[str, pl.DataFrame | None]:
    """Decide from all rows of all files which columns, as returned by `_raw_id`, are integers, and encode the others.

    Return per column id (int64, 1..n) and value (string), sorted by both; None if the values are the ids.
    """
    string_columns: set[str] = set()
    for rows in files:
        candidates = [pl.col(name) for name, dtype in rows.collect_schema().items() if dtype == pl.String]
        if candidates:
            checks = rows.select((ids.is_null() | _is_plain_integer(ids)).all() for ids in candidates)
            are_integers = checks.collect(engine="streaming").row(0, named=True)
            string_columns.update(name for name, are_all in are_integers.items() if not are_all)
    vocabularies: dict[str, pl.DataFrame | None] = dict.fromkeys(files[0].collect_schema().names())
    for name in string_columns:
        unique = [rows.select(pl.col(name).cast(pl.String).alias("value")).unique() for rows in files]
        values = pl.concat(unique).unique().drop_nulls().collect(engine="streaming").get_column("value").sort()
        vocabularies[name] = pl.DataFrame([pl.int_range(1, len(values) + 1, eager=True).alias("id"), values])
    return vocabularies
