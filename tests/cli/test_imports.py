import sys
from dataclasses import replace
from pathlib import Path

from tests.cli.programs import run_program
from tests.dataloader.balance.metrics.example_steps import TIMED_STEPS, write

RUN_ALL = """
import sys
sys.modules.update(dict.fromkeys(%r))
from evenrank.cli.main import main
for arguments in %r:
    sys.argv = ["evenrank", *arguments]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, arguments
slow = {"matplotlib", "numba", "numpy", "polars", "pyarrow", "rich", "torch"}
print("imported:", *sorted(slow & sys.modules.keys()))
"""


def test_help_imports_no_slow_package(tmp_path: Path) -> None:
    commands = ["preprocess", "inspect", "simulate", "metrics", "fit", "inspect-balance", "demo", "warmup"]
    arguments = [["--help"], ["--version"], *([command, "--help"] for command in commands)]
    run = run_program(sys.executable, "-c", RUN_ALL % ([], arguments), cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.endswith("imported:\n")
    for command in commands:
        assert f"Usage: evenrank {command} " in run.stdout


def test_planning_and_reports_do_without_torch(tmp_path: Path, small_dataset: Path) -> None:
    write(tmp_path / "log.jsonl", *[replace(step, step=number) for number in range(20) for step in TIMED_STEPS])
    data = str(small_dataset)
    reports = [["inspect", data, "--html", "data.html"], ["metrics", "log.jsonl"]]
    simulate = ["simulate", "log.jsonl", "--ranks", "2", "--steps", "1"]
    arguments = [*reports, simulate, ["simulate", data, *simulate[2:]]]
    run = run_program(sys.executable, "-c", RUN_ALL % (["torch", "torchrec"], arguments), cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "min-move" in run.stdout
    assert "<svg" in (tmp_path / "data.html").read_text()
