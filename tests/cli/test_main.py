"""The commands as people run them: exit codes, signals, and what is printed where."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import evenrank as package
from evenrank.datasets import open_store
from tests.cli.programs import BIN, EVENRANK, ROOT, Finished, run_on_terminal, run_program
from tests.preprocess.sources.test_kuairand import LAYOUTS, LOG_HEADER, USERS, USERS_HEADER, log_line, write

ML_20M = "userId,movieId,rating,timestamp\n1,10,3.5,100\n1,11,4.0,90\n2,10,0.5,50\n"


def _write_raw_files(tmp_path: Path) -> Path:
    write(tmp_path / "raw" / "ml-20m", {"ratings.csv": tuple(ML_20M.splitlines())})
    return tmp_path / "raw"


@pytest.mark.parametrize(
    ("preprocess", "inspect"),
    [
        ([sys.executable, ROOT / "scripts" / "preprocess.py"], [sys.executable, ROOT / "scripts" / "inspect_data.py"]),
        ([EVENRANK, "preprocess"], [EVENRANK, "inspect"]),
    ],
    ids=["scripts", "evenrank"],
)
def test_preprocess_then_inspect(tmp_path: Path, preprocess: list[str | Path], inspect: list[str | Path]) -> None:
    raw = _write_raw_files(tmp_path)
    run = run_program(*preprocess, "--dataset", "ml-20m", "--raw-dir", raw, "--eval-fraction", "0", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "out/ml-20m/train: 2 rows, 3 interactions\nout/ml-20m/eval: 0 rows, 0 interactions\n"
    assert run.stderr == ""  # no progress where standard error is not a terminal
    run = run_program(*inspect, tmp_path / "out" / "ml-20m")
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert ["train", "2", "3", "1"] in rows
    assert ["all", "2", "3", "2"] in rows
    assert ["p50", "1", "-"] in rows
    assert ["max", "2", "-"] in rows
    assert ["item_id", "12"] in rows


def test_all_public_datasets_are_made_from_their_raw_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evenrank: Callable[..., Finished]
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = _write_raw_files(tmp_path)
    for layout in LAYOUTS.values():
        folder, logs, users = layout
        lines = [log_line(user=user, video=20 + user, time=1_650_000_000_000 - user, play=7) for user in (1, 2, 3)]
        files = {f"data/{log}": (LOG_HEADER, *lines) for log in logs}
        write(raw / folder, {**files, f"data/{users}": (USERS_HEADER, *USERS)})
    write(raw / "ml-1m", {"ratings.dat": ("1::10::3::100",), "users.dat": ("1::F::1::10::48067",)})
    run = evenrank("preprocess", "--dataset", "all", "--raw-dir", raw, "--split", "none")
    assert run.returncode == 0, run.stderr
    for name, rows in (("ml-1m", 1), ("ml-20m", 2), ("kuairand-pure", 3), ("kuairand-1k", 3), ("kuairand-27k", 3)):
        assert f"out/{name}/train: {rows} rows" in run.stdout
    (row, *_) = [
        row for row in pq.read_table(tmp_path / "out" / "kuairand-27k" / "train").to_pylist() if row["user_id"] == 2
    ]
    # The same three events are in each of the four logs.
    assert row["item_id"] == [22] * 4
    assert row["play_time_ms"] == [7] * 4
    assert row["duration_ms"] == [1000] * 4
    assert row["length"] == 4
    store = open_store(tmp_path / "out" / "kuairand-27k")
    assert store.events["play_time_ms"].tolist() == [7] * 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["preprocess", "--dataset", "ml-2m"],
            "error: unknown dataset 'ml-2m'; known: ml-1m, ml-20m, kuairand-pure, ",
        ),
        (
            ["preprocess", "--dataset", "synthetic", "--eval-fraction", "7"],
            "error: invalid split 'user:7.0'; expected user:FRACTION (0 to 1), ",
        ),
        (
            ["preprocess", "--dataset", "synthetic", "--eval-fraction", "0.5", "--split", "none"],
            "error: --eval-fraction 0.5 and --split none both define the split; pass one of them\n",
        ),
        (
            ["preprocess", "--dataset", "ml-1m", "--events", "log.csv"],
            "error: --config, --events and --context describe custom data, got --dataset ml-1m; pass --dataset custom",
        ),
        (
            ["preprocess", "--dataset", "synthetic", "--by-date"],
            "error: --by-date has no effect without requests; add --requests SECONDS\n",
        ),
        (["preprocess"], "Error: Missing option '--dataset'.\n"),
        (["preprocess", "--dataset", "synthetic", "--seed", "x"], "Error: Invalid value for '--seed'"),
        (["inspect", "nowhere"], "error: nowhere is not a dataset: no such folder; "),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evenrank: Callable[..., Finished],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = evenrank(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == (1 if message.startswith("error: ") else 4)  # Typer's errors show the usage
    assert run.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_installed_program_prints_errors_without_a_traceback(tmp_path: Path) -> None:
    run = run_program(EVENRANK, "inspect", "nowhere", cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("error: nowhere is not a dataset: ")


# Runs the command until the new folder is about to be put in place, prints a line, and waits there.
STOPPED_COMMAND = """
import signal
from evenrank.preprocess.output import atomic_folder
def stop_here(partial, out):
    print("written", flush=True)
    signal.pause()
