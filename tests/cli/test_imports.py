"""What the commands import: help is quick, and planning needs no torch."""

import sys
from pathlib import Path

import pytest

from tests.cli.programs import run_program
from tests.dataloader.balance.test_writers import STEPS, write

SHOW_HELP = """
import sys
from evenrank.cli.main import main
for arguments in (["--help"], ["--version"], *([command, "--help"] for command in %r)):
    sys.argv = ["evenrank", *arguments]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, arguments
slow = {"matplotlib", "numba", "numpy", "polars", "pyarrow", "rich", "torch"}
print("imported:", *sorted(slow & sys.modules.keys()))
"""

WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, torchrec=None)
from evenrank.cli.main import main
main()
"""


def test_help_imports_no_slow_package(tmp_path: Path) -> None:
    commands = ["preprocess", "inspect", "simulate", "metrics", "inspect-balance", "demo"]
    run = run_program(sys.executable, "-c", SHOW_HELP % commands, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.endswith("imported:\n")
    for command in commands:
        assert f"Usage: evenrank {command} " in run.stdout


@pytest.mark.parametrize("command", ["inspect", "simulate", "metrics"])
def test_a_command_does_without_torch(tmp_path: Path, small_dataset: Path, command: str) -> None:
    write(tmp_path / "log.jsonl", *STEPS)
    arguments: dict[str, list[str | Path]] = {
        "inspect": [small_dataset, "--html", "page.html"],
        "simulate": [small_dataset, "--ranks", "2", "--steps", "1"],
        "metrics": ["log.jsonl", "--html", "page.html"],
    }
    run = run_program(sys.executable, "-c", WITHOUT_TORCH, command, *arguments[command], cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "min-move" in run.stdout if command == "simulate" else "<svg" in (tmp_path / "page.html").read_text()
