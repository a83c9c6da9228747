"""The installed command `evenrank`, and what its subcommands share with the scripts: errors and exit codes."""

import signal
import sys
from collections.abc import Callable
from typing import Any

import typer

from evenrank.cli import console
from evenrank.cli.inspect import inspect_command
from evenrank.cli.metrics import metrics_command
from evenrank.cli.preprocess import preprocess_command
from evenrank.cli.simulate import simulate_command
from evenrank.core.errors import EvenrankError

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
    app.command("simulate")(simulate_command)
    app.command("metrics")(metrics_command)
    _run(app)


def run_command(command: Command) -> None:
    """Run one command as a program of its own, as the scripts do."""
    app = typer.Typer(**_PLAIN)
    app.command()(command)
    _run(app)


class _Stopped(BaseException):
    """A signal to stop; it unwinds like Ctrl-C, so that nothing half-written stays behind."""


def _stop(number: int, frame: object) -> None:
    raise _Stopped(number)


def _run(app: typer.Typer) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a person's, a scheduler's
        signal.signal(number, _stop)
    try:
        app()
    except EvenrankError as error:
        console.stderr.print(f"error: {error}")
        sys.exit(2)
    except _Stopped as stopped:
        (number,) = stopped.args
        console.stderr.print(f"error: stopped by {signal.Signals(number).name}; nothing half-written is left")
        sys.exit(128 + number)