atomic_folder._put_in_place = stop_here
from evenrank.cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_leaves_no_partial_output(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", STOPPED_COMMAND, "preprocess", "--dataset", "synthetic", "--out", "out"]
    command += ["--users", "100"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        assert (tmp_path / ".out.partial").is_dir()
        process.send_signal(number)
        _, errors = process.communicate(timeout=250)
    assert process.returncode == code
    assert errors == f"error: stopped by {number.name}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    # A limit on the size of files stands in for a full disk: writing fails in the same places.
    command = f"ulimit -f 64; exec '{EVENRANK}' preprocess --dataset synthetic --users 3000 --out out"
    # Coverage of the tests could not write its own file either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    run = run_program("bash", "-c", command, cwd=tmp_path, environment=environment)
    assert run.returncode == 2
    assert re.fullmatch(
        r"error: out could not be written: .*; it is unchanged, check permissions and space\n", run.stderr
    ), run.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_are_printed_as_they_are(tmp_path: Path, evenrank: Callable[..., Finished]) -> None:
    out = tmp_path / "o[red]x:warning:"
    run = evenrank("preprocess", "--dataset", "ml-20m", "--raw-dir", _write_raw_files(tmp_path), "--out", out)
    assert run.returncode == 0, run.stderr
    assert f"{out}/train: " in run.stdout


def test_help_has_examples(evenrank: Callable[..., Finished]) -> None:
    run = evenrank("preprocess", "--help")
    assert run.returncode == 0
    assert "evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m\n" in run.stdout


def test_the_version_is_that_of_the_package(evenrank: Callable[..., Finished]) -> None:
    run = evenrank("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"evenrank {package.__version__}\n", "")


def test_an_epoch_under_torchrun_sees_each_sample_once_and_shows_progress_on_one_rank(small_dataset: Path) -> None:
    torchrun = (BIN / "torchrun", "--nproc_per_node", "2")
    run = run_on_terminal(*torchrun, "-m", "evenrank", "inspect-balance", small_dataset, "--batch-size", "8")
    assert run.returncode == 0, run.stderr
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", run.stderr)
    assert "importing torch" in shown
    steps = re.findall(r"lpt-swap \S+ (\d+)/(\d+) ", shown)
    assert steps[-1][0] == steps[-1][1]
    assert run.stderr.count("\x1b[?25l") == 3  # rank 0 hides the cursor during two spinners and a bar
    assert "on 2 ranks: each seen exactly once and unaltered" in run.stdout
    row = next(line.split() for line in run.stdout.splitlines() if line.strip().startswith("lpt-swap"))
    assert float(row[1]) > 1.05 > float(row[2])


def test_inspecting_balance_without_torchrun_shows_the_command_to_run(small_dataset: Path) -> None:
    for command in ((BIN / "evenrank", "inspect-balance"), (sys.executable, ROOT / "scripts" / "inspect_balance.py")):
        run = run_program(*command, small_dataset)
        assert run.returncode == 2
        assert run.stderr.startswith("error: WORLD_SIZE is not set")
        assert run.stderr.endswith(f"run torchrun --nproc_per_node 4 -m evenrank inspect-balance {small_dataset}\n")
        assert run.stderr.count("\n") == 1


def test_the_package_runs_as_the_command(tmp_path: Path) -> None:
    run = run_program(sys.executable, "-m", "evenrank", "--version", cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"evenrank {package.__version__}\n", "")
