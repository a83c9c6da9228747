"""The cost is fitted to measured times while a job trains: ranks take times that are made up, by their samples."""

import contextlib
import itertools
import logging
import pickle
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import ElasticLoader, ElasticSampler, LoaderConfig, build_loader
from evenrank.dataloader.balance import (
    BalanceConfig,
    Balancer,
    HSTUCost,
    LinearCost,
    MeasuredCost,
    PaddedCost,
    StepMetrics,
)
from evenrank.dataloader.balance.metrics.step_metrics import RankTimes
from evenrank.dataloader.balance.ranks.process_group import members_of
from evenrank.dataloader.balance.refit import CostSchedule, refit
from evenrank.datasets.distributions import Lognormal
from evenrank.training import StepTimer
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import ids_of
from tests.conftest import make_small_dataset
from tests.dataloader.own_samples import COLLATE
from tests.ranks import RankPool

A, B, C = 1.0, 0.01, 0.001  # seconds of a step, of a token, of a squared token
FIRST = LinearCost(interleave_actions=False)  # with the squares left out, it balances badly
EVERY = 20
WAYS: dict[str, dict[str, Any]] = {
    "balancer": {"lookahead": 2},
    "balancer, windows": {"window": 4},
    "no exchange": {},
    "windows": {"window": 4},
    "packed": {"pack": True, "max_tokens_per_rank": 400, "on_overflow": "warn"},
    "elastic": {},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of about 1,400 samples, 44 steps of 2 ranks."""
    return make_small_dataset(tmp_path_factory.mktemp("refit") / "data", seed=7, num_users=2000)


class _Time:
    now = 0.0  # seconds


@contextlib.contextmanager
def _made_up_times() -> Iterator[None]:
    clock = SimpleNamespace(perf_counter=lambda: _Time.now)
    with mock.patch("evenrank.training.step_timer.time", clock):
        yield


def _batches(path: Path, rank: int, world_size: int, way: str, balance: BalanceConfig, **resumed: Any) -> Any:
    config = LoaderConfig(batch_size=16, max_history_length=60, num_workers=1, prefetch=2)
    own = {"rank": rank, "world_size": world_size}
    if way == "elastic":
        lengths = Lognormal(mean=12, std=14, low=1, high=60).sample(np.random.default_rng(0), 1400)
        data: Any = [{"item_id": range(length), "sample_ids": number} for number, length in enumerate(lengths)]
        sampler = ElasticSampler(len(data), batch_size=16, lengths={"item_id": lengths}, balance=balance, **own)
        loader: Any = ElasticLoader(DataLoader(data, batch_sampler=sampler, collate_fn=COLLATE))
    elif way.startswith("balancer"):
        loader = build_loader(path, config, **own)
        if resumed:
            loader.load_state_dict(resumed)
        return Balancer(loader, balance)
    else:
        loader = build_loader(path, config, balance=balance, **own)
    if resumed:
        loader.load_state_dict(resumed)
    return loader


class _Step(NamedTuple):
    epoch: int
    ids: list[int]
    seconds: float


def _train_step(timer: StepTimer, batch: Any, factor: float = 1.0) -> _Step:
    lengths = batch.features["item_id"].lengths()[: batch.num_real].double()
    seconds = A + B * float(lengths.sum()) + C * float((lengths**2).sum())
    _Time.now += factor * seconds
    with timer.waiting():
        dist.barrier()
    return _Step(batch.epoch, ids_of(batch), seconds)


def _job(
    rank: int, world_size: int, path: Path, way: str, stops: tuple[int, ...] = (), every: int = EVERY
) -> tuple[list[_Step], MeasuredCost | None]:
    """Train 5 epochs, which stop and resume with another job after so many steps each; return all steps."""
    trained: list[_Step] = []
    state: dict[str, Any] = {}
    for stop in (*stops, None):
        with _made_up_times():
            timer = StepTimer(every=3)
            balance = BalanceConfig(cost=FIRST, on_step=timer, refit_every=every, **WAYS[way])
            with closing(_batches(path, rank, world_size, way, balance, **state)) as batches:
                for batch in itertools.islice(_epochs(batches, 5 - state.get("epoch", 0)), stop):
                    trained.append(_train_step(timer, batch))
                state = dict(batches.state_dict())
            timer.close()
    return trained, timer.cost


def _epochs(batches: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        yield from batches


def _imbalance(of_ranks: list[list[_Step]], first: int, stop: int) -> float:
    """Return the time of the slowest rank over the mean, of steps."""
    seconds = np.array([[step.seconds for step in steps] for steps in of_ranks])[:, first:stop]
    return float(seconds.max(axis=0).sum() / seconds.mean(axis=0).sum())


@pytest.mark.parametrize("way", WAYS)
def test_a_job_comes_to_be_balanced_by_the_times_that_it_measures(
    ranks: RankPool, dataset: Path, way: str
) -> None:
    of_ranks = ranks.run(2, _job, dataset, way)
    steps = [steps for steps, _ in of_ranks]
    print(way, len(steps[0]), _imbalance(steps, 0, EVERY), _imbalance(steps, 3 * EVERY, 100000))
