"""What only processes show: programs, ranks, signals, and what is imported or compiled."""

import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import evenrank.preprocess as preprocess_package
from evenrank.core.compiled import cache_folder
from evenrank.dataloader.balance import STRATEGIES
from evenrank.datasets import open_store
from evenrank.preprocess import SyntheticConfig, preprocess
from evenrank.preprocess import replace as replacing
from tests.cli.programs import ROOT, Finished, evenrank, printed, run_program
from tests.dataloader.balance.metrics.example_steps import TIMED_STEPS
from tests.dataloader.balance.metrics.example_steps import write as write_log
from tests.ranks import RankPool

SCRIPTS = ROOT / "scripts"
SYNTHETIC = "preprocess --dataset synthetic --split none --out out --users"


def test_scripts_preprocess_and_inspect(tmp_path: Path) -> None:
    (tmp_path / "raw" / "ml-20m").mkdir(parents=True)
    ratings = ("userId,movieId,rating,timestamp", "1,10,3.5,1420070410", "1,11,4.0,1420070409", "2,10,0.5,1420070400")
    (tmp_path / "raw" / "ml-20m" / "ratings.csv").write_text("\n".join(ratings))
    options = ("--dataset", "ml-20m", "--raw-dir", "raw", "--eval-fraction", "0")
    run = run_program(sys.executable, SCRIPTS / "preprocess.py", *options, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")  # no progress where standard error is not a terminal
    times, train, eval_, *_, last = run.stdout.splitlines()
    assert times == "timestamps: seconds since 1970, first event 2015-01-01T00:00:00Z, last event 2015-01-01T00:00:10Z"
    assert [train, eval_] == [f"out/ml-20m/{text} interactions" for text in ("train: 2 rows, 3", "eval: 0 rows, 0")]
    assert last == "next: evenrank inspect out/ml-20m"
    run = run_program(sys.executable, SCRIPTS / "inspect_data.py", tmp_path / "out" / "ml-20m")
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    for row in ("train 2 3 1", "all, each event once 2 3 2", "p50 1 -", "max 2 -", "item_id 3"):
        assert row.split() in rows


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


def test_a_signal_leaves_no_partial_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED_COMMAND, *SYNTHETIC.split(), "100"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        assert (tmp_path / ".out.partial").is_dir()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=250)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "error: stopped by SIGTERM\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("stops_before", "users"), [(True, 5), (False, 9)], ids=["new folder", "old folder"])
def test_a_signal_during_a_removal_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, stops_before: bool, users: int
) -> None:
    remove = replacing._remove

    def stop(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    def stop_again(partial: Path) -> None:
        if partial.exists():
            stop()
        remove(partial)

    printed(*SYNTHETIC.split(), 5)
    monkeypatch.setattr(replacing, "_remove", stop_again)
    if stops_before:
        monkeypatch.setattr(replacing, "_put_in_place", stop)
    run = evenrank(*SYNTHETIC.split(), 9)
    assert (run.returncode, run.stderr) == (128 + signal.SIGTERM, "error: stopped by SIGTERM\n")
    assert len(open_store(here / "out")) == users
    assert [path.name for path in here.iterdir()] == ["out"]


def test_a_signal_while_python_exits_is_no_traceback_and_compiling_is_said_on_a_terminal_alone(tmp_path: Path) -> None:
    at_exit = "atexit.register(os.kill, os.getpid(), signal.SIGTERM); atexit.register(compiled._give_notice, Path())"
    program = f"import atexit, os, signal; from pathlib import Path; from evenrank.core import compiled; {at_exit}"
    run = run_program(sys.executable, "-c", f"{program}; from evenrank.cli.main import main; main()", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (-signal.SIGTERM, "")


def test_a_full_disk_is_one_line_and_leaves_nothing(here: Path) -> None:
    # A limit on the size of files stands in for a full disk: writing fails in the same places.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        run = evenrank(*SYNTHETIC.split(), 3000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.returncode == 2
    message = r"error: out could not be written: .*; it is unchanged, check permissions and space\n"
    assert re.fullmatch(message, run.stderr), run.stderr
    assert list(here.iterdir()) == []


def _inspect(rank: int, world_size: int, path: Path) -> Finished:
    """Inspect the balance on a rank, as under torchrun on a terminal; the group of the pool stands in for its own."""
    import torch.distributed as dist

    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "unused", "MASTER_PORT": "unused"}
    variables |= {"FORCE_COLOR": 1, "TERM": "xterm", "COLUMNS": 80}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return evenrank("inspect-balance", path, "--batch-size", 8)


def test_an_epoch_on_two_ranks_sees_each_sample_once_and_shows_progress_on_one(
    small_dataset: Path, ranks: RankPool
) -> None:
    first, second = ranks.run(2, _inspect, small_dataset)
    assert (first.returncode, second.returncode, second.stdout, second.stderr) == (0, 0, "", "")
    text, shown = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in (first.stdout, first.stderr))
    assert "waiting for the other ranks" in shown
    steps = re.findall(r"lpt-swap \S+ (\d+)/(\d+) ", shown)
    assert steps[-1][0] == steps[-1][1]
    assert first.stderr.count("\x1b[?25l") == 3  # the cursor is hidden during two spinners and a bar
    assert "on 2 ranks: each seen exactly once and unaltered" in text
    row = next(line.split() for line in text.splitlines() if line.split()[1:2] == ["lpt-swap"])
    idle_before, idle_after = (float(cell.removesuffix("%")) for cell in row[2:4])
    assert idle_before > 5 > idle_after


