"""The cost is fitted to measured times while a job trains: ranks take times that are made up, by their samples."""

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import ElasticLoader, ElasticSampler, LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost, MeasuredCost
from evenrank.dataloader.balance.metrics.step_metrics import RankTimes
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.balance.ranks.process_group import Members
from evenrank.dataloader.balance.refit import CostSchedule, refit
from evenrank.datasets.distributions import Lognormal
from evenrank.training import StepTimer
from tests.conftest import make_small_dataset
from tests.dataloader.batch_helpers import COLLATE, ids_of
from tests.ranks import RankPool

A, B, C = 1.0, 0.01, 0.001  # seconds of a step, of a token, of a squared token
FIRST = LinearCost(interleave_actions=False)  # with the squares left out, it balances badly
COUNTED: dict[str, Any] = {"interleave_actions": False, "max_tokens": 8192}
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
    config = LoaderConfig(batch_size=16, max_history_length=60, num_workers=1 + 2 * rank, prefetch=2)
    own: dict[str, Any] = {"rank": rank, "world_size": world_size}
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


def _train_step(timer: StepTimer, batch: Any) -> _Step:
    """Train a step that takes a time by its samples."""
    lengths = batch.features["item_id"].lengths()[: batch.num_real].double()
    seconds = A + B * float(lengths.sum()) + C * float((lengths**2).sum())
    _Time.now += seconds
    with timer.waiting():
        dist.barrier()
    return _Step(batch.epoch, ids_of(batch), seconds)


def _job(rank: int, world_size: int, path: Path, way: str, stops: tuple[int, ...]) -> Any:
    """Train 5 epochs by jobs that stop after so many steps, from each of which the next one resumes."""
    trained: list[_Step] = []
    state: dict[str, Any] = {}
    for stop in (*stops, None):
        with _made_up_times(), StepTimer(every=3) as timer:
            balance = BalanceConfig(cost=FIRST, on_step=timer, refit_every=EVERY, **WAYS[way])
            with closing(_batches(path, rank, world_size, way, balance, **state)) as batches:
                epochs = itertools.chain.from_iterable(itertools.repeat(batches, 5 - state.get("epoch", 0)))
                trained += [_train_step(timer, batch) for batch in itertools.islice(epochs, stop)]
                state = dict(batches.state_dict())
    return trained, timer.cost


def _imbalance(of_ranks: list[list[_Step]]) -> float:
    """Return the time of the slowest rank over the mean, of all steps together."""
    seconds = np.array([[step.seconds for step in steps] for steps in of_ranks])
    return float(seconds.max(axis=0).sum() / seconds.mean(axis=0).sum())


# A job that stops goes on from before the first decision, after it and within windows that another cost has assigned,
# and in a later epoch.
STOPS = (EVERY - 2, EVERY + 5, 3 * EVERY + 3)


@pytest.mark.parametrize(
    ("way", "stops"),
    [*((way, ()) for way in WAYS), *((way, STOPS) for way in ("balancer, windows", "windows", "packed", "elastic"))],
)
def test_a_job_comes_to_be_balanced_by_the_times_that_it_measures_and_trains_each_sample_once(
    ranks: RankPool, dataset: Path, way: str, stops: tuple[int, ...]
) -> None:
    (first, cost), (second, of_second) = ranks.run(2, _job, dataset, way, stops)
    epochs: dict[int, list[int]] = {}
    for step in (*first, *second):
        epochs.setdefault(step.epoch, []).extend(step.ids)
    assert len(epochs) == 5
    assert len({tuple(sorted(ids)) for ids in epochs.values()}) == 1
    assert len(set(epochs[0])) == len(epochs[0]) > 1300
    if stops:
        return
    assert cost == of_second
    per_token, per_square = cost.linear * cost.seconds_per_unit, cost.quadratic * cost.seconds_per_unit
    assert (cost.seconds_per_step, per_token, per_square) == pytest.approx((A, B, C), rel=1e-3)
    # Epochs of 44 steps, so the second decision is in the first epoch, and others are at its end or in later ones.
    assert len(first) > 200
    # Some steps last as long as their longest sample, unless they are made in windows.
    assert _imbalance([first[:EVERY], second[:EVERY]]) > 1.02
    assert _imbalance([first[2 * EVERY :], second[2 * EVERY :]]) < 1.003


