import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import evenrank as package
from evenrank.cli.inspect_dataset import inspect_command
from evenrank.cli.main import run_command
from evenrank.cli.options import costs_by_name
from evenrank.dataloader.balance import STRATEGIES
from evenrank.datasets import open_store
from evenrank.preprocess.read.times import UNITS
from tests.cli.programs import BIN, EVENRANK, ROOT, Evenrank, run_program
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS
from tests.dataloader.balance.metrics.example_steps import write as write_log

COMMANDS = ("preprocess", "inspect", "simulate", "metrics", "fit", "inspect-balance", "demo", "warmup")
MISTAKES = [
    pytest.param(*line.split(" -> ", 1), id=line[:70])
    for line in (Path(__file__).parent / "mistakes.txt").read_text().splitlines()[1:]
]


def test_scripts_preprocess_and_inspect(tmp_path: Path) -> None:
    raw, scripts = tmp_path / "raw", ROOT / "scripts"
    (raw / "ml-20m").mkdir(parents=True)
    ratings = ("userId,movieId,rating,timestamp", "1,10,3.5,1420070410", "1,11,4.0,1420070409", "2,10,0.5,1420070400")
    (raw / "ml-20m" / "ratings.csv").write_text("\n".join(ratings))
    command: tuple[str | Path, ...] = (sys.executable, scripts / "preprocess.py", "--dataset", "ml-20m")
    run = run_program(*command, "--raw-dir", raw, "--eval-fraction", "0", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[:5] == [
        "timestamps: seconds since 1970, first event 2015-01-01T00:00:00Z, last event 2015-01-01T00:00:10Z",
        "out/ml-20m/train: 2 rows, 3 interactions",
        "out/ml-20m/eval: 0 rows, 0 interactions",
        "user_id: dense (2 distinct, largest 2), numbered 1 to 2 by first appearance",
        "item_id: dense (2 distinct, largest 11), numbered 1 to 2 by first appearance",
    ]
    assert lines[-1] == "next: evenrank inspect out/ml-20m"
    assert run.stderr == ""  # no progress where standard error is not a terminal
    run = run_program(sys.executable, scripts / "inspect_data.py", tmp_path / "out" / "ml-20m")
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    for row in ("train 2 3 1", "all, each event once 2 3 2", "p50 1 -", "max 2 -", "item_id 3"):
        assert row.split() in rows


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exits_with_2(here: Path, evenrank: Evenrank, arguments: str, message: str) -> None:
    write_log(here / "run.jsonl", *STEPS)
    (here / "empty.jsonl").touch()
    write_log(here / "timed.jsonl", *TIMED_STEPS)
    (here / "bad.jsonl").write_text('{"epoch": 0}\n')
    (here / "broken.py").write_text("def cost(\n")
    (here / "loop.jsonl").symlink_to(here / "loop.jsonl")
    for name in ("empty.npy", "empty.parquet", "run.txt"):
        (here / name).touch()
    for name, values in (("bad", [1.5]), ("negative", [1, -1]), ("none", np.zeros(0, dtype=np.int64))):
        np.save(here / f"{name}.npy", values)
    pq.write_table(pa.table({"a": [1], "b": [2]}), here / "two.parquet")
    before = {path.name: path.read_bytes() for path in here.iterdir() if path.exists()}
    run = evenrank(*arguments.split())
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert run.stderr.startswith(f"error: {message}")
    assert run.stdout == ""
    assert {path.name: path.read_bytes() for path in here.iterdir() if path.exists()} == before


def test_help_and_version_are_printed_by_every_command(evenrank: Evenrank, monkeypatch: pytest.MonkeyPatch) -> None:
    run = evenrank("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"evenrank {package.__version__}\n", "")
    run = evenrank()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("Usage: evenrank [OPTIONS] COMMAND [ARGS]...\n\n  The data side of multi-GPU training")
    assert run.stdout == evenrank("-h").stdout == evenrank("--help").stdout
    assert tuple(re.findall(r"^  (\S+)  ", run.stdout.partition("Commands:")[2], re.MULTILINE)) == COMMANDS
    monkeypatch.setenv("COLUMNS", "80")
    helps = {command: evenrank(command, "--help").stdout for command in COMMANDS}
    for command, text in helps.items():
        assert text == evenrank(command, "-h").stdout
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert not re.search(r"<\w+", text), command  # the name of a type
    assert re.findall(r"^(\w.*):$", helps["simulate"], re.MULTILINE) == [
        *("Arguments", "Steps", "Balancing", "Cost", "Options")
    ]
    assert ", ".join(STRATEGIES) in " ".join(helps["simulate"].split())
    for shown in ("--out FOLDER ", "--split RULE ", "--user-column COLUMN ", "--columns COLUMN,... ", "--users COUNT "):
        assert f"  {shown}" in helps["preprocess"]
    assert "evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m" in helps["preprocess"]


def test_a_script_of_one_command_has_its_options_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inspect_data.py", "--help"])
    with pytest.raises(SystemExit):
        run_command(inspect_command)
    assert re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, re.M) == ["--html", "--json", "--help"]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("wa", ["warmup"]),
        ("simulate x --str", ["--strategy"]),
        ("simulate x --strategy ", STRATEGIES),
        ("simulate x --strategy none,l", ["none,lpt-swap"]),
        ("simulate x --cost ", costs_by_name()),
        ("inspect-balance x --strategy m", ["min-move"]),
        ("preprocess --dataset ml-1", ["ml-1m"]),
        ("preprocess --engine ", ["local", "ray"]),
        ("preprocess --timestamp-unit ", UNITS),
        ("preprocess --config no.toml --seed 1 --seed 2 --on-error ", ["fail", "skip"]),
    ],
)
def test_shells_complete_commands_options_and_choices(
    evenrank: Evenrank, monkeypatch: pytest.MonkeyPatch, line: str, completed: Collection[str]
) -> None:
    words = ["evenrank", *line.split(" ")]
    for name, value in {"_EVENRANK_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    run = evenrank()
    assert (run.returncode, sorted(run.stdout.split()), run.stderr) == (0, sorted(completed), "")


def test_that_loops_are_compiled_is_said_on_a_terminal(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from evenrank.core import compiled as loops
for is_terminal in (False, True):
    sys.stderr.isatty = lambda: is_terminal
    loops._give_notice(Path())
"""
    assert (
        run_program(sys.executable, "-c", program, cwd=tmp_path).stderr == "compiling, once per machine, about 25 s\n"
    )


SYNTHETIC = ("preprocess", "--dataset", "synthetic", "--split", "none", "--out", "out", "--users")
# Runs the command until the new folder is about to be put in place, prints a line, and waits there.
STOPPED_COMMAND = """
import signal
from evenrank.preprocess import replace
def stop_here(partial, out, old):
    print("written", flush=True)
    signal.pause()
replace._put_in_place = stop_here
from evenrank.cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_leaves_no_partial_output(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", STOPPED_COMMAND, *SYNTHETIC, "100"]
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
from evenrank.preprocess import replace
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
def test_a_signal_during_a_removal_leaves_nothing(here: Path, evenrank: Evenrank, program: str, users: int) -> None:
    assert evenrank(*SYNTHETIC, 5).returncode == 0
    run = run_program(sys.executable, "-c", program, *SYNTHETIC, "9", cwd=here)
    assert (run.returncode, run.stderr) == (128 + signal.SIGTERM, "error: stopped by SIGTERM\n")
    assert len(open_store(here / "out")) == users
    assert [path.name for path in here.iterdir()] == ["out"]


def test_a_signal_while_python_exits_is_no_traceback(tmp_path: Path) -> None:
    stop = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGTERM)"
    program = f"{stop}; from evenrank.cli.main import main; main()"
    run = run_program(sys.executable, "-c", program, "--version", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (-signal.SIGTERM, "")


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    # A limit on the size of files stands in for a full disk: writing fails in the same places.
    command = f"ulimit -f 64; exec '{EVENRANK}' preprocess --dataset synthetic --users 3000 --out out"
    # Coverage of the tests could not write its own file either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    run = run_program("bash", "-c", command, cwd=tmp_path, environment=environment)
    assert run.returncode == 2
    message = r"error: out could not be written: .*; it is unchanged, check permissions and space\n"
    assert re.fullmatch(message, run.stderr), run.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_under_torchrun_sees_each_sample_once_and_shows_progress_on_one_rank(
    small_dataset: Path, tmp_path: Path
) -> None:
    command = (BIN / "torchrun", "--nproc_per_node", "2", "-m", "evenrank", "inspect-balance", small_dataset)
    as_on_terminal = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}
    run = run_program(*command, "--batch-size", "8", cwd=tmp_path, environment=as_on_terminal)
    assert run.returncode == 0, run.stderr
    printed, shown = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in (run.stdout, run.stderr))
    assert "importing torch" in shown
    steps = re.findall(r"lpt-swap \S+ (\d+)/(\d+) ", shown)
    assert steps[-1][0] == steps[-1][1]
    assert run.stderr.count("\x1b[?25l") == 3  # rank 0 hides the cursor during two spinners and a bar
    assert "on 2 ranks: each seen exactly once and unaltered" in printed
    row = next(line.split() for line in printed.splitlines() if line.split()[1:2] == ["lpt-swap"])
    idle_before, idle_after = (float(cell.removesuffix("%")) for cell in row[2:4])
    assert idle_before > 5 > idle_after


def test_inspecting_balance_without_torchrun_shows_the_command_to_run(small_dataset: Path) -> None:
    for command in ((EVENRANK, "inspect-balance"), (sys.executable, ROOT / "scripts" / "inspect_balance.py")):
        run = run_program(*command, small_dataset)
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
        assert run.stderr.startswith("error: WORLD_SIZE is not set")
        assert run.stderr.endswith(f"run torchrun --nproc_per_node 4 -m evenrank inspect-balance {small_dataset}\n")


def test_the_demo_ends_with_a_table_of_all_strategies_and_a_plot(tmp_path: Path) -> None:
    run = run_program(sys.executable, "-m", "evenrank", "demo", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    rows = {cells[1]: cells for line in run.stdout.splitlines() if (cells := line.split())[:1] == ["4"]}
    assert list(rows) == [*STRATEGIES, "lpt-swap*"]
    before, after = ([float(row[column].removesuffix("%")) for row in rows.values()] for column in (2, 3))
    assert after[0] == before[0] > 10 * max(after[1:])
    assert len(set(before)) == 1
    assert rows["lpt-swap*"][2:9] == rows["lpt-swap"][2:9]
    assert rows["lpt-swap*"][9] == "0%"
    assert "13,999 samples, each seen exactly once and unaltered" in run.stdout
    assert (tmp_path / "out" / "demo" / "balance.png").read_bytes().startswith(b"\x89PNG")
