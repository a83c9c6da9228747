import os
import sys
from pathlib import Path

import numpy as np
import pytest

from evenrank.dataloader.balance import MeasuredCost
from tests.cli.programs import EVENRANK, Evenrank, run_program
from tests.dataloader.balance.metrics.example_steps import TIMED_STEPS, write


def _rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]


def test_a_dataset_is_simulated_in_80_columns(small_dataset: Path) -> None:
    options = ("--ranks", "2,4096", "--batch-size", "4", "--steps", "2")
    run = run_program(EVENRANK, "simulate", small_dataset, *options, environment={**os.environ, "COLUMNS": "80"})
    assert (run.returncode, run.stderr) == (0, "")
    settings, *lines = run.stdout.splitlines()
    assert settings == (
        f"{small_dataset}: 2 steps of 4 samples per rank, histories of at most 512 events; cost: hstu of 8 layers of "
        "width 1024 with 4 heads"
    )
    assert max(len(line) for line in lines if not line.startswith("With 4,096 ranks")) <= 80
    rows = _rows(run.stdout)
    assert [row[:2] for row in rows] == [
        [ranks, name] for ranks in ("2", "4,096") for name in ("none", "karmarkar-karp", "lpt-swap", "min-move")
    ]
    assert all(len(row) == 11 for row in rows)
    assert "\N{HORIZONTAL ELLIPSIS}" not in run.stdout
    assert "With 4,096 ranks a step has more samples than there are lengths, so they were drawn" in run.stdout


def test_a_distribution_and_a_measured_cost_are_simulated(tmp_path: Path, evenrank: Evenrank) -> None:
    path = tmp_path / "cost.json"
    _measured(linear=1, quadratic=0).save(path)
    options = ("--ranks", 8, "--strategy", "lpt-swap", "--steps", 1, "--cost", path)
    run = evenrank("simulate", "uniform:low=5,high=5", *options)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == (
        f"uniform:low=5,high=5: 1 steps of 32 samples per rank, histories of at most 512 events; cost: {path}"
    )
    (row,) = _rows(run.stdout)
    assert row == ["8", "lpt-swap", "0.0%", "0.0%", "1.00x", "1.00", "\N{PLUS-MINUS SIGN}", "0.00", "1.000", "0%", "0%"]
    assert "Settings that would help" not in run.stdout


def _measured(**options: int) -> MeasuredCost:
    fitted = {"seconds_per_step": 0.0, "steps": 20, "r2": 1.0, "max_tokens": 8192, "fraction_bits": 0}
    return MeasuredCost(interleave_actions=False, **{**fitted, **options})  # type: ignore[arg-type]


# On 2 ranks with one sample each, of 100 or 300 events, half of the steps have loads of 100 and 300.
LENGTHS = np.array([100, 300])


def _idle_before(here: Path, evenrank: Evenrank, *options: object) -> str:
    np.save(here / "lengths.npy", LENGTHS)
    common = ("--ranks", 2, "--batch-size", 1, "--strategy", "none", "--steps", 3)
    run = evenrank("simulate", "lengths.npy", *common, *options)
    assert run.returncode == 0, run.stderr
    ((_, _, idle, *_),) = _rows(run.stdout)
    return str(idle)


def test_costs_by_name_file_and_function(here: Path, evenrank: Evenrank, monkeypatch: pytest.MonkeyPatch) -> None:
    _measured(linear=0, quadratic=1).save(here / "cost.json")
    (here / "my_costs.py").write_text(
        "class Costs:\n    def cube(lengths, candidates):\n        return lengths['item_id']**3\n"
    )
    monkeypatch.delitem(sys.modules, "my_costs", raising=False)
    path = list(sys.path)
    for cost, idle in (
        ("linear", 1 - 200 / 300),
        ("cost.json", 1 - (1 + 9) / 2 / 9),
        ("padded:cost.json", 1 - (1 + 9) / 2 / 9),  # one sample per rank
        ("my_costs:Costs.cube", 1 - (1 + 27) / 2 / 27),
    ):
        assert _idle_before(here, evenrank, "--cost", cost) == f"{idle:.1%}"
    assert sys.path == path


