"""The pieces of code of pages of the documentation, and how tests run them as a reader does."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent


def page(name: str) -> Path:
    """Return a page by its name: README.md is in the root, all others are below `docs`."""
    return ROOT / name if name == "README.md" else ROOT / "docs" / name


def section(path: Path, heading: str) -> str:
    """Return what is below a heading of the second level; "" stands for the whole page."""
    text = path.read_text()
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0] if heading else text


def code_of(text: str, language: str = "python") -> list[str]:
    """Return the pieces of code in this language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def blocks(path: Path, language: str = "python") -> list[str]:
    """Return the pieces of code of a page that are in this language, in order."""
    return code_of(path.read_text(), language)


def commands(text: str) -> list[str]:
    """Return the commands in the shell's code of a text."""
    return "".join(code_of(text, "bash")).replace("\\\n", " ").splitlines()


def run_program(rank: int, world_size: int, folder: Path, program: str, arguments: Sequence[str] = ()) -> str:
    """Run a program in a folder, which may have modules, on this rank of a RankPool; return what it prints.

    The process group of the pool stands in for the one that the program would make.
    """
    import torch.distributed as dist

    before, printed = Path.cwd(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["program.py", *arguments]),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        os.chdir(folder)
        try:
            exec(program, {"__name__": "__main__"})
        finally:
            os.chdir(before)
            sys.modules.pop("my_project", None)
    return printed.getvalue()


def torchrun(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of a folder on 2 ranks, there."""
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "2", program, *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return run


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """Make this process the only rank of a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