def _made_up_costs() -> Any:
    """Have each decision change the cost: to that of squares, in large units, or to that of tokens."""
    common: dict[str, Any] = {"fraction_bits": 1, "seconds_per_step": A, "steps": 20, "r2": 1.0, **COUNTED}
    squares, tokens = (MeasuredCost(linear=b, quadratic=c, **common) for b, c in ((0, 1 << 34), (1, 0)))
    return mock.patch(
        "evenrank.dataloader.balance.refit.refit", side_effect=lambda cost, *_: tokens if cost == squares else squares
    )


@pytest.mark.parametrize(("trained", "saved"), [(9, 9), (12, 10), (16, 14), (21, 18)])
def test_a_job_may_go_back_to_any_step_while_costs_change(dataset: Path, trained: int, saved: int) -> None:
    config = LoaderConfig(batch_size=32, max_history_length=60, prefetch=2)
    with _made_up_costs() as decide, StepTimer() as timer:
        balance = BalanceConfig(cost=FIRST, on_step=timer, refit_every=5, window=4)
        loader = build_loader(dataset, config, rank=0, world_size=1, balance=balance)
        everything = sorted(number for batch in loader for number in ids_of(batch))
        before = list(itertools.islice(loader, trained))
        loader.load_state_dict(loader.state_dict(after=before[saved - 1]))
        decisions = decide.call_count
        assert decisions > trained // 5
        loader.peek(500)
        assert decide.call_count == decisions
        assert sorted(number for batch in (*before[:saved], *loader) for number in ids_of(batch)) == everything


_ENDS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from tests.dataloader.balance.test_refit import costs_of_rank_1

costs = costs_of_rank_1(600)
waits = ThreadPoolExecutor(1).submit(costs.after, 1)
while not costs._lock.locked():
    pass
