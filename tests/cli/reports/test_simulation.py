from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from evenrank.cli.reports.simulation import LengthSource, open_source, simulate
from evenrank.dataloader.balance import BalanceConfig, LinearCost, MetricsSummary, PaddedCost, summarize
from evenrank.datasets import open_store
from evenrank.datasets.distributions import Lognormal, Uniform
from tests.dataloader.balance.metrics.example_steps import step, write

LINEAR = LinearCost(interleave_actions=False)
MANY_SHORT = LengthSource(lengths=np.array([*[100] * 8, *[1] * 120]))


def _tokens(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths["item_id"]


def _simulate(source: LengthSource, world_size: int, cost: Any, sizes: Any, **balance: Any) -> MetricsSummary:
    """Return the summary of steps with these `sizes`: samples per rank, steps and, maybe, a seed."""
    options = dict(zip(("batch_size", "steps", "seed"), sizes, strict=False))
    return summarize(simulate(source, BalanceConfig(cost=cost, **balance), world_size, **options))


def test_the_gain_follows_from_the_loads_and_a_seed_draws_the_same_steps_for_every_strategy() -> None:
    # Every row of a step of all four rows comes once: 1 + 2 + 3 + 10 on two ranks; the best is 10 + 1 against 2 + 3.
    source = LengthSource(lengths=np.array([1, 2, 3, 10]))
    before, after = (_simulate(source, 2, _tokens, (2, 50), strategy=name) for name in ("none", "lpt-swap"))
    assert before.steps == after.steps == 50
    assert 11 < before.heaviest_before == before.heaviest_after == after.heaviest_before < 13
    assert after.ratio_after == after.worst_after == after.one_sample == 1
    assert (after.heaviest_after, after.idle_after, after.longest) == (11, 1 - 8 / 11, 20)  # tokens: items and actions
    assert before.idle_before == before.idle_after == after.idle_before == 1 - 8 / before.heaviest_before
    assert (before.speedup, after.speedup) == (1, before.heaviest_before / 11)
    assert before.moved_tokens == before.moved_bytes == 0
    assert 0 < after.moved_tokens < 1
    assert after.plan_seconds > 0
    source = LengthSource(distribution=Lognormal(mean=100, std=100), max_length=300)
    ways = (("min-move", 0), ("none", 0), ("none", 1))
    min_move, none, other = (_simulate(source, 8, LINEAR, (4, 5, seed), strategy=name) for name, seed in ways)
    assert min_move.ratio_before == none.ratio_before != other.ratio_before


def test_lengths_are_cut_and_rows_repeated_only_where_they_must_be() -> None:
    rng = np.random.default_rng(0)
    source = LengthSource(lengths=np.arange(10), max_length=5)
    assert sorted(source.draw(rng, 10).tolist()) == [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert (source.repeats_rows(10), source.repeats_rows(11), len(source.draw(rng, 11))) == (False, True, 11)
    assert LengthSource(distribution=Uniform(low=9, high=9)).draw(rng, 2).tolist() == [9, 9]


def test_windows_are_compared_with_the_steps_that_the_order_has() -> None:
    options: dict[str, Any] = {"batch_size": 4, "steps": 42, "seed": 3}
    steps, windows = (simulate(MANY_SHORT, BalanceConfig(cost=LINEAR, window=n), 8, **options) for n in (1, 4))
    assert [step.before.tolist() for step in windows] == [step.before.tolist() for step in steps]
    assert len(windows) == 42
    assert summarize(windows).heaviest_after < 0.6 * summarize(steps).heaviest_after
    assert sum(step.tokens for step in windows[:40]) == sum(step.tokens for step in steps[:40])


def test_padded_models_gain_by_windows_alone() -> None:
    equal_sums, windows = (_simulate(MANY_SHORT, 8, PaddedCost(LINEAR), (4, 40), window=n) for n in (1, 4))
    assert (equal_sums.speedup, equal_sums.moved_samples, equal_sums.idle_before) == (1, 0, equal_sums.idle_after)
    assert (windows.heaviest_before, windows.tokens) == (equal_sums.heaviest_before, equal_sums.tokens)
    # Long samples are 2 of 32 on average, so nearly every step has one; in windows, one step of four has them all.
    assert windows.speedup == pytest.approx(equal_sums.heaviest_before / ((400 + 3 * 4) / 4))


def test_sources_of_lengths(tmp_path: Path, small_dataset: Path) -> None:
    lengths, rng = np.array([3, 0, 700], dtype=np.uint16), np.random.default_rng(0)
    np.save(tmp_path / "lengths.npy", lengths)
    pq.write_table(pa.table({"any name": lengths}), tmp_path / "lengths.parquet")
    write(tmp_path / "log.jsonl", step(0), step(1, loaded_tokens=np.array([2000, 0, 5])))
    for name, expected, of_tokens, max_length in (
        ("lengths.npy", [0, 3, 512], False, 512),
        ("lengths.parquet", [0, 3, 512], False, 512),
        ("log.jsonl", [4, 5, 16, 2000], True, 2000),  # tokens are not cut again
    ):
        source = open_source(str(tmp_path / name), "train", 512)
        assert sorted(source.draw(rng, len(expected)).tolist()) == expected
        assert (source.of_tokens, source.max_length) == (of_tokens, max_length)
    dataset = open_source(str(small_dataset), "eval", 9)
    assert dataset.lengths is not None
    stored = open_store(small_dataset, "eval").lengths.tolist()
    assert (dataset.lengths.tolist(), dataset.max_length) == (stored, 9)
    assert open_source("uniform:low=5,high=5", "train", 4).draw(rng, 2).tolist() == [4, 4]


def test_the_tokens_of_a_log_are_not_counted_again(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", step(0, loaded_tokens=np.array([10, 10])))
    source = open_source(str(tmp_path / "log.jsonl"), "train", 512)
    cost = LinearCost(interleave_actions=True, contextual=("user_id",), history_key="items")
    for of_cost in (cost, PaddedCost(cost)):
        (of_step,) = simulate(source, BalanceConfig(cost=of_cost), 1, batch_size=2, steps=1)
        assert (of_step.tokens, int(of_step.after[0])) == (20, 20)
