import os
import re
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.preprocess.sources.custom import TabularConfig, read_toml


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"events": ()}, "events is empty; give at least one file"),
        ({"timestamp_unit": "h"}, "timestamp_unit must be one of s, ms, us, iso, got 'h'"),
        ({"action_columns": tuple(map(str, range(32)))}, "at most 31 columns, got 32"),
        ({"context": Path("users.csv")}, "context and context_columns go together"),
        ({"context_columns": ("age",)}, "context and context_columns go together"),
        ({"item_column": "user"}, "column 'user' is given twice"),
        ({"context": Path("u.csv"), "context_columns": ("a", "a")}, "column 'a' is given twice"),
        ({"context": Path("u.csv"), "context_columns": ("length",)}, "no feature can be called 'length'"),
        ({"context": Path("u.csv"), "context_columns": ("user.age",)}, "no feature can be called 'user.age', because"),
        ({"context": Path("u.csv"), "context_columns": ("a/b",)}, "'a/b' is not a name"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    columns = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    with pytest.raises(ConfigError, match=message):
        TabularConfig(**{"events": (Path("log.csv"),), **columns, **options})


TOML = 'user_column = "user"\nitem_column = "item"\ntimestamp_column = "time"\n'


def test_toml_is_read_with_paths_relative_to_the_file(tmp_path: Path) -> None:
    text = 'events = ["a.csv", "/b.csv"]\ntimestamp_unit = "ms"\naction_columns = ["x", "y"]\n'
    path = tmp_path / "log.toml"
    path.write_text(TOML + text + 'context = "users.csv"\ncontext_columns = "age"\n')
    assert read_toml(path) == TabularConfig(
        events=(tmp_path / "a.csv", Path("/b.csv")),
        user_column="user",
        item_column="item",
        timestamp_column="time",
        timestamp_unit="ms",
        action_columns=("x", "y"),
        context=tmp_path / "users.csv",
        context_columns=("age",),
    )


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('events = "a.csv"\nuser = "u"\n' + TOML, ConfigError, "unknown key 'user'; known: events, user_column, "),
        (TOML, ConfigError, "log.toml lacks events; add it"),
        ("events = 3\n" + TOML, ConfigError, "events must be a string or a list of strings, got 3"),
        ('events = ["a.csv", 3]\n' + TOML, ConfigError, "events must be a string or a list of strings, got"),
        ('events = "a.csv"\ncontext = ["b"]\n' + TOML, ConfigError, "context must be a string, got ['b']"),
        ("events = \n", DataError, "log.toml is not valid TOML"),
    ],
)
def test_invalid_toml_raises(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "log.toml"
    path.write_text(text)
    with pytest.raises(error, match=re.escape(message)):
        read_toml(path)


def test_options_are_fields_that_the_toml_lacks(tmp_path: Path) -> None:
    path = tmp_path / "log.toml"
    path.write_text(TOML)
    assert read_toml(path, events=(Path("a.csv"),)).events == (Path("a.csv"),)
    with pytest.raises(ConfigError, match=r"--user-column is also in .*log\.toml \(user_column\); give it once"):
        read_toml(path, user_column="user")


def test_a_missing_toml_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.toml cannot be read: No such file or directory; check the path"):
        read_toml(tmp_path / "log.toml")


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.toml")
    with pytest.raises(DataError, match=r"log\.toml is a named pipe, not a regular file"):
        read_toml(tmp_path / "log.toml")
