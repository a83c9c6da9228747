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
from evenrank.cli.options import costs_by_name
from evenrank.dataloader.balance import STRATEGIES
from evenrank.datasets import open_store
from evenrank.preprocess.read.public import CATALOG
from evenrank.preprocess.read.times import UNITS
from tests.cli.programs import BIN, EVENRANK, ROOT, Evenrank, run_program
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS
from tests.dataloader.balance.metrics.example_steps import write as write_log
from tests.preprocess.decoded import decode, read_rows
from tests.preprocess.read.test_public import LAYOUTS, LOG_HEADER, USERS, USERS_HEADER, log_line, write

HALF_STARS = ("ml-latest-small", "ml-20m", "ml-25m", "ml-32m")


def _write_raw_files(tmp_path: Path) -> Path:
    ratings = ("userId,movieId,rating,timestamp", "1,10,3.5,1420070410", "1,11,4.0,1420070409", "2,10,0.5,1420070400")
    for name in HALF_STARS:
        write(tmp_path / "raw" / name, {"ratings.csv": ratings})
    return tmp_path / "raw"


def test_scripts_preprocess_and_inspect(tmp_path: Path) -> None:
    raw, scripts = _write_raw_files(tmp_path), ROOT / "scripts"
    command = (
        sys.executable,
        scripts / "preprocess.py",
        "--dataset",
        "ml-20m",
        "--raw-dir",
        raw,
        "--eval-fraction",
        "0",
    )
    run = run_program(*command, cwd=tmp_path)
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


