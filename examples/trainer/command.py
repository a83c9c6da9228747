"""The settings of a job from a TOML file and the command line; both are derived from the fields of `TrainConfig`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from evenrank.cli.settings_options import check_options, config_option, make, options_of
from evenrank.cli.settings_options import command_of as command_of_options
from evenrank.core.errors import ConfigError, EvenrankError
from trainer.config import TrainConfig

OPTIONS = options_of(TrainConfig)
_CONFIG = "TOML file with settings, under the names of these options; options override it."


def read_config(context: typer.Context) -> TrainConfig:
    """Return the settings of the file of `--config`, if any, overridden by the options that were given.

    Raises:
        ConfigError: a setting is wrong, or does not apply to the others, so that it would be ignored.
    """
    values, file = check_options(context, OPTIONS), context.params["config_file"]
    try:
        return make(TrainConfig, values, OPTIONS)
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(f"{error} (settings are from {file} and the command line)") from error


def command_of(run: Callable[[TrainConfig], None]) -> Callable[..., None]:
    """Return a command for Typer that calls `run` with the settings; its help is the docstring of `run`."""

    def command(
        ctx: typer.Context, config_file: Annotated[Path | None, config_option(OPTIONS, _CONFIG)] = None
    ) -> None:
        try:
            run(read_config(ctx))
        except EvenrankError:
            # All ranks have the same errors, or a RankError with that of another one; torchrun sets RANK.
            if os.environ.get("RANK", "0") == "0":
                raise
            raise typer.Exit(2) from None

    command.__doc__ = run.__doc__
    return command_of_options(OPTIONS)(command)
