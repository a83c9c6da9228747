import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.cli.simulation import LengthSource, simulate
from evenrank.dataloader.balance import BalanceConfig, HSTUCost, MeasuredCost
from evenrank.datasets.distributions import Lognormal, Uniform
from tests.cli.programs import EVENRANK, Evenrank, run_program

COST = HSTUCost(hidden=64, heads=1, head_dim=64, layers=1, interleave_actions=False)


def _tokens(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths["item_id"]


def _measured(**options: Any) -> MeasuredCost:
    fixed: dict[str, Any] = {"seconds_per_step": 0.0, "steps": 20, "r2": 1.0, "max_tokens": 8192}
    return MeasuredCost(**fixed, **options)


def test_the_gain_follows_from_the_loads() -> None:
    # Every row of a step of all four rows comes once: 1 + 2 + 3 + 10 on two ranks; the best is 10 + 1 against 2 + 3.
    source = LengthSource(lengths=np.array([1, 2, 3, 10]))
    before = simulate(source, BalanceConfig(cost=_tokens, strategy="none"), 2, batch_size=2, steps=50)
    after = simulate(source, BalanceConfig(cost=_tokens, strategy="lpt-swap"), 2, batch_size=2, steps=50)
    assert before.steps == after.steps == 50
    assert before.ratio_before == before.ratio_after == after.ratio_before > 1.05
    assert after.ratio_after == after.worst_after == 1
    assert after.speedup == pytest.approx(before.ratio_before)
    assert before.speedup == 1
    assert before.moved_tokens == before.moved_bytes == 0
    assert 0 < after.moved_tokens < 1
    assert after.plan_seconds > 0


def test_moved_bytes_are_those_of_events_and_samples() -> None:
    # All samples have 7 events, so the bytes that move follow from the share of tokens that moves.
    config = BalanceConfig(cost=COST, strategy="karmarkar-karp")
    summary = simulate(LengthSource(lengths=np.full(64, 7)), config, 4, batch_size=4, steps=3)
    assert summary.moved_bytes / (7 * 16 + 24) == pytest.approx(summary.moved_tokens * 16)


def test_a_seed_draws_the_same_steps_for_every_strategy() -> None:
    source = LengthSource(distribution=Lognormal(mean=100, std=100), max_length=300)
    min_move = simulate(source, BalanceConfig(cost=COST, strategy="min-move"), 8, batch_size=4, steps=5)
    none = simulate(source, BalanceConfig(cost=COST, strategy="none"), 8, batch_size=4, steps=5)
    assert min_move.ratio_before == none.ratio_before
    other_seed = simulate(source, BalanceConfig(cost=COST, strategy="none"), 8, batch_size=4, steps=5, seed=1)
    assert other_seed.ratio_before != none.ratio_before


@pytest.mark.parametrize("contextual", [(), ("user_id",)])
def test_costs_in_fractions_of_a_second_add_up_whatever_the_number_of_ranks(contextual: tuple[str, ...]) -> None:
    # The longest sample costs 2^60, so four of them overflow unless they are scaled.
    cost = _measured(linear=0, quadratic=1 << 34, fraction_bits=60, interleave_actions=True, contextual=contextual)
    source, config = LengthSource(lengths=np.array([4000, 0, 4000, 0])), BalanceConfig(cost=cost, strategy="lpt-swap")
    summary = simulate(source, config, 2, batch_size=2, steps=20)
    assert summary.ratio_after == 1
    assert 1 < summary.ratio_before <= 2
    assert simulate(source, config, 1024, batch_size=32, steps=1).ratio_after < 1.001
    assert summary.tokens == 16_000 + 4 * len(contextual)


def test_lengths_are_cut_and_rows_repeated_only_where_they_must_be() -> None:
    rng = np.random.default_rng(0)
    source = LengthSource(lengths=np.arange(10), max_length=5)
    assert sorted(source.draw(rng, 10).tolist()) == [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert not source.repeats_rows(10)
    assert source.repeats_rows(11)
    assert len(source.draw(rng, 11)) == 11
    assert LengthSource(distribution=Uniform(low=9, high=9)).draw(rng, 2).tolist() == [9, 9]


def _rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]


def test_a_dataset_is_simulated_in_80_columns(small_dataset: Path) -> None:
    options = ("--ranks", "2,4096", "--batch-size", "4", "--steps", "2")
    run = run_program(EVENRANK, "simulate", small_dataset, *options, environment={**os.environ, "COLUMNS": "80"})
    assert (run.returncode, run.stderr) == (0, "")
    assert max(len(line) for line in run.stdout.splitlines() if "with replacement" not in line) <= 80
    rows = _rows(run.stdout)
    assert [row[:2] for row in rows] == [
        [ranks, name] for ranks in ("2", "4,096") for name in ("karmarkar-karp", "lpt-swap", "min-move")
    ]
    assert all(len(row) == 9 for row in rows)
    assert "…" not in run.stdout
    assert "With 4,096 ranks a step has more samples than the dataset has rows" in run.stdout


def test_a_distribution_and_a_measured_cost_are_simulated(tmp_path: Path, evenrank: Evenrank) -> None:
    path = tmp_path / "cost.json"
    _measured(linear=1, quadratic=0, fraction_bits=0, interleave_actions=False).save(path)
    options = ("--ranks", 8, "--strategy", "lpt-swap", "--steps", 1, "--cost", path)
    run = evenrank("simulate", "uniform:low=5,high=5", *options)
    assert run.returncode == 0, run.stderr
    ((*row, _),) = _rows(run.stdout)
    assert row == ["8", "lpt-swap", "1.000", "1.0000", "1.0000", "1.00x", "0.0%", "0.000"]
