"""The command line of `scripts/train.py`, derived from the settings."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from evenrank.core.errors import EvenrankError
from trainer.config import TrainConfig, read_config, types_of_settings

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
        _option(entry.name, types[entry.name], entry.default, entry.metadata["help"], entry.metadata["choices"])
        for entry in dataclasses.fields(TrainConfig)
    ]
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG)
    command.__signature__ = inspect.Signature([config, *options])  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    return command


def _option(name: str, kind: Any, default: Any, text: str, choices: tuple[str, ...]) -> inspect.Parameter:
    shown = f" [{', '.join(choices)}]" if choices else ""
    shown += "" if default is None else f" [default: {default}]"
    annotation = Annotated[kind | None, typer.Option(help=text + shown, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