raise KeyError("an error of the training")
"""


def costs_of_rank_1(timeout: float) -> CostSchedule:
    """Return costs of which rank 0 decides nothing."""
    members = Members(rank=1, world_size=2, store=HashStore())
    return CostSchedule(FIRST, every=7, members=members, timeout=timedelta(seconds=timeout))


def test_a_rank_that_waits_for_a_decision_in_vain_says_for_whose_and_an_error_ends_its_program() -> None:
    with pytest.raises(RankError) as raised:
        costs_of_rank_1(0.5).after(2)
    assert str(raised.value) == (
        "rank 0 has not planned step 7, before which it fits the cost, within 0:00:00.500000; train equally many steps "
        "on all ranks, or raise timeout"
    )
    (left := threading.Event()).set()
    with pytest.raises(RankError, match=r"^step 7 was not planned before this rank left the iteration$"):
        costs_of_rank_1(600).after(2, left)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", _ENDS]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.endswith("KeyError: 'an error of the training'\n")


@pytest.mark.parametrize(("window", "persistent"), [(1, False), (4, True)])
def test_nobody_waits_for_a_decision_on_an_epoch_that_was_left(dataset: Path, window: int, persistent: bool) -> None:
    balance = BalanceConfig(cost=FIRST, on_step=StepTimer(), refit_every=8, window=window)
    config = LoaderConfig(batch_size=16, num_workers=1, prefetch=4, persistent_workers=persistent)
    loader = build_loader(dataset, config, rank=0, world_size=1, balance=balance)
    costs = loader._costs
    assert costs is not None
    waiting = costs_of_rank_1(600)
    costs._members, costs._store, costs._timeout = waiting._members, waiting._store, waiting._timeout
    steps: Any = iter(loader)
    for _ in range(5):
        next(steps)
    while not costs._lock.locked():  # by a thread that reads ahead
        pass
    steps.close()
    assert costs._lock.acquire(timeout=30)


def _times(cost: tuple[float, float, float], num_steps: int, noise: float, world_size: int = 4) -> RankTimes:
    """Return times of steps that are balanced by `FIRST`: of 32 samples per rank, lognormal with a mean of 512."""
    rng = np.random.default_rng(0)
    lengths = Lognormal(mean=512, std=512).sample(rng, num_steps * world_size * 32).reshape(num_steps, world_size, 32)
    assigned = [partition(step, world_size, tokens=step) for step in lengths]
    tokens, squares = (
        np.array([one.loads(step**power) for one, step in zip(assigned, lengths, strict=True)], dtype=float)
        for power in (1, 2)
    )
    exact = cost[0] + cost[1] * tokens + cost[2] * squares
    return RankTimes(tokens, tokens, squares, exact * (1 + noise * rng.standard_normal(exact.shape)))


TRUE = 0.01, 4e-7, 2e-10


def _interrupted(seconds: NDArray[np.float64]) -> None:
    seconds[...] += np.random.default_rng(1).random(seconds.shape) < 0.05  # for a second


def _slower(seconds: NDArray[np.float64]) -> None:
    seconds[:, 1] *= 1.2


@pytest.mark.parametrize(
    ("world_size", "num_steps", "noise", "disturb", "tolerance"),
    [
        (2, 200, 0.03, None, 0.2),
        (8, 200, 0.03, None, 0.2),
        (64, 64, 0.05, None, 0.3),  # many ranks make steps alike
        (4, 200, 0.03, _interrupted, 0.2),
        (2, 200, 0.02, _slower, 0.4),
    ],
)
def test_the_cost_of_balanced_steps_is_found_in_noise(
    world_size: int, num_steps: int, noise: float, disturb: Any, tolerance: float
) -> None:
    times = _times(TRUE, num_steps, noise, world_size)
    if disturb is not None:
        disturb(times.seconds)
    fitted = refit(FIRST, times, COUNTED)
    assert fitted.quadratic / fitted.linear == pytest.approx(TRUE[2] / TRUE[1], rel=tolerance)
    assert fitted.steps == num_steps * world_size
    assert world_size < 64 or fitted.r2 < 0.5  # which MeasuredCost.fit refuses
    if disturb is None and world_size < 64:  # it stays, where it is fitted again to other times
        with pytest.raises(ConfigError, match=r"explains \d.\d% more of the differences between ranks"):
            refit(fitted, _times(TRUE, 210, noise, world_size), COUNTED)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (((0.01, 4e-7, 0.0), 200, 0.0), r"explains 0.\d% more of the differences between ranks"),
        (((0.01, 4e-7, 0.0), 200, 0.05), r"explains 0.\d% more of the differences between ranks"),
        ((TRUE, 50, 0.01, 1), r"explains 0.0% more of the differences between ranks"),  # one rank alone
        ((TRUE, 4, 0.0), "16 times are too few to fit a cost"),
        ((TRUE, 0, 0.0), "0 times are too few to fit a cost"),
    ],
)
def test_the_right_cost_stays_and_any_without_times_enough(times: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refit(FIRST, _times(*times), COUNTED)


def test_a_cost_stays_where_none_can_be_fitted_and_in_a_copy_in_another_process() -> None:
    costs = CostSchedule(FIRST, every=5, timer=StepTimer())
    fitted = MeasuredCost(linear=7, quadratic=1, fraction_bits=40, seconds_per_step=A, steps=20, r2=1.0, **COUNTED)
    of_refit = "evenrank.dataloader.balance.refit."
    with (
        mock.patch(f"{of_refit}refit", side_effect=[ConfigError("no times"), fitted, fitted]),
        mock.patch(f"{of_refit}say") as said,
    ):
        assert costs.after(costs.decisions(4)) == costs.after(costs.decisions(5)) == FIRST
        assert costs.after(costs.decisions(10)) == costs.latest == fitted
        assert costs.after(0) == FIRST  # for steps that were planned before
        copy = pickle.loads(pickle.dumps(costs))
        assert copy.after(copy.decisions(100)) == fitted
        with mock.patch("os.getpid", return_value=-1):  # in a fork
            assert costs.after(4) == fitted
    lines = [call.args[0] for call in said.call_args_list]
    assert lines == ["step 5: the cost stays as it is: no times", mock.ANY]
    assert lines[1].startswith("step 10: the cost is fitted to 20 times: 1e+03 ms per step, 6.37e-06 us per token, ")
    assert costs.decisions(100) == 20
    assert not copy.can_change
