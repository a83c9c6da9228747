import sys
from pathlib import Path

from evenrank.core.compiled import cache_folder
from tests.cli.programs import Evenrank, run_program

# Prints how many functions are compiled by a log, a loader and a simulation.
USE = """
import sys
from numba.core import event
from evenrank.cli.main import main
from evenrank.cli.options import CostOptions, make_cost
from evenrank.dataloader import LoaderConfig, Negatives, Requests, Targets, TimeWindows, build_loader
from evenrank.dataloader.balance import BalanceConfig
with event.install_recorder("numba:compile") as recorder:
    for arguments in (
        "preprocess --dataset custom --events log.csv --split time:last:1h --requests 60",
        "preprocess --dataset synthetic --users 200 --split user:0.5 --requests 60",
        "simulate out/synthetic --ranks 4 --steps 8 --window 2",
    ):
        sys.argv = ["evenrank", *arguments.split()]
        try:
            main()
        except SystemExit as stopped:
            assert not stopped.code, arguments
    balance = BalanceConfig(cost=make_cost(CostOptions(cost="linear")), strategy="min-move")
    candidates = {"max_num_candidates": 2, "negatives": Negatives(count=3, by="popularity")}
    orders = (TimeWindows(every="1d"), Requests(), Targets(within="time"))
    filtered = {"order": Targets(where="item_id > 3", segment=0.5), "max_num_candidates": 1}
    for options in ({}, filtered, *({"order": order, **candidates} for order in orders)):
        config = LoaderConfig(batch_size=4, **options)
        next(iter(build_loader("out/synthetic", config, rank=0, world_size=2, balance=balance)))
print(len(recorder.buffer))
"""
WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(("polars", "torch")))
sys.argv = ["evenrank", "warmup"]
from evenrank.cli.main import main
main()
"""


def test_after_a_warm_up_nothing_is_compiled(evenrank: Evenrank, tmp_path: Path) -> None:
    first, second = evenrank("warmup"), evenrank("warmup")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.endswith(f"; cache: {cache_folder()}\n")
    assert second.stdout == f"everything is compiled already; cache: {cache_folder()}\n"
    rows = "".join(f"{user},{user + item},{1_500_000_000 + 600 * item}\n" for user in range(3) for item in range(9))
    (tmp_path / "log.csv").write_text(f"user_id,item_id,timestamp\n{rows}")
    run = run_program(sys.executable, "-c", USE, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("\n0\n")


def test_parts_whose_packages_are_missing_are_left_out(tmp_path: Path) -> None:
    run = run_program(sys.executable, "-c", WITHOUT_EXTRAS, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    *left_out, last = run.stdout.splitlines()
    assert [line.partition(";")[0] for line in left_out] == [
        "preprocessing is left out: the package polars is not installed",
        "training is left out: the package torch is not installed",
    ]
    assert last.endswith(f"; cache: {cache_folder()}")
