"""The settings of a job from a TOML file and the command line; both are derived from the fields of `TrainConfig`."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from evenrank.cli.settings_options import check_options, config_option, make, options_of
from evenrank.cli.settings_options import command_of as command_of_options
from evenrank.core.errors import ConfigError, EvenrankError
from trainer.config import TrainConfig

OPTIONS = options_of(TrainConfig)


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


@contextlib.contextmanager
def _on_first_rank() -> Iterator[None]:
    """Let the first rank alone show an error: all have the same, or a RankError with that of another one."""
    try:
        yield
    except EvenrankError:
        if os.environ.get("RANK", "0") == "0":  # which torchrun sets
            raise
        raise typer.Exit(2) from None


_FILE = config_option(OPTIONS, "TOML file with settings, under the names of these options; options override it.")
_FILE.callback = _on_first_rank()(_FILE.callback)


def command_of(run: Callable[[TrainConfig], None]) -> Callable[..., None]:
    """Return a command for Typer that calls `run` with the settings; its help is the docstring of `run`."""

    @_on_first_rank()
    def command(ctx: typer.Context, config_file: Annotated[Path | None, _FILE] = None) -> None:
        run(read_config(ctx))

    command.__doc__ = run.__doc__
    return command_of_options(OPTIONS)(command)
