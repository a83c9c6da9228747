import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenrank.cli.inspect_balance import walk_epoch
from evenrank.core.errors import RankError
from evenrank.dataloader import ElasticSampler, JaggedBatch, LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.ranks.agree import common_schema, steps_to_plan
from evenrank.dataloader.balance.ranks.metadata import StepMetadata, new_message
from evenrank.dataloader.batches.schema import schema_of
from evenrank.training import LossAverage, accumulate
from tests.dataloader.balance.costs import COST, Ints, Lengths, one_per_sample
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankPool


class _Cost:
    """Costs of one name, which are compared by what they return."""

    def __init__(self, power: int) -> None:
        self._power = power

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return lengths["item_id"] ** self._power


def _create(rank: int, world_size: int, path: Path, of_second: dict[str, Any]) -> None:
    options: dict[str, Any] = {"path": path, "config": {}, "balance": {}, "rank": rank, "world_size": world_size}
    options |= of_second if rank == 1 else {}
    config = LoaderConfig(**{"batch_size": 4, **options.pop("config")})
    balance = BalanceConfig(**{"cost": _Cost(1), "timeout": timedelta(seconds=30), **options.pop("balance")})
    build_loader(options.pop("path"), config, **options, balance=balance)


@pytest.mark.parametrize(
    ("change", "own", "message"),
    [
        ({"path": Path("/nowhere")}, "DataError", "rank 1 failed: /nowhere"),
        ({"config": {"seed": 1}}, "RankError", "seed differs between ranks: 0 on rank 0, 1 on rank 1"),
        ({"config": {"max_history_length": 7}}, "RankError", "max_history_length differs between ranks: 512 on rank 0"),
        ({"config": {"prefetch": 3}}, "RankError", "prefetch differs between ranks: 16 on rank 0, 3 on rank 1"),
        ({"balance": {"window": 4}}, "RankError", "window differs between ranks: 1 on rank 0, 4 on rank 1"),
        ({"balance": {"cost": COST}}, "RankError", "cost differs between ranks: _Cost on rank 0, HSTUCost("),
        ({"balance": {"cost": _Cost(2)}}, "RankError", "costs and plan of the first step differs between ranks: "),
        (
            {"balance": {"tolerance": 2}},
            "ConfigError",
            "rank 1 failed: BalanceConfig: tolerance must be at least 0 and below 1",
        ),
        ({"rank": 0}, "RankError", "the loader of rank 1 was created for rank 0"),
        ({"world_size": 3}, "ConfigError", "rank 1 failed: the loader is created for world_size 3, but 2 ranks would"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value)[:40],
)
def test_what_differs_is_told(ranks: RankPool, small_dataset: Path, change: Any, own: str, message: str) -> None:
    first, second = ranks.try_run(2, _create, small_dataset, change)
    assert (first.type_name, second.type_name) == ("RankError", own)
    assert message in first.message


def _balancer(options: Any) -> None:
    Balancer([], BalanceConfig(**{"cost": COST, **options}))


def _loader(path: Path, rank: int, options: Any) -> None:
    balance = BalanceConfig(**{"cost": COST, **options.pop("balance", {})})
    given = {"config": LoaderConfig(batch_size=4), "rank": rank, "world_size": 2, "balance": balance, **options}
    build_loader(path, **given)


def _sampler(rank: int, options: Any) -> None:
    lengths = {"item_id": np.arange(8)}
    balance = BalanceConfig(cost=one_per_sample)
    given = {"batch_size": 2, "rank": rank, "world_size": 2, "lengths": lengths, "balance": balance, **options}
    ElasticSampler(**{"num_samples": 8, **given})


# What is wrong on rank 1 alone, and the error there. Rank 0 would wait for the default timeout, 30 minutes.
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("Balancer", {"timeout": 60}, "BalanceConfig: timeout must be of type timedelta, got 60"),
    (
        "Balancer",
        {"timeout": timedelta(seconds=-1)},
        "BalanceConfig: timeout must be above 0:00:00, got -1 day, 23:59:59",
    ),
    ("Balancer", {"on_step": 3}, "BalanceConfig: on_step must be of type Callable[["),
    ("Balancer", {"lookahead": "2"}, "BalanceConfig: lookahead must be of type int, got '2'"),
    ("Balancer", {"strategy": 5}, "BalanceConfig: strategy must be of type str, got 5"),
    ("build_loader", {"balance": {"timeout": 60}}, "BalanceConfig: timeout must be of type timedelta, got 60"),
    (
        "build_loader",
        {"balance": {"log_every": float("nan")}},
        "BalanceConfig: log_every must be of type int | None, g",
    ),
    ("build_loader", {"rank": 0.5}, "build_loader: rank must be of type int, got 0.5"),
    ("build_loader", {"config": {"batch_size": 4}}, "build_loader: config must be of type LoaderConfig, got {"),
    ("ElasticSampler", {"rank": 2}, "rank must be between 0 and world_size - 1, got rank 2 of 2"),
    ("ElasticSampler", {"rank": 0.5}, "ElasticSampler: rank must be of type int, got 0.5"),
    ("ElasticSampler", {"batch_size": 0}, "ElasticSampler: batch_size must be at least 1, got 0"),
    ("ElasticSampler", {"num_samples": "8"}, "ElasticSampler: num_samples must be of type int, got '8'"),
    ("ElasticSampler", {"drop_last": "False"}, "ElasticSampler: drop_last must be of type bool, got 'False'"),
    ("ElasticSampler", {"lengths": None}, "lengths and balance belong together"),
    ("ElasticSampler", {"lengths": {"item_id": [1, 2]}}, "lengths['item_id'] must be integers of shape (8,), got int"),
    ("ElasticSampler", {"balance": None}, "lengths and balance belong together"),
    ("ElasticSampler", {"balance": {"cost": 1}}, "ElasticSampler: balance must be of type BalanceConfig | None, got {"),
    ("LossAverage", {"num_tasks": 0}, "LossAverage: num_tasks must be at least 1, got 0"),
    ("accumulate", {"num_steps": 0}, "accumulate: num_steps must be at least 1, got 0"),
    ("accumulate", {"task_tokens": lambda batch: 3}, "task_tokens must return a tensor [tasks], got int"),
    ("inspect-balance", {"path": Path("/nowhere")}, "/nowhere"),
]


