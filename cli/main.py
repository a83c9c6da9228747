"""The installed command `evenrank`, and what its subcommands share with the scripts: errors and exit codes."""

import signal
import sys
from collections.abc import Callable
from typing import Any

import typer

from evenrank.cli import console
from evenrank.cli.inspect import inspect_command
from evenrank.cli.preprocess import preprocess_command
from evenrank.datasets.errors import EvenrankError

Command = Callable[..., None]

# Errors are one line, without a box around them or a traceback.
_PLAIN: Any = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def main() -> None:
    """Run `evenrank`."""
    app = typer.Typer(
        help="The data side of multi-GPU training for generative recommenders.",
        no_args_is_help=True,
        **_PLAIN,
    )
    app.command("preprocess")(preprocess_command)
    app.command("inspect")(inspect_command)
    _run(app)


def run_command(command: Command) -> None:
    """Run one command as a program of its own, as the scripts do."""
    app = typer.Typer(**_PLAIN)
    app.command()(command)
    _run(app)


def _run(app: typer.Typer) -> None:
    # A scheduler's signal unwinds like any exit, so that nothing half-written stays behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except EvenrankError as error:
        console.stderr.print(f"error: {error}")
        sys.exit(2)
