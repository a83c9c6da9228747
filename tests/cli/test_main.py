"""The commands as people run them: processes, exit codes, what is printed where."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evenrank.datasets import open_store
from tests.preprocess.sources.test_kuairand import LAYOUTS, LOG_HEADER, USERS, USERS_HEADER, log_line, write

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ML_20M = "userId,movieId,rating,timestamp\n1,10,3.5,100\n1,11,4.0,90\n2,10,0.5,50\n"


def _run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=120)


def _raw(tmp_path: Path) -> Path:
    (tmp_path / "raw" / "ml-20m").mkdir(parents=True)
    (tmp_path / "raw" / "ml-20m" / "ratings.csv").write_text(ML_20M)
    return tmp_path / "raw"


@pytest.mark.parametrize(
    "command", [[sys.executable, ROOT / "scripts" / "preprocess.py"], [BIN / "evenrank", "preprocess"]]
)
def test_preprocess_then_inspect(tmp_path: Path, command: list[str | Path]) -> None:
    raw = _raw(tmp_path)
    run = _run(*command, "--dataset", "ml-20m", "--raw-dir", raw, "--eval-fraction", "0", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "out/ml-20m/train: 2 rows, 3 interactions\nout/ml-20m/eval: 0 rows, 0 interactions\n"
    assert run.stderr == ""  # quiet where nobody looks
    for inspect in ([sys.executable, ROOT / "scripts" / "inspect_data.py"], [BIN / "evenrank", "inspect"]):
        shown = _run(*inspect, tmp_path / "out" / "ml-20m")
        words = [line.split() for line in shown.stdout.splitlines()]
        assert ["train", "2", "3", "1"] in words
        assert ["all", "2", "3", "2"] in words
        assert ["p50", "1", "-"] in words
        assert ["max", "2", "-"] in words
        assert ["item_id", "12"] in words


def test_all_public_datasets_are_made_from_their_raw_files(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for layout in LAYOUTS.values():
        folder, logs, users = layout
        lines = [log_line(user=user, video=20 + user, time=1_650_000_000_000 - user, play=7) for user in (1, 2, 3)]
        files = {f"data/{log}": (LOG_HEADER, *lines) for log in logs}
        write(raw / folder, {**files, f"data/{users}": (USERS_HEADER, *USERS)})
    write(raw / "ml-20m", {"ratings.csv": tuple(ML_20M.splitlines())})
    write(raw / "ml-1m", {"ratings.dat": ("1::10::3::100",), "users.dat": ("1::F::1::10::48067",)})
    run = _run(BIN / "evenrank", "preprocess", "--dataset", "all", "--raw-dir", raw, "--split", "none", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for name, rows in (("ml-1m", 1), ("ml-20m", 2), ("kuairand-pure", 3), ("kuairand-1k", 3), ("kuairand-27k", 3)):
        assert f"out/{name}/train: {rows} rows" in run.stdout
    (row, *_) = [
        row for row in pq.read_table(tmp_path / "out" / "kuairand-27k" / "train").to_pylist() if row["user_id"] == 2
    ]
    # The same three events in each of the four logs.
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
            "error: no dataset is called 'ml-2m'; there are ml-1m, ml-20m, kuairand-pure, ",
        ),
        (
            ["preprocess", "--dataset", "synthetic", "--eval-fraction", "7"],
            "error: 'user:7.0' is not a split; there are user:FRACTION (0 to 1), ",
        ),
        (["preprocess"], "Error: Missing option '--dataset'.\n"),
        (["preprocess", "--dataset", "synthetic", "--seed", "x"], "Error: Invalid value for '--seed'"),
        (["inspect", "nowhere"], "error: nowhere is not a dataset: no such folder; make one with"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    run = _run(BIN / "evenrank", *arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    assert list(tmp_path.iterdir()) == []


# Runs the command up to where the new folder would be put in place, says so, and waits there.
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
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-c", STOPPED_COMMAND, "preprocess", "--dataset", "synthetic", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        assert (tmp_path / ".out.partial").is_dir()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors == f"error: stopped by {signal.Signals(number).name}; nothing half-written is left\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    # A limit on the size of files stands in for a disk that is full: writing fails in the same places.
    command = f"ulimit -f 64; exec '{BIN / 'evenrank'}' preprocess --dataset synthetic --users 3000 --out out"
    run = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert re.fullmatch(r"error: out could not be written: .*; nothing was changed there\n", run.stderr), run.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    out = tmp_path / "o[red]x"
    run = _run(BIN / "evenrank", "preprocess", "--dataset", "ml-20m", "--raw-dir", _raw(tmp_path), "--out", out)
    assert run.returncode == 0, run.stderr
    assert f"{out}/train: " in run.stdout


def test_help_teaches_with_an_example() -> None:
    run = _run(BIN / "evenrank", "preprocess", "--help")
    assert run.returncode == 0
    assert "evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m\n" in run.stdout


def test_an_epoch_on_four_processes_sees_each_sample_once(small_dataset: Path) -> None:
    command = [BIN / "torchrun", "--nproc_per_node", "4", ROOT / "scripts" / "inspect_balance.py", small_dataset]
    run = _run(*command, "--batch-size", "8")
    assert run.returncode == 0, run.stderr
    assert "on 4 ranks: each seen exactly once and unaltered" in run.stdout
    row = next(line.split() for line in run.stdout.splitlines() if line.strip().startswith("lpt-swap"))
    assert float(row[1]) > 1.05 > float(row[2])


def test_inspecting_balance_without_torchrun_says_how(small_dataset: Path) -> None:
    run = _run(sys.executable, ROOT / "scripts" / "inspect_balance.py", small_dataset)
    assert run.returncode == 2
    assert run.stderr.startswith("error: run it under torchrun")
    assert run.stderr.count("\n") == 1
