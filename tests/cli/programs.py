"""Run the commands as users do: as the installed program, and other programs of the environment."""

import subprocess
import sys
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
