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
            ["preprocess", "--dataset", "synthetic", "--eval-fraction", "0.5", "--split", "user:0.3"],
            "error: --eval-fraction 0.5 and --split user:0.3 both define the split; pass one of them\n",
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dataset custom --users 20000", "--users applies to --dataset synthetic, not to --dataset custom"),
        ("--dataset ml-1m --items 5", "--items applies to --dataset synthetic, not to --dataset ml-1m"),
        ("--dataset all --lengths zipf", "--lengths applies to --dataset synthetic, not to --dataset all"),
        ("--dataset ml-1m --events a.csv", "--events applies to --dataset custom, not to --dataset ml-1m"),
        ("--dataset all --config a.toml", "--config applies to --dataset custom, not to --dataset all"),
        (
            "--dataset synthetic --timestamp-unit s",
            "--timestamp-unit applies to --dataset custom, not to --dataset synth",
        ),
        ("--dataset synthetic --context a.csv", "--context applies to --dataset custom, not to --dataset synthetic"),
        ("--dataset custom --raw-dir raw", "--raw-dir applies to public datasets, not to --dataset custom"),
        (
            "--dataset synthetic --on-error fail",
            "--on-error applies to datasets that are read from files, not to --dat",
        ),
        (
            "--dataset ml-1m --split leave-last:1 --seed 0",
            "--seed applies to --split user:FRACTION and to --dataset synthetic, not to --dataset ml-1m with --split "
            "leave-last:1; change one of them",
        ),
        ("--dataset synthetic --by-date", "--by-date applies to --requests SECONDS, which is missing; add it"),
        ("--dataset synthetic --stride 4", "--stride applies to --window, which is missing; add it"),
    ],
)
def test_options_without_effect_are_refused_even_with_their_default_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evenrank: Callable[..., Finished], arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = evenrank("preprocess", *arguments.split())
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_seeds_apply_to_synthetic_data_and_to_the_split_by_user(
    tmp_path: Path, evenrank: Callable[..., Finished]
) -> None:
    synthetic = ("--dataset", "synthetic", "--users", 9, "--seed", 1, "--out", tmp_path / "synthetic")
    public = ("--dataset", "ml-20m", "--raw-dir", _write_raw_files(tmp_path), "--seed", 1, "--out", tmp_path / "public")
    for arguments in ((*synthetic, "--split", "none"), (*public, "--eval-fraction", 0.5)):
        run = evenrank("preprocess", *arguments)
        assert run.returncode == 0, run.stderr


def test_options_complete_the_file_of_a_custom_log_and_do_not_repeat_it(
    tmp_path: Path, evenrank: Callable[..., Finished]
) -> None:
    (tmp_path / "log.csv").write_text("uid,item_id,time,click,buy\n1,10,5000,0,1\n1,11,6000,1,1\n")
    config = tmp_path / "log.toml"
    config.write_text('events = "log.csv"\nuser_column = "uid"\ntimestamp_column = "time"\n')
    command = ("preprocess", "--dataset", "custom", "--config", config, "--out", tmp_path / "out", "--split", "none")
    run = evenrank(*command, "--timestamp-unit", "ms", "--action-columns", "click,buy")
    assert run.stderr == f"error: {config} lacks item_column; add it\n"
    run = evenrank(*command, "--timestamp-unit", "ms", "--action-columns", "click,buy", "--item-column", "item_id")
    assert run.returncode == 0, run.stderr
    store = open_store(tmp_path / "out")
    assert store.events["action"].tolist() == [2, 3]
    assert store.events["timestamp_ms"].tolist() == [5000, 6000]
    with config.open("a") as file:
        file.write('item_column = "item_id"\ntimestamp_unit = "s"\n')
    run = evenrank(*command, "--timestamp-unit", "s")
    assert run.returncode == 2
    assert run.stderr == f"error: --timestamp-unit is also in {config} (timestamp_unit); give it once\n"


def test_the_installed_program_prints_errors_without_a_traceback(tmp_path: Path) -> None:
    run = run_program(EVENRANK, "inspect", "nowhere", cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("error: nowhere is not a dataset: ")


# Runs the command until the new folder is about to be put in place, prints a line, and waits there.
STOPPED_COMMAND = """
import signal
from evenrank.preprocess.output import replace
def stop_here(partial, out, old):
    print("written", flush=True)
    signal.pause()
replace._put_in_place = stop_here
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


# Runs the command with a further signal to stop wherever its new or old folder is about to be removed.
STOPPED_TWICE = """
import os, signal
from evenrank.preprocess.output import replace
remove = replace._remove
def stop_again(partial):
    if partial.exists():
        os.kill(os.getpid(), signal.SIGTERM)
    remove(partial)
replace._remove = stop_again
""" + STOPPED_COMMAND.replace("signal.pause()", "os.kill(os.getpid(), signal.SIGTERM)")


@pytest.mark.parametrize(
    ("program", "users"),
    [(STOPPED_TWICE, 5), (STOPPED_TWICE.replace("_put_in_place = stop_here", "stop_here = None"), 9)],
    ids=["new folder", "old folder"],
)
def test_a_signal_during_the_removal_of_a_folder_leaves_nothing_of_it(tmp_path: Path, program: str, users: int) -> None:
    command = ("preprocess", "--dataset", "synthetic", "--split", "none", "--out", "out", "--users")
    run = run_program(EVENRANK, *command, "5", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    run = run_program(sys.executable, "-c", program, *command, "9", cwd=tmp_path)
    assert run.returncode == 128 + signal.SIGTERM
    assert run.stderr == "error: stopped by SIGTERM\n"
    assert len(open_store(tmp_path / "out")) == users
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_signal_while_python_exits_is_no_traceback(tmp_path: Path) -> None:
    stop = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGTERM)"
    program = f"{stop}; from evenrank.cli.main import main; main()"
    run = run_program(sys.executable, "-c", program, "--version", cwd=tmp_path)
    assert run.returncode == -signal.SIGTERM
    assert run.stderr == ""


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
