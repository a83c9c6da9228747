import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.multiprocessing.spawn import ProcessRaisedException
from typer.testing import CliRunner, Result

import report
from end_to_end.experiments import Run, read_runs
from end_to_end.summary import with_unbalanced
from evenrank.core.errors import ConfigError
from local_ranks import LocalRanks
from tests.cli.programs import ROOT

train = importlib.import_module("train")
EXPERIMENTS = ROOT / "scripts" / "bench" / "experiments"
FILE = """
[workload]
steps = 10
item_rows = 50
[lengths]
short = "uniform:low=1,high=9"
long = "uniform:low=9,high=90"
[settings]
hidden = 16
[run]
unbalanced = { balance = "none" }
"no exchange" = { item_rows = 7, gpus = 1 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "small.toml").write_text(FILE)
    return path


@pytest.mark.parametrize(("name", "count"), [("smoke", 4), ("refit", 10), ("hstu", 26)])
def test_experiments_in_the_repository_can_be_read(name: str, count: int) -> None:
    assert len({run.path(Path()) for run in read_runs(EXPERIMENTS / f"{name}.toml", gpus=4)}) == count


def test_runs_have_settings_of_the_file_and_their_own(file: Path) -> None:
    runs = read_runs(file, gpus=2, changed={"steps": 20}, lengths=["long"])
    assert [(run.name, run.gpus, run.workload.item_rows, run.workload.steps) for run in runs] == [
        ("unbalanced", 2, 50, 20),
        ("no exchange", 1, 7, 20),
    ]
    assert [(run.settings.balance, run.settings.hidden) for run in runs] == [("none", 16), ("no-exchange", 16)]
    assert {run.workload.lengths for run in runs} == {"uniform:low=9,high=90"}
    assert [run.path(Path("out")) for run in read_runs(file, gpus=2, only=["no exchange"])] == [
        Path("out/short/no-exchange.json"),
        Path("out/long/no-exchange.json"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[run]", "[runs]", "small.toml has the unknown key 'runs'"),
        ("[run]", "[run", "small.toml is not TOML: "),
        ("hidden", "hiden", "small.toml: run 'unbalanced': the table has the unknown key 'hiden'"),
        ("steps = 10", "steps = 2", "run 'unbalanced': steps must be at least rounds, got steps=2 and rounds=3"),
        ("uniform:low=1", "zip:low=1", "small.toml: run 'unbalanced': "),
        ("item_rows = 7", "window = 4", "run 'no exchange': window = 4 changes batches, which are compared"),
        ("short", "brief", "small.toml: the options: --lengths 'short' is not in the file; known are brief, long"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(file: Path, before: str, after: str, message: str) -> None:
    file.write_text(FILE.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        read_runs(file, gpus=2, lengths=["short"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path) -> Callable[..., Result]:
    """Return the command in this process, whose runs are not made; `fail` has the name and the reason of a failure."""

    def run_in_processes(ranks: LocalRanks, function: Any, run: Run) -> report.Row:
        assert ranks.log is not None
        if run.name == failing:
            ranks.log.write_text(f"torch.{reason}")
            raise ProcessRaisedException(f"a trace\n{reason}\n", 0, 0)
        typer.echo(f"ran {run.name} on {ranks.count} {ranks.device}, {ranks.seconds:g} s")
        values = {"lengths": run.lengths, "run": run.name, "live_over_even": [1.0, 1.5], "tokens_per_s": [2.0, 4.0]}
        return {**values, "conditions": run.conditions, "machine": {"cores": 2}}

    failing, reason = "", ""

    def invoke(*arguments: str, fail: tuple[str, str] = ("", "")) -> Result:
        nonlocal failing, reason
        failing, reason = fail
        app = typer.Typer()
        app.command()(train.train)
        options = [str(file), "--out", str(tmp_path / "out"), "--gpus", "2", "--lengths", "short", *arguments]
        return CliRunner().invoke(app, options)

    monkeypatch.setattr(LocalRanks, "run", run_in_processes)
    monkeypatch.setattr(train, "_count_gpus", lambda: 0)
    return invoke


def test_a_table_is_measured_kept_and_reported(command: Callable[..., Result], tmp_path: Path) -> None:
    first = command("--only", "unbalanced", "--time-limit", "2")
    assert (first.exit_code, first.stdout.splitlines()[0]) == (0, "ran unbalanced on 2 cpu, 120 s")
    second = command()
    ran = [line for line in second.stdout.splitlines() if line.startswith("ran")]
    assert ran == ["ran no exchange on 1 cpu, 3600 s"]
    assert "| short | unbalanced | 1.250 ± 0.250 | 3.000 ± 1.000 | 1.000 ± 0.333 |" in second.stdout
    for name in ("rows.jsonl", "report.md", "plot.png"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    assert "ran unbalanced" in command("--rerun").stdout
    assert "ran unbalanced" in command("--steps", "11").stdout  # under other conditions


@pytest.mark.processes  # git, for the commit
def test_a_failed_run_is_a_row_and_is_measured_again(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason, text, code in (("Error: bad luck", "Error: bad luck", 1), ("OutOfMemoryError: x", "out of memory", 0)):
        failed = command(fail=("unbalanced", reason))
        assert failed.exit_code == code
        assert f'"failure": "{text}"' in failed.stdout
    assert "ran unbalanced" in command().stdout
    clock = iter([0.0, 61.0])
    monkeypatch.setattr(train.time, "monotonic", lambda: next(clock))
    failed = command("--rerun", "--time-limit", "1", "--only", "unbalanced", fail=("unbalanced", "exit code 1"))
    assert '"failure": "took longer than the limit of 1 minutes"' in failed.stdout


def test_speed_is_relative_to_the_run_that_differs_in_balancing_alone(file: Path) -> None:
    runs = read_runs(file, gpus=2)
    rows = [{"lengths": run.lengths, "conditions": run.conditions, "tokens_per_s": [4.0, 6.0]} for run in runs]
    settings = runs[0].conditions["settings"]
    balanced = {"balance": "all-to-all", "strategy": "min-move", "refit_every": 5}
    for changed in (balanced, {**balanced, "hidden": 32}):
        conditions = {**runs[0].conditions, "settings": {**settings, **changed}}
        rows.append({"lengths": "short", "conditions": conditions, "tokens_per_s": [5.0, 10.0]})
    failed = {"lengths": "short", "conditions": rows[-2]["conditions"], "failure": "out of memory"}
    found = [row["x_unbalanced"] for row in with_unbalanced([*rows, failed])]
    #       short: itself, other tables; long: the same;     balanced,   other width, failed
    assert found == [[0.8, 1.2], None, [0.8, 1.2], None, [1.0, 2.0], None, None]
