"""The settings of a job from a TOML file and the command line; both are derived from the fields of `TrainConfig`."""

import dataclasses
import inspect
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.core.settings import check_keys
from trainer.config import FIELDS, TrainConfig, UnusedError, check_settings, check_use, types_of_settings


def read_config(file: Path | None, options: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of a TOML file, overridden by the options that were given.

    Args:
        file: with a key for each setting that differs from its default; None: all defaults.
        options: settings by name; None where the command line has none.

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or a setting is wrong.
    """
    settings = {} if file is None else _read_toml(file)
    in_file = {name: f"{name} = {value} in {file}" for name, value in settings.items() if options.get(name) is None}
    settings |= {name: value for name, value in options.items() if value is not None}
    try:
        check_settings(settings)
        defaults = {name: entry.default for name, entry in FIELDS.items()}
        check_use(defaults | settings, settings, in_file)
        return TrainConfig(**settings)
    except ConfigError as error:
        if file is None or isinstance(error, UnusedError):  # which says where it is
            raise
        raise ConfigError(f"{error} (settings are from {file} and the command line)") from error


def _read_toml(file: Path) -> dict[str, Any]:
    known = types_of_settings()
    try:
        settings = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    check_keys(file, settings, known)
    return settings


_CONFIG = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with settings, under the names of these options; options override it.", metavar="FILE"
    ),
]


def command_of(run: Callable[[TrainConfig], None]) -> Callable[..., None]:
    """Return a command for Typer that calls `run` with the settings; its help is the docstring of `run`.

    Each option is None unless it is given, so that the file's settings, then the defaults, apply.
    """

    def command(config: Path | None = None, **options: Any) -> None:
        try:
            run(read_config(config, options))
        except EvenrankError:
            # All ranks have the same errors, or a RankError with that of another one; torchrun sets RANK.
            if os.environ.get("RANK", "0") == "0":
                raise
            raise typer.Exit(2) from None

    types = types_of_settings()
    options = [
        _parameter(entry.name, types[entry.name], entry.default, entry.metadata["help"], entry.metadata["choices"])
        for entry in dataclasses.fields(TrainConfig)
    ]
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG)
    command.__signature__ = inspect.Signature([config, *options])  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    return command


def _parameter(name: str, kind: Any, default: Any, text: str, choices: tuple[str, ...]) -> inspect.Parameter:
    shown = f" [{', '.join(choices)}]" if choices else ""
    shown += "" if default is None else f" [default: {default}]"
    annotation = Annotated[kind | None, typer.Option(help=text + shown, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