def test_a_part_of_a_step_is_fixed(here: Path, evenrank: Evenrank) -> None:
    # The longest sample takes 60 of 100 ms, so that loads are 100 + 200 and 300 + 200.
    options = ("--cost", "linear", "--step-ms", 100, "--fixed-ms", 40)
    assert _idle_before(here, evenrank, *options) == f"{1 - 400 / 500:.1%}"
    assert _idle_before(here, evenrank, *options[:4], "--fixed-ms", 0) == f"{1 - 200 / 300:.1%}"


def test_what_would_help_is_simulated_with_the_same_fixed_time(here: Path, evenrank: Evenrank) -> None:
    np.save(here / "lengths.npy", np.array([100, 300]))
    common = ("--ranks", 2, "--batch-size", 1, "--strategy", "none,lpt-swap", "--steps", 20, "--cost", "linear")
    run = evenrank("simulate", "lengths.npy", *common, "--step-ms", 100, "--fixed-ms", 40)
    assert run.returncode == 0, run.stderr
    assert "100% of the steps last as long as their longest sample" in run.stdout
    assert (
        "has 600 tokens on average. Settings that would help (lpt-swap)" in run.stdout
    )  # an item and an action per event
    table = [line.split() for line in run.stdout[run.stdout.index("instead") :].splitlines()]
    rows = {" ".join(row[:-2]): row[-2:] for row in table if len(row) > 2}
    assert rows["as above"] == ["20.0%", "1.00x"]
    # Mostly loads of 100 + 300 on each rank, to which the same 200 are added for twice as many samples.
    assert 0.6 <= float(rows["--batch-size 2"][1].removesuffix("x")) < 0.65
    assert rows["--max-history-length 256"] == [f"{1 - 378 / 456:.1%}", f"{456 / 500:.2f}x"]
    assert list(rows)[-3:] == ["--window 8", "--batch-size 2", "--max-history-length 256"]


def test_the_log_of_a_run_is_a_source(here: Path, evenrank: Evenrank) -> None:
    write(here / "log.jsonl", *TIMED_STEPS)
    options = ("--ranks", 2, "--batch-size", 1, "--steps", 50, "--strategy", "lpt-swap", "--cost", "linear")
    run = evenrank("simulate", "log.jsonl", *options)
    assert run.returncode == 0, run.stderr
    assert "50 steps of 1 samples per rank, histories as long as logged; cost: linear" in run.stdout
    assert "samples of at most 8 tokens" in run.stdout


def test_whole_windows_are_drawn_and_samples_that_cost_nothing_gain_nothing(here: Path, evenrank: Evenrank) -> None:
    options = ("--batch-size", 4, "--strategy", "lpt-swap")
    np.save(here / "lengths.npy", np.zeros(64, dtype=np.int64))
    (row,) = _rows(evenrank("simulate", "lengths.npy", "--ranks", 2, *options).stdout)
    assert row[:8] == ["2", "lpt-swap", "0.0%", "0.0%", "1.00x", "1.00", "\N{PLUS-MINUS SIGN}", "0.00"]
    np.save(here / "lengths.npy", np.arange(1, 65))
    windows = ("--ranks", 1, "--cost", "padded", "--window", 8, "--steps", 9)
    run = evenrank("simulate", "lengths.npy", *options, *windows)
    assert ": 16 steps of 4 samples per rank" in run.stdout.splitlines()[0]


WITHOUT_NUMBA = """
import sys
from evenrank.cli.main import main
try:
    main()
finally:
    print("numba" in sys.modules, file=sys.stderr)
"""


def test_a_small_simulation_does_without_numba_and_shows_the_same(tmp_path: Path, evenrank: Evenrank) -> None:
    # One sample sets the time of the steps, so that the planner of windows runs too.
    small = ("simulate", "zipf:exponent=1.2", "--ranks", "4", "--steps", "8", "--batch-size", "8")
    run = run_program(sys.executable, "-c", WITHOUT_NUMBA, *small, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "False\n")
    assert "--window 8" in run.stdout
    assert run.stdout == evenrank(*small).stdout