def _make(rank: int, world_size: int, path: Path, number: int) -> None:
    name, mistake, _ = MISTAKES[number]
    options: dict[str, Any] = dict(mistake) if rank == 1 else {}
    batch = JaggedBatch(batch_size=1, num_real=0, world_loss_tokens=1)
    if name == "Balancer":
        _balancer(options)
    elif name == "build_loader":
        _loader(path, rank, options)
    elif name == "ElasticSampler":
        _sampler(rank, options)
    elif name == "LossAverage":
        LossAverage(**options)
    elif name == "accumulate":
        list(accumulate([batch], **{"num_steps": 1, "task_tokens": lambda batch: torch.ones(1), **options}))
    else:
        walk_epoch(options.get("path", path), LoaderConfig(batch_size=4), BalanceConfig(cost=COST))


@pytest.mark.parametrize(
    "number", range(len(MISTAKES)), ids=lambda number: f"{MISTAKES[number][0]}-{','.join(MISTAKES[number][1])}"
)
def test_a_mistake_of_one_rank_is_an_error_of_all_at_once(ranks: RankPool, small_dataset: Path, number: int) -> None:
    first, second = ranks.try_run(2, _make, small_dataset, number)
    assert (first.type_name, second.type_name) in (("RankError", "ConfigError"), ("RankError", "DataError"))
    assert second.message.startswith(MISTAKES[number][2])
    assert first.message == f"rank 1 failed: {second.message}"


SCHEMA = schema_of(rich_batch([[(1, 2), (0, 3)], [(2, 0), (1, 1)]]))


def _steps(num_steps: int, world_size: int) -> StepMetadata:
    steps = np.stack([new_message(SCHEMA)[:num_steps]] * world_size, axis=1)
    steps["started"] = 1
    return steps


@given(st.integers(1, 8), st.integers(2, 5), st.data())
def test_steps_are_planned_up_to_the_first_that_ranks_are_not_in_together(
    num_steps: int, world_size: int, data: st.DataObject
) -> None:
    known = _steps(num_steps, world_size)
    assert steps_to_plan(known, []) == (num_steps, None)
    index, rank = data.draw(st.integers(0, num_steps - 1)), data.draw(st.integers(0, world_size - 1))
    known["ended"][index:, rank] = 1
    for name in ("epoch", "step", "position"):  # which a rank that has ended has none of
        known[name][index:, rank] = 99
    assert steps_to_plan(known, []) == (num_steps, None)

    word = data.draw(st.sampled_from(["schema_hash", "epoch", "step", "position", "plan_hash"]))
    differing = _steps(num_steps, world_size)
    differing[word][index, rank] = 7
    found, error = steps_to_plan(differing, [])
    assert (found, type(error)) == (index, RankError)
    assert f"ranks are out of step: {word} is " in str(error)
    assert f" 7 on rank {rank}" in str(error) or f"is 7 on rank {rank}" in str(error)

    missing = _steps(num_steps, world_size)
    missing["started"][index:, rank] = 0
    found, error = steps_to_plan(missing, [])
    assert (found, type(error)) == (index, RankError)
    assert f"rank {rank} has not started a step of others" in str(error)

    known["ended"][index:] = 1
    assert steps_to_plan(known, []) == (index, None)
    errors = [[None] * index + ["no data"] if each == rank else [None] * num_steps for each in range(world_size)]
    found, error = steps_to_plan(_steps(num_steps, world_size), errors)
    assert (found, type(error)) == (index, RankError)
    assert f"rank {rank} failed: no data" in str(error)


def test_the_schema_of_all_ranks_has_the_rows_of_the_largest_batch() -> None:
    short = dataclasses.replace(SCHEMA, batch_size=1)
    assert common_schema([short, None, SCHEMA]) == SCHEMA
    assert common_schema([short], 5) == dataclasses.replace(SCHEMA, batch_size=5)
    assert common_schema([None, None]) is None
