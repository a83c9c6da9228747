import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from end_to_end import runner
from end_to_end.experiments import Experiments
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask
from tests.cli.programs import ROOT, run_program
from tests.scripts.bench.end_to_end.small_tables import TABLE, result_of

BENCH = ROOT / "scripts" / "bench"
train = importlib.import_module("train")
WITHOUT_TORCH = f"""
import runpy, sys

sys.modules["torch"] = None
sys.path[:0] = [{str(BENCH)!r}]
runpy.run_path({str(BENCH / "train.py")!r}, run_name="__main__")
"""


class Command:
    """The command in this process, on a host without GPUs, with runs that only leave a result."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}

    def run(self, *arguments: str | Path) -> Result:
        app = typer.Typer()
        app.command()(train.train)
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def run_tasks(self, tasks: Sequence[WorkerTask], *, limit_seconds: float) -> list[RunResult]:
        results = [result_of(task, failure=self.failures.get(task.run.name)) for task in tasks]
        for task, result in zip(tasks, results, strict=True):
            assert WorkerTask.load(task.task_file) == task
            typer.echo(f"ran {task.title} {task.workload.steps} {task.workload.warmup_steps} {limit_seconds}")
            result.save(task.result)
        return results


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    def write_report(out: Path, experiments: Experiments) -> None:
        typer.echo(f"report {out.name} {len(experiments.runs)}")

    found = Command()
    monkeypatch.setattr("end_to_end.reports.report.write_report", write_report)
    monkeypatch.setattr(runner, "run_tasks", found.run_tasks)
    monkeypatch.setattr(train, "_count_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(TABLE)
    return file


@pytest.mark.parametrize(("name", "count"), [("smoke", 4), ("scaling", 12), ("hstu", 26), ("refit", 8)])
def test_a_dry_run_prints_commands_and_writes_nothing(command: Command, tmp_path: Path, name: str, count: int) -> None:
    file = BENCH / f"experiments/{name}.toml"
    shown = command.run(file, "--dry-run", "--gpus", "4")
    lines = [shlex.split(line) for line in shown.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == count
    for *_, worker, task in lines:
        assert worker == str(BENCH / "end_to_end" / "worker.py")
        assert Path(task).is_relative_to(tmp_path / "out" / "bench" / name)
    cluster = ("--runner", "slurm", "--nodes", "2", "--gpus-per-node", "2", "--account", "us")
    scripts = command.run(file, "--dry-run", *cluster).stdout.splitlines()
    assert scripts.count("#!/bin/bash") == scripts.count("#SBATCH --account=us") == count
    submitted = [shlex.split(line) for line in scripts if line.startswith("sbatch")]
    assert [len(words) for words in submitted] == [3] + [4] * (count - 1)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_needs_neither_torch_nor_a_gpu_and_a_mistake_is_one_line(tmp_path: Path, table: Path) -> None:
    shown = run_program(sys.executable, "-c", WITHOUT_TORCH, table, "--dry-run", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("# this host has no GPU: shown for --gpus 4\n# short: baseline\n")
    assert shown.stdout.count("--nproc_per_node 4") == 5
    wrong = run_program(sys.executable, "-c", WITHOUT_TORCH, "no.toml", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: no.toml cannot be read: No such file or directory; check the path\n"


def test_processes_are_as_many_as_gpus(command: Command, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.run(BENCH / "experiments/smoke.toml", "--dry-run").stdout.count("--nproc_per_node 2") == 4
    monkeypatch.setattr(train, "_count_gpus", lambda: 2)
    assert "--gpus is 4, this host has 2" in str(command.run(table, "--gpus", "4").exception)
    assert command.run(table).stdout.splitlines()[-1] == "report small 3"


def test_a_table_runs_and_continues(command: Command, tmp_path: Path, table: Path) -> None:
    options = (table, "--gpus", "2", "--steps", "20", "--warmup-steps", "3", "--time-limit", "2")
    first = command.run(*options, "--lengths", "short", "--only", "baseline")
    assert (first.exit_code, first.stdout.splitlines()) == (0, ["ran short: baseline 20 3 120.0", "report small 3"])
    second = command.run(*options, "--lengths", "short")
    assert second.stdout.splitlines() == [
        f"# kept: short: baseline ({tmp_path}/out/bench/small/short/baseline.json)",
        *("ran short: halved heads 20 3 120.0", "ran short: measured cost 20 3 120.0", "report small 3"),
    ]
    third = command.run(table, "--gpus", "2", "--only", "baseline", "--lengths", "short")
    assert third.stdout.splitlines()[0] == "# again: short: baseline, because workload.steps was 20 and is 10"


def test_a_routing_is_that_of_the_runs_with_sharded_tables(command: Command, tmp_path: Path) -> None:
    options = (BENCH / "experiments/smoke.toml", "--out", "there", "--routing", "hash_roundrobin")
    assert command.run(*options).exit_code == 0
    settings = [WorkerTask.load(path).run.settings for path in (tmp_path / "there").rglob("*.task.json")]
    routings = {"replicated": "continuous", "sharded": "hash_roundrobin"}
    assert all(one.routing == routings.pop(one.embeddings, "continuous") for one in settings)
    assert not routings
    wrong = command.run(*options[:-1], "best")
    assert "routing must be one of continuous, roundrobin, hash_roundrobin, got 'best'" in str(wrong.exception)


def test_a_report_can_be_made_alone_and_the_exit_code_is_of_runs(command: Command, tmp_path: Path, table: Path) -> None:
    out = (table, "--out", "there")
    missing = command.run(*out, "--report-only")
    assert f"there are no results in {tmp_path}/there; run the table first" in str(missing.exception)
    with runner.hold(tmp_path / "there"):
        ended = command.run(*out, "--gpus", "2")
    assert f"another command runs the table in {tmp_path}/there; wait for it" in str(ended.exception)
    assert not (tmp_path / "there" / "short").exists()
    for failure, code in (("ValueError: bad luck", 1), ("out of memory", 0)):
        command.failures["halved heads"] = failure
        ended = command.run(*out, "--gpus", "2")
        assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (code, "report there 3")
    assert command.run(*out, "--report-only").stdout == "report there 3\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "choose a number of processes with --gpus"),
        ("--gpus 2 --only x", "--only 'x' is not in the file; known are baseline, halved-heads"),
        ("--report-only --dry-run", "--report-only and --dry-run are two different things to do; choose one"),
        ("--gpus 2 --routing roundrobin", "--routing is for sharded tables, which no run has; leave it out"),
        ("--gpus 2 --steps 1", "steps must be at least rounds, got steps=1 and rounds=3"),
        ("--gpus 2 --partition x", "are for --runner slurm; add it"),
        ("--runner slurm", "--runner slurm takes --gpus-per-node, and not --gpus"),
        ("--runner slurm --gpus-per-node 2", "there is no sbatch on the PATH"),
    ],
)
def test_mistakes(command: Command, table: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ended = command.run(table, *arguments.split())
    assert message in str(ended.exception)
    assert ended.stdout == ""
    assert not Path("out").exists()  # it was found before anything was written
