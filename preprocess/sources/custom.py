"""Custom logs in any files -> interactions. Columns are found by name; all others are ignored."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import polars as pl

from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, IdKind
from evenrank.preprocess.build.ids import KEEP
from evenrank.preprocess.files.locate import find_files
from evenrank.preprocess.files.raw_values import (
    as_integer,
    find_texts,
    id_checks,
    id_kind,
    integer_bits,
    raw_id,
)
from evenrank.preprocess.files.table import EventPart, Table
from evenrank.preprocess.files.tabular import open_table
from evenrank.preprocess.files.times import MAX_TIMESTAMP_MS, UNITS, decide_unit, timestamp_ms
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.sources.download import source_files
from evenrank.preprocess.sources.features import read_context
from evenrank.preprocess.sources.interactions import Interactions

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
        open_table(path, config.needed_columns, separator=config.delimiter, columns=config.columns) for path in files
    ]
    if config.timestamp_unit == "auto":
        config = replace(config, timestamp_unit=decide_unit(tables, config.timestamp_column))
    columns = {USER_ID: config.user_column, ITEM_ID: config.item_column}
    kinds: dict[str, IdKind] = {
        name: "int64" if rules[name] == KEEP else "text" if name in text_ids else id_kind(tables, column)
        for name, column in columns.items()
    }
    context = None if config.context is None else read_context(config, config.context, kinds[USER_ID])
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
