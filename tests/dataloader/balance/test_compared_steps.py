"""Steps that stay unbalanced for comparison, with and without an exchange between ranks."""

import itertools
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics, summarize
from evenrank.dataloader.balance.metrics.log import read_json_lines
from evenrank.dataloader.balance.metrics.writers import JsonLines
from evenrank.training import scale_loss
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of
from tests.ranks import RankPool

CONFIG = LoaderConfig(batch_size=4, max_history_length=20)


def _batches(
    path: Path, rank: int, world_size: int, has_exchange: bool, balance: BalanceConfig | None, **resumed: Any
) -> Any:
    build = partial(build_loader, path, CONFIG, rank=rank, world_size=world_size)
    loader = build() if has_exchange or balance is None else build(balance=balance)
    if resumed:
        loader.load_state_dict(resumed)
    return Balancer(loader, balance) if has_exchange and balance is not None else loader


def _compared(rank: int, world_size: int, path: Path, has_exchange: bool) -> Any:
    metrics: list[StepMetrics] = []
    unbalanced = [ids_of(batch) for batch in _batches(path, rank, world_size, has_exchange, None)]
    balance = BalanceConfig(cost=COST, compare_every=3, on_step=metrics.append)
    with closing(_batches(path, rank, world_size, has_exchange, balance)) as batches:
        epochs = [[ids_of(batch) for batch in batches] for _ in range(2)]
    assert len(epochs[0]) == len(unbalanced) > 10
    for step, (ids, loaded) in enumerate(zip(epochs[0], unbalanced, strict=True)):
        if not balance.balances(0, step):
            assert ids == loaded
    assert sum(ids != loaded for ids, loaded in zip(epochs[0], unbalanced, strict=True)) > 5
    num_steps = len(unbalanced)
    assert [step.is_balanced for step in metrics] == [
        balance.balances(epoch, step) for epoch in range(2) for step in range(num_steps)
    ]
    for of_step in metrics:
        assert of_step.is_balanced or (of_step.before.tolist(), of_step.moved_samples) == (of_step.after.tolist(), 0)
    summary = summarize(metrics)
    assert summary.steps == sum(step.is_balanced for step in metrics)
    assert summary.idle_after < summary.idle_before
    return epochs


@pytest.mark.parametrize("has_exchange", [True, False])
def test_every_third_step_stays_as_it_was_loaded(ranks: RankPool, small_dataset: Path, has_exchange: bool) -> None:
    everything = sorted(
        ids for batch in build_loader(small_dataset, CONFIG, rank=0, world_size=1) for ids in ids_of(batch)
    )
    of_ranks = ranks.run(3, _compared, small_dataset, has_exchange)
    for epoch in range(2):
        assert sorted(itertools.chain(*(step for epochs in of_ranks for step in epochs[epoch]))) == everything


def _gradient(rank: int, world_size: int, path: Path, has_exchange: bool, options: dict[str, Any]) -> Any:
    """Return the sum over ranks of the gradients of each step, of a loss that depends on every event."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.rand(1000, dtype=torch.float64))
    gradients: list[Any] = []
    balance = BalanceConfig(cost=COST, **options)
    with closing(_batches(path, rank, world_size, has_exchange, balance)) as batches:
        for batch in batches:
            weight.grad = None
            items = batch.features["item_id"].values()
            scale_loss((weight[items] ** 2).sum(), batch).backward()
            assert weight.grad is not None
            torch.distributed.all_reduce(weight.grad)
            gradients.append(weight.grad.numpy().copy())
    return gradients


@pytest.mark.parametrize("has_exchange", [True, False])
def test_gradients_are_those_of_balanced_steps(ranks: RankPool, small_dataset: Path, has_exchange: bool) -> None:
    ways = [ranks.run(2, _gradient, small_dataset, has_exchange, way)[0] for way in ({}, {"compare_every": 2})]
    assert len(ways[0]) > 10
    np.testing.assert_allclose(ways[0], ways[1], rtol=1e-12)


def _resumed(rank: int, world_size: int, path: Path, state: dict[str, Any]) -> list[bool]:
    metrics: list[StepMetrics] = []
    balance = BalanceConfig(cost=COST, compare_every=2, on_step=metrics.append)
    with closing(_batches(path, rank, world_size, True, balance, **state)) as batches:
        list(batches)
    return [step.is_balanced for step in metrics]


def test_steps_are_counted_from_where_a_job_resumes(ranks: RankPool, small_dataset: Path) -> None:
    loader = build_loader(small_dataset, CONFIG, rank=0, world_size=1)
    list(itertools.islice(loader, 5))
    first, second = ranks.run(2, _resumed, small_dataset, dict(loader.state_dict()))
    assert first == second == [step % 2 == 0 for step in range(len(first))]


def _differ(rank: int, world_size: int, path: Path, has_exchange: bool) -> str:
    balance = BalanceConfig(cost=COST, compare_every=2 + rank)
    if not has_exchange:
        with pytest.raises(RankError) as raised:
            build_loader(
                path, CONFIG, rank=rank, world_size=world_size, balance=balance, group=torch.distributed.group.WORLD
            )
        return str(raised.value)
    with pytest.raises(RankError) as raised:
        _batches(path, rank, world_size, has_exchange, balance)
    return str(raised.value)


@pytest.mark.parametrize("has_exchange", [True, False])
def test_ranks_that_compare_other_steps_are_told_so(ranks: RankPool, small_dataset: Path, has_exchange: bool) -> None:
    first, second = ranks.run(2, _differ, small_dataset, has_exchange)
    assert first == second
    assert "compare_every" in first
    assert "2" in first
    assert "3" in first


def _logged(rank: int, world_size: int, path: Path, has_exchange: bool, out: Path) -> None:
    with JsonLines(out / f"{rank}.jsonl", options={"job": "test"}) as log:
        balance = BalanceConfig(cost=COST, on_step=log, tolerance=0.01)
        with closing(_batches(path, rank, world_size, has_exchange, balance)) as batches:
            list(itertools.islice(batches, 2))


@pytest.mark.parametrize("has_exchange", [True, False])
def test_the_log_of_a_job_begins_with_its_options(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, has_exchange: bool
) -> None:
    ranks.run(2, _logged, small_dataset, has_exchange, tmp_path)
    run, records, _ = read_json_lines(tmp_path / "0.jsonl")
    assert run is not None
    assert (run.ranks, len(records)) == (2, 2)
    assert (run.options["job"], run.options["tolerance"], run.options["strategy"]) == ("test", 0.01, "lpt-swap")
    assert run.options["cost"] == repr(COST)
    assert run.options["tokens"] == {
        "history_key": "item_id",
        "interleave_actions": False,
        "contextual": [],
        "max_tokens": COST.max_tokens,
    }
    (dataset,) = run.options["data"]["datasets"]
    assert dataset.startswith("synthetic train ")
    assert run.options["data"]["num_samples"] > 150
