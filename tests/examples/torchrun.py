"""Runs an example as its reader does: on two processes of torchrun, from another folder than the checkout."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def lines_of(example: str, data: Path, cwd: Path, *arguments: str) -> list[str]:
    """Return the lines that an example prints to standard output; fail if its exit code is not 0."""
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "2", str(EXAMPLES / f"{example}.py")]
    job = subprocess.run(
        [*command, "--data", str(data), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert job.returncode == 0, job.stderr
    return job.stdout.splitlines()


def numbers_of(line: str) -> list[float]:
    """Return the numbers in a line, those next to letters, such as that of recall@10, left out."""
    words = line.replace("%", " ").replace(",", " ").split()
    return [float(word) for word in words if word.replace(".", "", 1).isdecimal()]
