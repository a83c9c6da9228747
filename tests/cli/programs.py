"""Run the commands: in this process, which saves the imports of a new one, or as users do, as programs."""

import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
EVENRANK = Path(sys.executable).parent / "evenrank"
Finished = subprocess.CompletedProcess[str]


def run_program(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Finished:
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=280)


def evenrank(*arguments: object, command: Callable[..., None] | None = None) -> Finished:
    """Run `evenrank ARGUMENTS` in this process, or a script of one command."""
    import_module("evenrank.cli.reports.simulation")  # or a small simulation leaves its functions plain Python
    console, program = (import_module(f"evenrank.cli.{name}") for name in ("console", "main"))
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    code: object = None
    with (
        mock.patch.object(sys, "argv", ["evenrank", *map(str, arguments)]),
        mock.patch.object(console, "_documents", []),  # what a mistake after `--json` leaves there
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            program.run_command(command) if command else program.main()
        except SystemExit as stopped:
            code = stopped.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert isinstance(code, int)
    return Finished(sys.argv, code, *(stream.buffer.getvalue().decode() for stream in (output, errors)))


def printed(*arguments: object) -> str:
    """Return what `evenrank ARGUMENTS` prints in this process, where it succeeds without a word on standard error."""
    run = evenrank(*arguments)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    return run.stdout
