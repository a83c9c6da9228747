import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenrank.cli.simulation import Source, simulate
from evenrank.dataloader.balance import HSTUCost, MeasuredCost
from evenrank.datasets.distributions import Lognormal, Uniform

COST = HSTUCost(hidden=64, heads=1, head_dim=64, layers=1)


def _tokens(lengths: dict[str, np.ndarray], num_candidates: np.ndarray) -> np.ndarray:
    return lengths["item_id"]


def test_what_balancing_wins_is_what_the_loads_say() -> None:
    # Every row of a step of all four rows comes once: 1 + 2 + 3 + 10 on two ranks; the best is 10 + 1 against 2 + 3.
    source = Source(lengths=np.array([1, 2, 3, 10]))
    before = simulate(source, _tokens, 2, batch_size=2, strategy="identity", steps=50)
    after = simulate(source, _tokens, 2, batch_size=2, strategy="lpt-swap", steps=50)
    assert before.steps == after.steps == 50
    assert before.ratio_before == before.ratio_after == after.ratio_before > 1.05
    assert after.ratio_after == after.worst_after == 1
    assert after.speedup == pytest.approx(before.ratio_before)
    assert before.speedup == 1
    assert before.moved_tokens == before.moved_bytes == 0
    assert 0 < after.moved_tokens < 1
    assert after.plan_seconds > 0


def test_bytes_are_those_of_events_and_samples() -> None:
    # All samples are alike and cost different things by chance of place only, so whatever moves has 7 events.
    summary = simulate(Source(lengths=np.full(64, 7)), COST, 4, batch_size=4, strategy="karmarkar-karp", steps=3)
    assert summary.moved_bytes / (7 * 16 + 24) == pytest.approx(summary.moved_tokens * 16)


def test_the_same_steps_are_drawn_for_every_strategy_and_again() -> None:
    source = Source(distribution=Lognormal(mean=100, std=100), most_events=300)
    first, second = (
        simulate(source, COST, 8, batch_size=4, strategy=name, steps=5) for name in ("min-move", "identity")
    )
    assert first.ratio_before == second.ratio_before
    other = simulate(source, COST, 8, batch_size=4, strategy="identity", steps=5, seed=1)
    assert other.ratio_before != second.ratio_before


def test_lengths_are_cut_and_rows_repeated_only_where_they_must_be() -> None:
    rng = np.random.default_rng(0)
    source = Source(lengths=np.arange(10), most_events=5)
    assert sorted(source.draw(rng, 10).tolist()) == [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert not source.is_repeated(10)
    assert source.is_repeated(11)
    assert len(source.draw(rng, 11)) == 11
    assert Source(distribution=Uniform(low=9, high=9)).draw(rng, 2).tolist() == [9, 9]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from evenrank.cli.main import main; main()", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "80"})


def _rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]


def test_a_dataset_is_simulated_in_80_columns(small_dataset: Path) -> None:
    done = _run(str(small_dataset), "--ranks", "2,4096", "--batch-size", "4", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert max(len(line) for line in done.stdout.splitlines() if "rows; rows" not in line) <= 80
    rows = _rows(done.stdout)
    assert [row[:2] for row in rows] == [
        [size, name] for size in ("2", "4,096") for name in ("karmarkar-karp", "lpt-swap", "min-move")
    ]
    assert all(len(row) == 9 for row in rows)
    assert "…" not in done.stdout
    assert "With 4,096 ranks a step has more samples than the dataset has rows" in done.stdout


def test_a_distribution_and_a_measured_cost_are_simulated(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    MeasuredCost(linear=1, quadratic=0, fraction_bits=0, seconds_per_step=0.0, steps=20, r2=1.0, max_tokens=1000).save(
        path
    )
    distribution = "uniform:low=5,high=5"
    done = _run(distribution, "--ranks", "8", "--strategy", "lpt-swap", "--steps", "1", "--cost", str(path))
    assert done.returncode == 0, done.stderr
    ((*row, _),) = _rows(done.stdout)
    assert row == ["8", "lpt-swap", "1.000", "1.0000", "1.0000", "1.00x", "0.0%", "0.000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "'nowhere' is neither a folder nor a distribution; write a dataset with `evenrank preprocess`, or",
        ),
        (["zipf:exponent=x"], "exponent must be float, got 'x'"),
        (["zipf", "--ranks", "8,x"], "--ranks takes whole numbers with commas between, got '8,x'"),
        (["zipf", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["zipf", "--strategy", "best"], "no strategy is called 'best'; there are identity, karmarkar-karp, lpt-swap"),
        (["zipf", "--hidden", "10", "--heads", "3"], "hidden must be a multiple of heads, got 10 and 3"),
        (["zipf", "--tolerance", "2"], "tolerance must be at least 0 and below 1, got 2.0"),
        (["zipf", "--cost", "none.json"], "none.json could not be read as a measured cost"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
