"""What is said of anyone's log: its files, its columns, what they mean; as a record, or as a TOML file."""

import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import ACTION, ITEM_ID, LENGTH, TIMESTAMP_MS, USER_ID

TimestampUnit = Literal["s", "ms", "us", "iso"]
_MAX_FLAGS = 31  # an action is an int32 that is not negative


@dataclass(frozen=True, kw_only=True, slots=True)
class TabularConfig:
    """Which files to read, and what their columns are called. A suffix tells the kind of a file."""

    events: tuple[Path, ...]  # .csv, .csv.gz, .tsv or .parquet; their rows one behind the other
    user_column: str
    item_column: str
    timestamp_column: str
    timestamp_unit: TimestampUnit = "s"  # since 1970; iso: ISO 8601, UTC without a zone. Parquet's own times need none
    action_columns: tuple[str, ...] = ()  # none: action 0; one: the action; several: bits of it, the first the lowest
    context: Path | None = None  # users' features: a table with `user_column` and `context_columns`, one row per user
    context_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.events:
            raise ConfigError("events names no file; give at least one")
        if self.timestamp_unit not in get_args(TimestampUnit):
            units = ", ".join(get_args(TimestampUnit))
            raise ConfigError(f"timestamp_unit must be one of {units}, got {self.timestamp_unit!r}")
        if len(self.action_columns) > _MAX_FLAGS:
            raise ConfigError(f"action_columns may have at most {_MAX_FLAGS} columns, got {len(self.action_columns)}")
        if (self.context is None) != (not self.context_columns):
            raise ConfigError("context and context_columns go together; give both or none")
        for names in (self.event_columns, (self.user_column, *self.context_columns)):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"column {twice[0]!r} is named twice; each column has one meaning")
        taken = {USER_ID, ITEM_ID, ACTION, TIMESTAMP_MS, LENGTH}
        for name in self.context_columns:
            # They become columns of the output, and names of files in a loader's cache.
            if name in taken or not re.fullmatch(r"\w[\w.-]*", name):
                raise ConfigError(
                    f"context column {name!r} cannot be a column of the dataset; rename it to something of letters, "
                    f"digits, _, . and - other than {', '.join(sorted(taken))}"
                )

    @property
    def event_columns(self) -> tuple[str, ...]:
        """The columns that are read of the event files."""
        return (self.user_column, self.item_column, self.timestamp_column, *self.action_columns)


def read_toml(path: Path) -> TabularConfig:
    """Read a configuration from a TOML file with the fields' names as keys; paths are relative to the file.

    Raises:
        DataError: the file cannot be read, or is not TOML.
        ConfigError: a key is missing, unknown, or of another type, or a value does not fit.

    """
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid TOML ({error}); mend it") from error
    known = {field.name: field.default is MISSING for field in fields(TabularConfig)}
    if unknown := sorted(raw.keys() - known):
        raise ConfigError(f"{path} has an unknown key {unknown[0]!r}; known are {', '.join(known)}")
    if missing := [name for name, is_required in known.items() if is_required and name not in raw]:
        raise ConfigError(f"{path} lacks {missing[0]}; add it")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        is_list = key in ("events", "action_columns", "context_columns")
        items = value if is_list and isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{path}: {key} must be a string{' or a list of strings' * is_list}, got {value!r}")
        if key in ("events", "context"):
            items = [path.parent / name for name in items]
        values[key] = tuple(items) if is_list else items[0]
    return TabularConfig(**values)
