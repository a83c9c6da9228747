"""Runs an example as its reader does: on processes of torchrun, from another folder than the checkout."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(example: str, data: Path, cwd: Path, *arguments: object, num_ranks: int = 2) -> str:
    """Return what an example prints; it must succeed, and write nothing to standard error."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", str(num_ranks)]
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / f"{example}.py"), "--data", str(data), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # or torchrun says that it sets it
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def numbers_of(line: str) -> list[float]:
    """Return the numbers in a line, those next to letters, such as that of recall@10, left out."""
    words = line.replace("%", " ").replace(",", " ").split()
    return [float(word) for word in words if word.replace(".", "", 1).isdecimal()]