# Prints whether the group of a rank is alive, after the command has destroyed it.
OF_GROUP = """
import sys, weakref
import torch.distributed as dist
from evenrank.cli.main import main
init, groups = dist.init_process_group, []
def start(*args, **options):
    init(*args, **options)
    groups.append(weakref.ref(dist.group.WORLD))
dist.init_process_group = start
try:
    main()
finally:
    print("alive:", [group() is not None for group in groups])
"""


def test_no_thread_of_the_group_is_left_when_the_command_ends_which_could_abort_the_process(
    small_dataset: Path,
) -> None:
    of_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = (sys.executable, "-P", "-c", OF_GROUP, "inspect-balance", small_dataset)
    run = run_program(*command, environment={**os.environ, **of_rank})
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "alive: [False]"), run.stderr


def test_inspecting_balance_without_torchrun_shows_the_command_to_run(small_dataset: Path, tmp_path: Path) -> None:
    for program in ((SCRIPTS / "inspect_balance.py",), ("-m", "evenrank", "inspect-balance")):
        run = run_program(sys.executable, *program, small_dataset, cwd=tmp_path)
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
        assert run.stderr.startswith("error: WORLD_SIZE is not set")
        assert run.stderr.endswith(f"run torchrun --nproc_per_node 4 -m evenrank inspect-balance {small_dataset}\n")


