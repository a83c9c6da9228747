"""The pieces of code of a documentation page, and programs made of them."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: Path, language: str = "python") -> list[str]:
    """Return the pieces of code of a page that are in this language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def torchrun(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of a folder on 2 ranks, there."""
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "2", program, *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return run