def test_all_public_datasets_are_made_from_their_raw_files(here: Path, evenrank: Evenrank) -> None:
    raw = _write_raw_files(here)
    for folder, logs, users in LAYOUTS.values():
        lines = [log_line(user=user, video=20 + user, time=1_650_000_000_000 - user, play=7) for user in (1, 2, 3)]
        files = {f"data/{log}": (LOG_HEADER, *lines) for log in logs}
        write(raw / folder, {**files, f"data/{users}": (USERS_HEADER, *USERS)})
    write(raw / "ml-1m", {"ratings.dat": ("1::10::3::978300760",), "users.dat": ("1::F::1::10::48067",)})
    run = evenrank("preprocess", "--dataset", "all", "--raw-dir", raw, "--split", "none")
    assert run.returncode == 0, run.stderr
    rows = {"ml-1m": 1, **dict.fromkeys(HALF_STARS, 2), "kuairand-pure": 3, "kuairand-1k": 3, "kuairand-27k": 3}
    assert rows.keys() == CATALOG.keys()
    for name, count in rows.items():
        assert f"out/{name}/train: {count} rows" in run.stdout
    dataset = here / "out" / "kuairand-27k"
    (row,) = [row for row in decode(dataset, read_rows(dataset / "train")) if row["user_id"] == 2]
    # The same three events are in each of the four logs.
    assert (row["item_id"], row["length"]) == ([22] * 4, 4)
    assert (row["play_time_ms"], row["duration_ms"]) == ([7] * 4, [1000] * 4)
    assert open_store(dataset).columns["play_time_ms"].tolist() == [7] * 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("preprocess --dataset ml-2m", "--dataset must be one of ml-latest-small, ml-1m, ml-20m, "),
        ("preprocess --dataset synthetic --eval-fraction 7", "invalid split 'user:7.0'; expected user:FRACTION (0 "),
        (
            "preprocess --dataset synthetic --eval-fraction 0.5 --split user:0.3",
            "--eval-fraction 0.5 and --split user:0.3 both define the split; pass one of them\n",
        ),
        ("inspect nowhere", "nowhere is not a dataset: no such folder; "),
        # Options without effect, even with their default values.
        *(
            (
                f"preprocess --dataset {other} {option}",
                f"{option} applies to {where}, not to --dataset {other}; leave it out",
            )
            for option, where, other in (
                ("--users 20000", "--dataset synthetic", "custom"),
                ("--items 5", "--dataset synthetic", "ml-1m"),
                ("--lengths zipf", "--dataset synthetic", "all"),
                ("--expand ml-1m:2x2", "--dataset synthetic", "ml-1m"),
                ("--events a.csv", "--dataset custom", "ml-1m"),
                ("--label a", "--dataset custom", "all"),
                ("--timestamp-unit s", "--dataset custom", "synthetic"),
                ("--context a.csv", "--dataset custom", "synthetic"),
                ("--raw-dir raw", "--dataset other than synthetic or custom or commands with --expand", "custom"),
                ("--on-error fail", "--dataset other than synthetic or commands with --expand", "synthetic"),
            )
        ),
        (
            "preprocess --dataset ml-1m --split leave-last:1 --seed 0",
            "--seed 0 applies to --split user:FRACTION or --dataset synthetic, not to --split leave-last:1; leave it o",
        ),
        (
            "preprocess --dataset synthetic --expand ml-1m:2x2 --users 9",
            "--users 9 applies to commands without --expand, not to --expand ml-1m:2x2; leave it out",
        ),
        (
            "preprocess --dataset synthetic --expand ml-1m",
            "'ml-1m' is no expansion of MovieLens; write it like ml-20m:",
        ),
        ("preprocess --dataset synthetic --by-date", "--by-date has no effect without --requests; give both, "),
        ("preprocess --dataset synthetic --stride 4", "--stride 4 has no effect without --window; give both, "),
        (
            "simulate nowhere",
            "'nowhere' is no source of lengths; pass a folder written by `evenrank preprocess`, a .npy ",
        ),
        ("simulate run.txt", "'run.txt' is no source of lengths; "),
        ("simulate nowhere.npy", "nowhere.npy cannot be read: No such file or directory; "),
        ("simulate empty.npy", "empty.npy cannot be read (No data left in file); write the lengths again"),
        ("simulate empty.parquet", "empty.parquet cannot be read (Could not open Parquet input"),
        ("simulate bad.npy", "bad.npy must have one column of integers, the lengths, none negative; it has float64 of"),
        ("simulate negative.npy", "negative.npy must have one column of integers, the lengths, none negative; it has"),
        ("simulate none.npy", "none.npy has no lengths; choose another"),
        ("simulate two.parquet", "two.parquet must have one column of integers, the lengths, none negative; it has "),
        ("simulate empty.jsonl", "empty.jsonl has no lengths; choose another"),
        (
            "simulate run.jsonl --max-history-length 512",
            "--max-history-length 512 applies to lengths of histories, not to run.jsonl; leave it out",
        ),
        ("simulate run.jsonl --split train", "--split train applies to datasets, not to run.jsonl; leave it out"),
        ("simulate zipf --fixed-ms 5", "--fixed-ms 5 has no effect without --step-ms; give both, or leave it out"),
        ("simulate zipf --step-ms 5", "--step-ms 5 has no effect without --fixed-ms; give both, or leave it out"),
        ("simulate zipf --step-ms 5 --fixed-ms 5", "--fixed-ms 5 is a part of --step-ms 5, so it must be less"),
        ("simulate zipf --window 999 --ranks 4096", "4,096 ranks with --batch-size 32 and --window 999 are more than"),
        (
            "simulate zipf --cost quadratic",
            "--cost quadratic is unknown; give hstu, self-attention, linear, padded, a ",
        ),
        ("simulate zipf --cost .", "--cost . is not a regular file; give one that `evenrank fit` wrote"),
        ("simulate zipf --cost no_module:cost", "--cost no_module:cost cannot be imported (No module named 'no_mod"),
        ("simulate zipf --cost math:costs", "--cost math:costs cannot be imported (module 'math' has no attribute"),
        ("simulate zipf --cost math:pi", "--cost math:pi is a float; give a function of lengths, num_candidates"),
        ("simulate zipf --cost .math:pi", "--cost .math:pi cannot be imported (invalid format: '.math:pi'); check "),
        ("simulate zipf --cost :pi", "--cost :pi cannot be imported (invalid format: ':pi'); check the names"),
        ("simulate zipf --cost broken:cost", "--cost broken:cost cannot be imported ("),
        ("fit nowhere.jsonl", "nowhere.jsonl cannot be read: No such file or directory; "),
        ("fit run.jsonl", "run.jsonl has no measured times; train with a StepTimer(JsonLines(...), ...) as on_step"),
        ("fit timed.jsonl", "timed.jsonl does not say which tokens its cost counts; record the run with a cost of the"),
        ("simulate zipf --cost cost.json --fixed-ms 1 --step-ms 9", "--fixed-ms 1 applies to --cost without a fixed"),
        (
            "simulate zipf --fixed-ms 99.99999999999 --step-ms 100",
            "the fixed time is too long beside that of the samples",
        ),
        ("simulate zipf:exponent=x", "exponent must be float, got 'x'"),
        ("simulate zipf --ranks 8,x", "--ranks must be comma-separated integers such as 8,64, got '8,x'"),
        ("simulate zipf --ranks 0", "--ranks must be at least 1, got 0"),
        ("simulate zipf --strategy best", "unknown strategy 'best'; known: none, karmarkar-karp, lpt-swap"),
        ("simulate zipf --hidden 10 --heads 3", "--hidden must be a multiple of --heads, got --hidden 10 and --heads"),
        ("simulate zipf --tolerance 2", "--tolerance must be at least 0 and below 1, got 2.0"),
        ("simulate zipf --split train", "--split train applies to datasets, not to zipf; leave it out"),
        (
            "simulate zipf --strategy none,karmarkar-karp --tolerance 0.01",
            "--tolerance 0.01 applies to --strategy lpt-swap or min-move, not to --strategy none,karmarkar-karp;",
        ),
        (
            "simulate zipf --layers 8 --cost c.json",
            "--layers 8 applies to --cost hstu, self-attention or padded, not to --cost c.json; leave it out",
        ),
        ("simulate zipf --cost none.json", "none.json cannot be read as a measured cost"),
        ("simulate zipf --cost padded:none.json", "none.json cannot be read as a measured cost"),
        ("metrics nowhere.jsonl", "nowhere.jsonl cannot be read: No such file or directory; check the path and its "),
        (
            "metrics run.jsonl empty.jsonl",
            "empty.jsonl has no record yet; the job writes one after every `every` steps",
        ),
        ("metrics empty.jsonl", "empty.jsonl has no record yet; the job writes one after every `every` steps"),
        ("metrics bad.jsonl", "bad.jsonl has no record; line 1 is not a record of balancing metrics: 'step"),
        ("preprocess --dataset synthetic --out foo://bucket/x", "foo://bucket/x cannot be opened: Unrecognized filesy"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(here: Path, evenrank: Evenrank, arguments: str, message: str) -> None:
    write_log(here / "run.jsonl", *STEPS)
    (here / "empty.jsonl").touch()
    write_log(here / "timed.jsonl", *TIMED_STEPS)
    (here / "bad.jsonl").write_text('{"epoch": 0}\n')
    (here / "broken.py").write_text("def cost(\n")
    for name in ("empty.npy", "empty.parquet", "run.txt"):
        (here / name).touch()
    for name, values in (("bad", [1.5]), ("negative", [1, -1]), ("none", np.zeros(0, dtype=np.int64))):
        np.save(here / f"{name}.npy", values)
    pq.write_table(pa.table({"a": [1], "b": [2]}), here / "two.parquet")
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    run = evenrank(*arguments.split())
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert run.stderr.startswith(f"error: {message}")
    assert run.stdout == ""
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before


@pytest.mark.parametrize("command", ["inspect", "simulate", "metrics", "fit", "preprocess --dataset custom --events"])
def test_a_loop_of_links_is_an_error_of_one_line(here: Path, evenrank: Evenrank, command: str) -> None:
    (here / "loop.jsonl").symlink_to(here / "loop.jsonl")
    run = evenrank(*command.split(), "loop.jsonl")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("error: loop.jsonl ")


def test_mistakes_of_usage_and_help(evenrank: Evenrank) -> None:
    for arguments, message in (
        ("", "Missing option '--dataset'; see evenrank preprocess --help\n"),
        ("--seed x", "Invalid value for '--seed': Input should be a valid integer"),
        ("--seed 1 --seed 2", "--seed is given twice on the command line; give it once\n"),
    ):
        run = evenrank("preprocess", *arguments.split(), *["--dataset", "synthetic"] * bool(arguments))
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
        assert run.stderr.startswith(f"error: {message}")
    examples = {"preprocess": "--dataset ml-20m --raw-dir raw --out out/ml-20m", "metrics": "out/balance.jsonl"}
    for command, example in examples.items():
        assert f"evenrank {command} {example}" in evenrank(command, "--help").stdout
    assert ", ".join(STRATEGIES) in " ".join(evenrank("simulate", "--help").stdout.split())
    run = evenrank("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"evenrank {package.__version__}\n", "")
    run = evenrank()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("Usage: evenrank [OPTIONS] COMMAND [ARGS]...\n\n  The data side of multi-GPU training")
    assert run.stdout == evenrank("-h").stdout == evenrank("--help").stdout
    for command in re.findall(r"^  (\S+)  ", run.stdout.partition("Commands:")[2], re.MULTILINE):
        assert evenrank(command, "-h").stdout == evenrank(command, "--help").stdout


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


def test_the_completion_of_a_shell_is_shown(tmp_path: Path) -> None:
    run = run_program("bash", "-c", f"{EVENRANK} --show-completion; exit $?", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "complete -o default -F _evenrank_completion evenrank" in run.stdout


def test_seeds_apply_to_synthetic_data_and_to_the_split_by_user(tmp_path: Path, evenrank: Evenrank) -> None:
    synthetic = ("--dataset", "synthetic", "--users", 9, "--split", "none")
    public = ("--dataset", "ml-20m", "--raw-dir", _write_raw_files(tmp_path), "--eval-fraction", 0.5)
    out = tmp_path / "o[red]x:warning:"  # printed as it is
    for arguments in (synthetic, public):
        run = evenrank("preprocess", *arguments, "--seed", 1, "--out", out)
        assert run.returncode == 0, run.stderr
        assert f"{out}/train: " in run.stdout


def test_options_complete_the_file_of_a_custom_log_and_do_not_repeat_it(tmp_path: Path, evenrank: Evenrank) -> None:
    (tmp_path / "log.csv").write_text("uid,item_id,time,click,buy\n1,10,1420070400,0,1\n1,11,1420070401,1,1\n")
    config = tmp_path / "log.toml"
    config.write_text('events = "log.csv"\nuser_column = "uid"\ntimestamp_column = "time"\n')
    command = ("preprocess", "--dataset", "custom", "--config", config, "--out", tmp_path / "out", "--split", "none")
    options = ("--timestamp-unit", "ms", "--action-columns", "click,buy")
    run = evenrank(*command, *options, "--item-column", "item_id")
    assert run.stderr == (
        f"error: the last event of {tmp_path / 'log.csv'} is at 1970-01-17T10:27:50Z, read as whole milliseconds since "
        "1970; it is at 2015-01-01T00:00:01Z with --timestamp-unit s, or pass --allow-empty\n"
    )
    run = evenrank(*command, *options, "--item-column", "item_id", "--allow-empty")
    assert run.returncode == 0, run.stderr
    store = open_store(tmp_path / "out")
    assert store.columns["action"].tolist() == [2, 3]
    assert store.columns["timestamp_ms"].tolist() == [1420070400, 1420070401]
    with config.open("a") as file:
        file.write('item_column = "item_id"\ntimestamp_unit = "s"\n')
    run = evenrank(*command, *options, "--allow-empty")  # the command line wins over the file
    assert run.returncode == 0, run.stderr
    assert open_store(tmp_path / "out").columns["timestamp_ms"].tolist() == [1420070400, 1420070401]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_that_loops_are_compiled_is_said_on_a_terminal(tmp_path: Path, is_terminal: bool) -> None:
    program = f"""
import sys
from pathlib import Path
from evenrank.cli.main import main
from evenrank.core import compiled as loops
sys.stderr.isatty = lambda: {is_terminal}
try:
    main()
finally:
    loops._give_notice(Path())
"""
    run = run_program(sys.executable, "-c", program, "--version", cwd=tmp_path)
    assert run.stderr == "compiling, once per machine, about 25 s\n" * is_terminal


def test_help_fits_a_terminal_and_says_what_goes_where(evenrank: Evenrank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = ("preprocess", "inspect", "simulate", "metrics", "fit", "inspect-balance", "demo", "warmup")
    helps = {command: evenrank(command, "--help").stdout for command in commands}
    for command, text in helps.items():
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert not re.search(r"<\w+", text), command  # the name of a type
    assert re.findall(r"^(\w.*):$", helps["simulate"], re.MULTILINE) == [
        *("Arguments", "Steps", "Balancing", "Cost", "Options")
    ]
    for shown in ("--out FOLDER ", "--split RULE ", "--user-column COLUMN ", "--columns COLUMN,... ", "--users COUNT "):
        assert f"  {shown}" in helps["preprocess"]


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
