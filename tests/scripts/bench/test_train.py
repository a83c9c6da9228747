import importlib
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.multiprocessing.spawn import ProcessRaisedException
from typer.testing import CliRunner, Result

from end_to_end.experiments import Run, read_runs
from end_to_end.summary import with_unbalanced
from evenrank.core.errors import ConfigError
from local_ranks import LocalRanks
from tests.cli.programs import ROOT

train = importlib.import_module("train")
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
"no exchange" = { item_rows = 7, gpus = 1, hidden = 32 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "small.toml").write_text(FILE)
    return path


def test_runs_have_settings_of_the_file_and_their_own(file: Path) -> None:
    runs = read_runs(file, gpus=2, changed={"steps": 20}, lengths=["long"])
    found = [(run.name, run.gpus, run.workload.item_rows, run.settings.balance, run.settings.hidden) for run in runs]
    assert found == [("unbalanced", 2, 50, "none", 16), ("no exchange", 1, 7, "no-exchange", 32)]
    assert {(run.workload.steps, run.workload.lengths) for run in runs} == {(20, "uniform:low=9,high=90")}
    paths = [run.path(Path("out")) for run in read_runs(file, gpus=2, only=["no exchange"])]
    assert paths == [Path("out/short/no-exchange.json"), Path("out/long/no-exchange.json")]
    for name, count in (("smoke", 4), ("refit", 10), ("hstu", 22)):
        shipped = read_runs(ROOT / "scripts" / "bench" / "experiments" / f"{name}.toml", gpus=4)
        assert len({run.path(Path()) for run in shipped}) == count


MISTAKES = [
    ("[run]", "[runs]", "small.toml has the unknown key 'runs'"),
    ("[run]", "[run", "small.toml is not TOML: "),
    ("hidden", "hiden", "small.toml: run 'unbalanced': the table has the unknown key 'hiden'"),
    ("steps = 10", "steps = 2", "run 'unbalanced': steps must be at least rounds, got steps=2 and rounds=3"),
    ("item_rows = 7", "window = 4", "run 'no exchange': window = 4 changes batches, which are compared"),
    ("short", "brief", "small.toml: the options: --lengths 'short' is not in the file; known are brief, long"),
]


def test_a_mistake_in_a_file_is_one_line(file: Path) -> None:
    for before, after, message in MISTAKES:
        file.write_text(FILE.replace(before, after))
        with pytest.raises(ConfigError) as caught:
            read_runs(file, gpus=2, lengths=["short"])
        assert message in str(caught.value)


@pytest.mark.processes  # git, for the commit
def test_a_table_is_measured_kept_and_reported_and_failed_runs_are_rows_that_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path
) -> None:
    failure = ""

    def run_in_processes(ranks: LocalRanks, function: Any, run: Run) -> dict[str, Any]:
        assert ranks.log is not None
        if run.name == "unbalanced" and failure:
            ranks.log.write_text(f"torch.{failure}")
            raise ProcessRaisedException(f"a trace\n{failure}\n", 0, 0)
        typer.echo(f"ran {run.name} on {ranks.count} {ranks.device}, {ranks.seconds:g} s")
        values = {"lengths": run.lengths, "run": run.name, "live_over_even": [1.0, 1.5], "tokens_per_s": [2.0, 4.0]}
        return {**values, "conditions": run.conditions, "machine": {"cores": 2}}

    def invoke(*arguments: str) -> Result:
        (app := typer.Typer()).command()(train.train)
        options = [str(file), "--out", str(tmp_path / "out"), "--gpus", "2", "--lengths", "short", *arguments]
        return CliRunner().invoke(app, options)

    monkeypatch.setattr(LocalRanks, "run", run_in_processes)
    monkeypatch.setattr(train, "_count_gpus", lambda: 0)
    for failure, text, code in (("Error: bad luck", "Error: bad luck", 1), ("OutOfMemoryError: x", "out of memory", 0)):  # noqa: B007
        failed = invoke("--only", "unbalanced")
        assert (failed.exit_code, f'"failure": "{text}"' in failed.stdout) == (code, True)
    failure = ""
    assert "ran unbalanced on 2 cpu, 120 s" in invoke("--only", "unbalanced", "--time-limit", "2").stdout
    second = invoke().stdout
    assert [line for line in second.splitlines() if line.startswith("ran ")] == ["ran no exchange on 1 cpu, 3600 s"]
    assert "| short | unbalanced | 1.250 ± 0.250 | 3.000 ± 1.000 | 1.000 ± 0.333 |" in second
    for name in ("rows.jsonl", "report.md", "plot.png"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    for again in (("--rerun",), ("--steps", "11")):  # under other conditions
        assert "ran unbalanced" in invoke(*again).stdout
    failure, clock = "exit code 1", iter([0.0, 61.0])
    monkeypatch.setattr(train.time, "monotonic", lambda: next(clock))
    late = invoke("--rerun", "--time-limit", "1", "--only", "unbalanced").stdout
    assert '"failure": "took longer than the limit of 1 minutes"' in late


def test_speed_is_relative_to_the_run_that_differs_in_balancing_alone(file: Path) -> None:
    runs = read_runs(file, gpus=2)
    rows = [{"lengths": run.lengths, "conditions": run.conditions, "tokens_per_s": [4.0, 6.0]} for run in runs]
    balanced = {**runs[0].conditions["settings"], "balance": "all-to-all", "strategy": "min-move", "refit_every": 5}
    for settings in (balanced, {**balanced, "hidden": 32}):
        conditions = {**runs[0].conditions, "settings": settings}
        rows.append({"lengths": "short", "conditions": conditions, "tokens_per_s": [5.0, 10.0]})
    rows.append({"lengths": "short", "conditions": rows[-2]["conditions"], "failure": "out of memory"})
    # Short: itself, other tables; long: the same; balanced, another width, failed.
    found = [row["x_unbalanced"] for row in with_unbalanced(rows)]
    assert found == [[0.8, 1.2], None, [0.8, 1.2], None, [1.0, 2.0], None, None]
