"""The installed command `evenrank`, and how it and the scripts handle errors, signals and exit codes.

Modules of commands import at the top only typer and what is light: `evenrank --help` imports all of them.
"""

import gc
import io
import logging
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import evenrank
from evenrank.cli import console
from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.core.optional_imports import naming_extras

# Of Typer, which has either its own copy of Click or the package: the class of errors in the arguments.
_UsageError: Any = typer.BadParameter.__base__
_MAX_SHOWN = 200  # characters of a path
_CONTEXT = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}
# Errors are one line, without a box around it or a traceback.
_PLAIN: Any = {"pretty_exceptions_enable": False, "rich_markup_mode": None, "context_settings": _CONTEXT}


def main() -> None:
    """Run `evenrank`."""
    # Which scripts, of one command each, do not wait for.
    from evenrank.cli.demo import demo_command
    from evenrank.cli.fit import fit_command
    from evenrank.cli.inspect_balance import inspect_balance_command
    from evenrank.cli.inspect_dataset import inspect_command
    from evenrank.cli.metrics import metrics_command
    from evenrank.cli.preprocess import preprocess_command
    from evenrank.cli.semantic_ids import semantic_ids_command
    from evenrank.cli.simulate import simulate_command
    from evenrank.cli.warmup import warmup_command

    app = typer.Typer(**_PLAIN)
    app.callback()(_global_options)
    for command in (
        *(preprocess_command, semantic_ids_command, inspect_command, simulate_command, metrics_command, fit_command),
        *(inspect_balance_command, demo_command, warmup_command),
    ):
        app.command(command.__name__.removesuffix("_command").replace("_", "-"))(command)
    _run(app, sys.argv[1:] or ["--help"])


def run_command(command: Callable[..., None]) -> None:
    """Run a single command as a program, as the scripts do."""
    app = typer.Typer(add_completion=False, **_PLAIN)
    app.command()(command)
    _run(app, sys.argv[1:])


class _Command(TyperCommand):
    """Its plain help has a section per panel, which Typer does only with Rich; no option is given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for parameter in given:
            if given.count(parameter) > 1 and not (parameter.multiple or ctx.resilient_parsing):  # as in completion
                raise ConfigError(f"{parameter.opts[0]} is given twice on the command line; give it once")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None) or f"{parameter.param_type_name.title()}s"
            if record := parameter.get_help_record(ctx):
                shown, text = record
                shown = shown.partition(" <")[0]  # without the type that Typer appends to names of arguments
                sections.setdefault(panel, []).append((shown, text))
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"evenrank {evenrank.__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The data side of multi-GPU training for generative recommenders."""


class _Stopped(BaseException):
    """A signal asked the program to stop; raised like KeyboardInterrupt, so that partial output is removed."""


def _stop(number: int, frame: object) -> None:
    _handle_signals(signal.SIG_IGN)  # a second one would interrupt the removal
    raise _Stopped(number)


def _handle_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # of Ctrl-C, and of a job scheduler
        signal.signal(number, handler)


def _run(app: typer.Typer, arguments: list[str]) -> None:
    for command in app.registered_commands:
        command.cls, command.context_settings = _Command, _CONTEXT
    _handle_signals(_stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that its encoding cannot express
    if not (sys.stderr and sys.stderr.isatty()):  # as progress is
        logging.getLogger("evenrank.compile").addHandler(logging.NullHandler())
    message, status = "", 2
    try:
        with naming_extras():
            code = app(arguments, standalone_mode=False)
        console.print_numbers()
        sys.exit(code or 0)
    except _UsageError as error:
        help_of = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        message = f"{error.format_message().rstrip('.')}{help_of}"
    except EvenrankError as error:
        message = str(error)
    except OSError as error:  # such as a path that is too long even to ask whether it exists
        path = str(error.filename or "")
        shown = path if len(path) <= _MAX_SHOWN else f"{path[:_MAX_SHOWN]}..."
        message = f"{shown or 'a file'}: {error.strerror or error}; check the path and its permissions"
    except MemoryError:
        message = "there is not enough memory for these options; choose smaller values"
    except _Stopped as stopped:
        (number,) = stopped.args
        message, status = f"stopped by {signal.Signals(number).name}", 128 + number
    finally:
        if message:
            console.print_error(message)
        if "torch" not in sys.modules:  # whose Triton would report leaks
            gc.freeze()  # else Python takes 0.4 s to look for garbage among all that was imported before it exits
        _handle_signals(signal.SIG_DFL)  # all is done; an exception in the exit of the interpreter would be a traceback
    sys.exit(status)
