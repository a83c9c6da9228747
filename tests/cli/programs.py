"""Run the commands as users do: as the installed program, and other programs of the environment."""

import contextlib
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EVENRANK = BIN / "evenrank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Evenrank = Callable[..., Finished]  # the fixture `evenrank`


def run_program(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Finished:
    """Run a program in a process of its own."""
    run = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=280)
    return Finished(returncode=run.returncode, stdout=run.stdout, stderr=run.stderr)


def run_on_terminal(*command: str | Path) -> Finished:
    """Run a program with a terminal of 80 columns as its standard error; `stderr` has all that was written to it."""
    terminal, of_program = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # no process has the terminal open any more
            while block := os.read(terminal, 4096):
                shown.extend(block)

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    pipe = subprocess.PIPE
    run = subprocess.run(command, stdout=pipe, stderr=of_program, text=True, cwd=ROOT, env=environment, timeout=280)
    os.close(of_program)
    reader.join()
    os.close(terminal)
    return Finished(returncode=run.returncode, stdout=run.stdout, stderr=shown.decode())
