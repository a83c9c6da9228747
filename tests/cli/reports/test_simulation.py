from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from evenrank.cli.reports.simulation import LengthSource, open_source, simulate
from evenrank.dataloader.balance import (
    BalanceConfig,
    LinearCost,
    MeasuredCost,
    MetricsSummary,
    PaddedCost,
    summarize,
)
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Lognormal, Uniform
from tests.dataloader.balance.metrics.example_steps import step, write

LINEAR = LinearCost(interleave_actions=False)


def _tokens(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths["item_id"]


def _measured(**options: Any) -> MeasuredCost:
    fitted: dict[str, Any] = {"seconds_per_step": 0.0, "steps": 20, "r2": 1.0, "max_tokens": 8192}
    return MeasuredCost(**{**fitted, **options})


def _simulate(source: LengthSource, config: BalanceConfig, world_size: int, **options: Any) -> MetricsSummary:
    return summarize(simulate(source, config, world_size, **options))


def test_the_gain_follows_from_the_loads() -> None:
    # Every row of a step of all four rows comes once: 1 + 2 + 3 + 10 on two ranks; the best is 10 + 1 against 2 + 3.
    source = LengthSource(lengths=np.array([1, 2, 3, 10]))
    before = _simulate(source, BalanceConfig(cost=_tokens, strategy="none"), 2, batch_size=2, steps=50)
    after = _simulate(source, BalanceConfig(cost=_tokens, strategy="lpt-swap"), 2, batch_size=2, steps=50)
    assert before.steps == after.steps == 50
    assert 11 < before.heaviest_before == before.heaviest_after == after.heaviest_before < 13
    assert after.ratio_after == after.worst_after == after.one_sample == 1
    assert (after.heaviest_after, after.idle_after, after.longest) == (11, 1 - 8 / 11, 20)  # tokens: items and actions
    assert before.idle_before == before.idle_after == after.idle_before == 1 - 8 / before.heaviest_before
    assert (before.speedup, after.speedup) == (1, before.heaviest_before / 11)
    assert before.moved_tokens == before.moved_bytes == 0
    assert 0 < after.moved_tokens < 1
    assert after.plan_seconds > 0


def test_a_seed_draws_the_same_steps_for_every_strategy() -> None:
    source = LengthSource(distribution=Lognormal(mean=100, std=100), max_length=300)
    min_move = _simulate(source, BalanceConfig(cost=LINEAR, strategy="min-move"), 8, batch_size=4, steps=5)
    none = _simulate(source, BalanceConfig(cost=LINEAR, strategy="none"), 8, batch_size=4, steps=5)
    assert min_move.ratio_before == none.ratio_before
    other_seed = _simulate(source, BalanceConfig(cost=LINEAR, strategy="none"), 8, batch_size=4, steps=5, seed=1)
    assert other_seed.ratio_before != none.ratio_before


def test_lengths_are_cut_and_rows_repeated_only_where_they_must_be() -> None:
    rng = np.random.default_rng(0)
    source = LengthSource(lengths=np.arange(10), max_length=5)
    assert sorted(source.draw(rng, 10).tolist()) == [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert not source.repeats_rows(10)
    assert source.repeats_rows(11)
    assert len(source.draw(rng, 11)) == 11
    assert LengthSource(distribution=Uniform(low=9, high=9)).draw(rng, 2).tolist() == [9, 9]


def test_windows_are_compared_with_the_steps_that_the_order_has() -> None:
    source = LengthSource(lengths=np.array([*[100] * 8, *[1] * 120]))
    options: dict[str, Any] = {"batch_size": 4, "steps": 42, "seed": 3}
    steps = simulate(source, BalanceConfig(cost=LINEAR), 8, **options)
    windows = simulate(source, BalanceConfig(cost=LINEAR, window=4), 8, **options)
    assert [step.before.tolist() for step in windows] == [step.before.tolist() for step in steps]
    assert len(windows) == 42
    assert summarize(windows).heaviest_after < 0.6 * summarize(steps).heaviest_after
    assert sum(step.tokens for step in windows[:40]) == sum(step.tokens for step in steps[:40])


def test_padded_models_gain_by_windows_alone() -> None:
    source = LengthSource(lengths=np.array([*[100] * 8, *[1] * 120]))
    padded, options = PaddedCost(LINEAR), {"batch_size": 4, "steps": 40}
    equal_sums = _simulate(source, BalanceConfig(cost=padded), 8, **options)
    assert (equal_sums.speedup, equal_sums.moved_samples, equal_sums.idle_before) == (1, 0, equal_sums.idle_after)
    windows = _simulate(source, BalanceConfig(cost=padded, window=4), 8, **options)
    assert windows.heaviest_before == equal_sums.heaviest_before
    # Long samples are 2 of 32 on average, so nearly every step has one; in windows, one step of four has them all.
    assert windows.speedup == pytest.approx(equal_sums.heaviest_before / ((400 + 3 * 4) / 4))
    assert windows.tokens == equal_sums.tokens


def test_the_fixed_seconds_of_a_measured_cost_are_a_load_of_all_ranks() -> None:
    # A token takes 1/1024 s.
    options: dict[str, Any] = {"linear": 1 << 40, "quadratic": 0, "fraction_bits": 50, "interleave_actions": False}
    source, fixed = LengthSource(lengths=np.array([100, 300])), _measured(**options, seconds_per_step=200 / 1024)
    for cost in (fixed, PaddedCost(fixed)):
        summary = _simulate(source, BalanceConfig(cost=cost), 2, batch_size=1, steps=3)
        assert summary.idle_after == pytest.approx(1 - (300 + 500) / 2 / 500)


def test_sources_of_lengths(tmp_path: Path, small_dataset: Path) -> None:
    lengths = np.array([3, 0, 700], dtype=np.uint16)
    np.save(tmp_path / "lengths.npy", lengths)
    pq.write_table(pa.table({"any name": lengths}), tmp_path / "lengths.parquet")
    write(tmp_path / "log.jsonl", step(0), step(1, loaded_tokens=np.array([2000, 0, 5])))
    rng = np.random.default_rng(0)
    for name in ("lengths.npy", "lengths.parquet"):
        source = open_source(str(tmp_path / name), "train", 512)
        assert sorted(source.draw(rng, 3).tolist()) == [0, 3, 512]
        assert not source.of_tokens
    log = open_source(str(tmp_path / "log.jsonl"), "train", 512)  # whose tokens are not cut again
    assert sorted(log.draw(rng, 4).tolist()) == [4, 5, 16, 2000]
    assert (log.of_tokens, log.max_length) == (True, 2000)
    dataset = open_source(str(small_dataset), "eval", 9)
    stored = open_store(small_dataset, "eval").lengths
    assert dataset.lengths is not None
    assert (dataset.lengths.tolist(), dataset.max_length) == (stored.tolist(), 9)
    drawn = open_source("uniform:low=5,high=5", "train", 4)
    assert drawn.draw(rng, 2).tolist() == [4, 4]


def test_the_tokens_of_a_log_are_not_counted_again(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", step(0, loaded_tokens=np.array([10, 10])))
    source = open_source(str(tmp_path / "log.jsonl"), "train", 512)
    cost = LinearCost(interleave_actions=True, contextual=("user_id",), history_key="items")
    for of_cost in (cost, PaddedCost(cost)):
        (of_step,) = simulate(source, BalanceConfig(cost=of_cost), 1, batch_size=2, steps=1)
        assert (of_step.tokens, int(of_step.after[0])) == (20, 20)