@pytest.mark.processes
def test_the_demo_ends_with_a_table_of_all_strategies_and_a_plot(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer users than the demo has, and on as many ranks."""
    few = SyntheticConfig(num_users=2000)
    monkeypatch.setattr(
        preprocess_package, "preprocess", lambda config, **others: preprocess(replace(config, synthetic=few), **others)
    )
    text = printed("demo")
    rows = {cells[1]: cells for line in text.splitlines() if (cells := line.split())[:1] == ["4"]}
    assert list(rows) == [*STRATEGIES, "lpt-swap*"]
    before, after = ([float(row[column].removesuffix("%")) for row in rows.values()] for column in (2, 3))
    assert after[0] == before[0] > 10 * max(after[1:])
    assert len(set(before)) == 1
    assert rows["lpt-swap*"][2:9] == rows["lpt-swap"][2:9]
    assert rows["lpt-swap*"][9] == "0%"
    assert f"{len(open_store(here / 'out/demo/data')):,} samples, each seen exactly once and unaltered" in text
    assert (here / "out" / "demo" / "balance.png").read_bytes().startswith(b"\x89PNG")


# Runs commands of `evenrank` in one process without some packages, and prints which slow ones are imported.
RUN_ALL = """
import sys
hidden, commands = {!r}.split(), {!r}
sys.modules.update(dict.fromkeys(hidden))
from evenrank.cli.main import main
for arguments in commands:
    sys.argv = ["evenrank", *arguments.split()]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, arguments
slow = {{"matplotlib", "numba", "numpy", "polars", "pyarrow", "rich", "torch"}}
print("imported:", *sorted(slow & sys.modules.keys() - hidden))
"""


def _run_all(folder: Path, *commands: str, hidden: str = "", code: str = RUN_ALL) -> str:
    run = run_program(sys.executable, "-c", code.format(hidden, commands), cwd=folder)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def test_help_imports_no_slow_package(tmp_path: Path) -> None:
    commands = ["preprocess", "inspect", "simulate", "metrics", "fit", "inspect-balance", "demo", "warmup"]
    shown = _run_all(tmp_path, "--help", "--version", *(f"{command} --help" for command in commands))
    assert shown.endswith("imported:\n")


def test_planning_and_reports_do_without_torch_and_warm_ups_say_what_they_leave_out(
    tmp_path: Path, small_dataset: Path
) -> None:
    write_log(tmp_path / "log.jsonl", *TIMED_STEPS)
    commands = [f"inspect {small_dataset} --html data.html", "metrics log.jsonl"]
    commands += [f"simulate {source} --ranks 2 --steps 1" for source in ("log.jsonl", small_dataset)]
    shown = _run_all(tmp_path, *commands, "warmup", hidden="polars torch torchrec")
    assert shown.count("min-move") > 1
    assert "<svg" in (tmp_path / "data.html").read_text()
    *left_out, last, _ = shown.splitlines()[-4:]
    assert [line.partition(";")[0] for line in left_out] == [
        "preprocessing is left out: the package polars is not installed",
        "training is left out: the package torch is not installed",
    ]
    assert last.endswith(f"; cache: {cache_folder()}")


def test_a_small_simulation_does_without_numba_and_shows_the_same(tmp_path: Path) -> None:
    # One sample sets the time of the steps, so that the planner of windows runs too.
    small = "simulate zipf:exponent=1.2 --ranks 4 --steps 8 --batch-size 8"
    text, _, imported = _run_all(tmp_path, small).partition("imported: ")
    assert "--window 8" in text
    assert text == printed(*small.split())
    assert {"numpy", "numba"} & {*imported.split()} == {"numpy"}


# Prints how many functions are compiled by commands and by a loader of what they have made.
COUNT_COMPILED = f"""
from numba.core import event
listener = event.RecordingListener()
event.register("numba:compile", listener)
import evenrank.cli.reports.simulation  # or the small simulation leaves functions plain Python
{RUN_ALL}
from evenrank.dataloader import Cross, LoaderConfig, Negatives, Pools, Requests, StochasticLength, Targets, TimeWindows
from evenrank.dataloader import build_loader
from evenrank.dataloader.balance import BalanceConfig, LinearCost
balance = BalanceConfig(cost=LinearCost(interleave_actions=False), strategy="min-move")
candidates = dict(max_num_candidates=2, negatives=Negatives(count=3, by="popularity"))
orders = [dict(order=order, **candidates) for order in (TimeWindows(every="1d"), Requests(), Targets(within="time"))]
filtered = dict(order=Targets(where="item_id > 3", segment=0.5), pools=Pools(values=(1,)), max_num_candidates=1)
filtered |= dict(stochastic_length=StochasticLength(alpha=1.5), negatives=Negatives(count=2))
filtered["crosses"] = dict(pair=Cross(of=("user_id", "item_id"), size=9))
for options in (dict(), filtered, *orders):
    config = LoaderConfig(batch_size=4, **options)
    next(iter(build_loader("out/synthetic", config, rank=0, world_size=2, balance=balance)))
print(len(listener.buffer))
"""


def test_after_a_warm_up_nothing_is_compiled(tmp_path: Path) -> None:
    assert printed("warmup").endswith(f"; cache: {cache_folder()}\n")
    assert printed("warmup") == f"everything is compiled already; cache: {cache_folder()}\n"
    rows = "".join(f"{user},{user + item},{1_500_000_000 + 600 * item}\n" for user in range(3) for item in range(9))
    (tmp_path / "log.csv").write_text(f"user_id,item_id,timestamp\n{rows}")
    shown = _run_all(
        tmp_path,
        "preprocess --dataset custom --events log.csv --split time:last:1h --requests 60",
        "preprocess --dataset synthetic --users 200 --split user:0.5 --requests 60",
        "simulate out/synthetic --ranks 4 --steps 8 --window 2",
        code=COUNT_COMPILED,
    )
    assert shown.endswith("\n0\n")
