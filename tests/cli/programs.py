"""Run the commands as users do: as the installed program, and other programs of the environment."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EVENRANK = BIN / "evenrank"


Finished = subprocess.CompletedProcess[str]
Evenrank = Callable[..., Finished]  # the fixture `evenrank`


def run_program(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Finished:
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=280)
