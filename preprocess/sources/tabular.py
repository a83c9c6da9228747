"""Anyone's log as CSV or Parquet -> interactions. Columns are found by their names; all others are ignored."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, SourceFile
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.interactions import (
    IS_GOOD,
    MAX_TIMESTAMP_MS,
    BadRow,
    Context,
    EventPart,
    Interactions,
    encode_context,
)
from evenrank.preprocess.sources.tablefile import IS_WHOLE, Table, naming, open_table, reading
from evenrank.preprocess.sources.tabular_config import TabularConfig
from evenrank.preprocess.sources.vocabulary import (
    TEXT_TYPES,
    IdCoder,
    has_bad_bytes,
    is_plain_number,
    raw_id,
    survey_ids,
    whole_number,
)

_MAX_ACTION = 2**31 - 1
_EVENT_BYTES = 28  # of one event in memory: three int64 and an int32
_ISO = (
    r"^(\d{4}-\d{2}-\d{2})(?:[T ](\d{2}:\d{2})(?::(\d{2})(?:[.,](\d{1,3})\d*)?)?(?:Z|([+-])(\d{2})(?::?(\d{2}))?)?)?$"
)


def read_tabular(config: TabularConfig) -> Interactions:
    """Open the files, decide over all their rows which ids are numbers, and code the users' features.

    An id column is numeric if each of its values, in rows that are good otherwise, is a 64-bit integer in plain digits;
    then ids stay as they are. Otherwise ids are 1..n by sorted value.

    Raises:
        DataError: a file is missing, empty, damaged or of an unknown kind, lacks a column or has it twice, or has it in
            a type that does not fit; a line of the users' features cannot be read, or a user is there twice.

    """
    tables = [open_table(path, config.event_columns) for path in config.events]
    candidates = [_candidates(config, table) for table in tables]
    with reading(*config.events):
        coders = survey_ids(candidates)
    context = None
    if config.context is not None:
        users = [coders[USER_ID].code(rows.select(USER_ID), USER_ID).unique() for rows in candidates]
        with reading(*config.events):
            seen = pl.concat(users).collect(engine="streaming")
        context = _read_context(config, config.context, coders[USER_ID], seen)
    vocabularies = {name: coder.vocabulary for name, coder in coders.items() if coder.vocabulary is not None}
    return Interactions(
        parts=tuple(_part(config, table, coders) for table in tables),
        sources=lambda: _sources(config),
        context=context,
        num_actions=None if len(config.action_columns) == 1 else 1 << len(config.action_columns),
        options={
            "events": [path.name for path in config.events],
            "user_column": config.user_column,
            "item_column": config.item_column,
            "timestamp_column": config.timestamp_column,
            "timestamp_unit": config.timestamp_unit,
            "action_columns": list(config.action_columns),
            "context": None if config.context is None else config.context.name,
            "context_columns": list(config.context_columns),
        },
        vocabularies=vocabularies,
    )


def _sources(config: TabularConfig) -> tuple[SourceFile, ...]:
    paths = config.events if config.context is None else (*config.events, config.context)
    return tuple(source for path in paths for source in source_files(path.parent, [path]))


def _candidates(config: TabularConfig, table: Table) -> pl.LazyFrame:
    """Return user_id and item_id as they are in the file, of the rows that are good but for their ids."""
    with naming(table.path):
        return table.rows.filter(_all_true(_value_checks(config, table))).select(_raw_ids(config, table))


def _raw_ids(config: TabularConfig, table: Table) -> list[pl.Expr]:
    ids = {USER_ID: config.user_column, ITEM_ID: config.item_column}
    return [raw_id(column, table.dtypes[column]).alias(name) for name, column in ids.items()]


def _part(config: TabularConfig, table: Table, coders: Mapping[str, IdCoder]) -> EventPart:
    checks = {**_value_checks(config, table), **_id_checks(config, table, coders)}
    events = table.rows.select(
        *_raw_ids(config, table),
        _action(config, table.dtypes).alias(ACTION),
        _timestamp_ms(config, table.dtypes).alias(TIMESTAMP_MS),
        _all_true(checks).alias(IS_GOOD),
    )
    for name, coder in coders.items():
        events = coder.code(events, name)

    def find_bad(limit: int) -> Sequence[BadRow]:
        return table.find_bad(checks, limit)

    # A compressed file is smaller than its events are in memory.
    size = max(table.path.stat().st_size, table.num_rows * _EVENT_BYTES)
    return EventPart(name=str(table.path), size=size, events=events, find_bad=find_bad)


def _all_true(checks: Mapping[str, pl.Expr]) -> pl.Expr:
    return pl.all_horizontal(*checks.values(), pl.col(IS_WHOLE)).fill_null(False)


def _value_checks(config: TabularConfig, table: Table) -> dict[str, pl.Expr]:
    """What must hold of a row beside its ids."""
    unit = {"s": "in seconds since 1970", "ms": "in whole ms since 1970", "us": "in whole us since 1970"}
    kind = unit.get(config.timestamp_unit, "in ISO 8601")
    time = f"{config.timestamp_column} is not a time {kind}, up to the year 9999"
    checks = {time: _timestamp_ms(config, table.dtypes).is_between(0, MAX_TIMESTAMP_MS)}
    for name in config.action_columns:
        if len(config.action_columns) > 1:
            checks[f"{name} is not 0 or 1"] = _flag(name, table.dtypes[name]).is_between(0, 1)
        else:
            number = whole_number(name, table.dtypes[name])
            checks[f"{name} is not a whole number of 0..{_MAX_ACTION}"] = number.is_between(0, _MAX_ACTION)
    return checks


def _id_checks(config: TabularConfig, table: Table, coders: Mapping[str, IdCoder]) -> dict[str, pl.Expr]:
    checks = {}
    for name, column in ((USER_ID, config.user_column), (ITEM_ID, config.item_column)):
        dtype = table.dtypes[column]
        raw = raw_id(column, dtype)
        if dtype.base_type() in TEXT_TYPES:
            text = pl.col(column).cast(pl.String)
            checks[f"{column} is empty"] = text != ""
            checks[f"{column} is not UTF-8"] = ~has_bad_bytes(text)
        else:
            checks[f"{column} is empty"] = pl.col(column).is_not_null()
        checks[f"{column} is not a 64-bit whole number"] = raw.is_not_null()
        if coders[name].vocabulary is None:
            number = raw.cast(pl.Int64, strict=False)
            checks[f"{column} is not a 64-bit whole number"] = number.is_not_null()
            if name == ITEM_ID:
                checks[f"{column} must not be negative"] = number >= 0
    return checks


def _timestamp_ms(config: TabularConfig, dtypes: Mapping[str, pl.DataType]) -> pl.Expr:
    """Return int64, rounded down; null where it cannot be read."""
    name = config.timestamp_column
    time, dtype, unit = pl.col(name), dtypes[name], config.timestamp_unit
    if dtype.base_type() in (pl.Datetime, pl.Date):
        return (time.cast(pl.Datetime("ms")) if dtype == pl.Date else time).dt.epoch("ms")
    if unit == "iso":
        if dtype != pl.String:
            raise DataError(f"column {name!r} is of type {dtype}, not text; name its unit: s, ms or us")
        return _iso_ms(time)
    if dtype != pl.String and not dtype.is_numeric():
        raise DataError(f"column {name!r} is of type {dtype}, which holds no times; make it numbers or text")
    if unit == "s":
        # Decimals are exact where floats would lose a millisecond; of a float, digits below 1 us are noise.
        seconds = time.cast(pl.Decimal(24, 6 if dtype.is_float() else 9), strict=False)
        return (seconds * 1000).floor().cast(pl.Int64, strict=False)
    whole = whole_number(name, dtype)
    return whole if unit == "ms" else whole // 1000


def _iso_ms(text: pl.Expr) -> pl.Expr:
    # Polars' own parser wants one format for a whole column; logs mix them.
    part = text.str.extract_groups(_ISO).struct
    clock = pl.concat_str(
        part.field("1"), part.field("2").fill_null("00:00"), part.field("3").fill_null("00"), separator=" "
    )
    local = clock.str.to_datetime("%Y-%m-%d %H:%M %S", time_unit="ms", strict=False).dt.epoch("ms")
    millis = part.field("4").str.pad_end(3, "0").cast(pl.Int64).fill_null(0)
    minutes = part.field("6").cast(pl.Int64) * 60 + part.field("7").cast(pl.Int64).fill_null(0)
    offset = pl.when(part.field("5") == "-").then(-minutes).otherwise(minutes).fill_null(0)
    is_clock = part.field("3").fill_null("00") < "60"  # a leap second has no place among ms since 1970
    return pl.when(is_clock).then(local + millis - offset * 60_000)


def _action(config: TabularConfig, dtypes: Mapping[str, pl.DataType]) -> pl.Expr:
    match config.action_columns:
        case ():
            action = pl.lit(0)
        case (name,):
            action = whole_number(name, dtypes[name])
        case names:
            action = pl.sum_horizontal(_flag(name, dtypes[name]) * (1 << bit) for bit, name in enumerate(names))
    return action.cast(pl.Int32, strict=False)


def _flag(name: str, dtype: pl.DataType) -> pl.Expr:
    if dtype != pl.String:
        return whole_number(name, dtype)
    words = {"0": 0, "1": 1, "false": 0, "true": 1}
    return pl.col(name).str.to_lowercase().replace_strict(words, default=None, return_dtype=pl.Int64)


def _read_context(config: TabularConfig, path: Path, coder: IdCoder, seen: pl.DataFrame) -> Context:
    """Code the features of the users that have events, those in `seen`; the others are left out."""
    table = open_table(path, (config.user_column, *config.context_columns))
    dtype = table.dtypes[config.user_column]
    with naming(path):
        raw = raw_id(config.user_column, dtype)
    if bad := table.find_bad({f"{config.user_column} is empty or no id": raw.is_not_null()}, 1):
        row = bad[0]
        raise DataError(f"{path}, line {row.line} ({row.text[:80]!r}): {row.reason}; mend or remove the line")
    with reading(path):
        users = table.rows.select(raw.alias(USER_ID), *map(pl.col, config.context_columns)).collect()
    ids = users.get_column(USER_ID)
    if ids.is_duplicated().any():
        twice = ids.filter(ids.is_duplicated()).item(0)
        raise DataError(f"{path}: user {twice} appears twice; keep one row per user")
    if coder.vocabulary is None and ids.dtype == pl.String:
        users = users.filter(is_plain_number(pl.col(USER_ID)))
    known = coder.code(users.lazy(), USER_ID).collect().join(seen, on=USER_ID, how="semi", maintain_order="left")
    with naming(path):
        features = [_feature(known.get_column(name)) for name in config.context_columns]
    return encode_context(known.with_columns(features))


def _feature(values: pl.Series) -> pl.Series:
    """Return a feature ready to be sorted: text of nothing but numbers as numbers, empty text and NaN as null."""
    if values.dtype.is_nested() or values.dtype == pl.Binary:
        raise DataError(
            f"column {values.name!r} is of type {values.dtype}, which is no feature; make it text or numbers"
        )
    if values.dtype.base_type() not in TEXT_TYPES:
        return values.fill_nan(None) if values.dtype.is_float() else values
    text = values.cast(pl.String)
    text = text.set(text == "", None)
    is_number = pl.select(is_plain_number(pl.lit(text.drop_nulls())).all()).item()
    return text.cast(pl.Int64) if is_number else text
