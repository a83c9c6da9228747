"""The description of a custom log (its files, its columns and their meaning), as a record or as a TOML file."""

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import open_regular
from evenrank.datasets.schema import check_new_names

TimestampUnit = Literal["s", "ms", "us", "iso"]
_MAX_FLAGS = 31  # the bits of a non-negative int32


@dataclass(frozen=True, kw_only=True, slots=True)
class TabularConfig:
    """The files of a custom dataset and the names of their columns. The suffix of a file determines its format."""

    events: tuple[Path, ...]
    """Event files (.csv, .csv.gz, .tsv or .parquet); their rows are concatenated."""
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
    context: Path | None = None
    """File with the users' features: `user_column` and `context_columns`, one row per user."""
    context_columns: tuple[str, ...] = ()
    """Columns of `context` to use as contextual features."""

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

    Args:
        path: of the file.
        options: further fields, from the command line.

    Raises:
        DataError: the file cannot be read, or is not TOML.
        ConfigError: a key is missing, unknown or also among the options, or a value has the wrong type or is invalid.

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
        is_list = key in ("events", "action_columns", "context_columns")
        items = value if is_list and isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{path}: {key} must be a string{' or a list of strings' * is_list}, got {value!r}")
        if key in ("events", "context"):
            items = [path.parent / name for name in items]
        values[key] = tuple(items) if is_list else items[0]
    if missing := [name for name, is_required in known.items() if is_required and name not in values]:
        raise ConfigError(f"{path} lacks {missing[0]}; add it")
    return TabularConfig(**values)
