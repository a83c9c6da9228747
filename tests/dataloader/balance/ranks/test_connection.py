import itertools
import multiprocessing
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import HashStore  # type: ignore[attr-defined]

from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig, RandomBatches, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, StepMetrics, partition, register_strategy
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.partition.strategies import PartitionProblem
from evenrank.dataloader.balance.ranks.connection import PlanCheck
from evenrank.dataloader.balance.ranks.process_group import Members
from evenrank.dataloader.sampling.epoch_positions import _FORMAT
from evenrank.training import LossAverage
from tests.dataloader.balance.costs import Ints, Lengths, one_per_sample
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.resuming import with_changes
from tests.ranks import RankPool
from tests.registrations import restored

TIMEOUT = timedelta(seconds=30)


class _CostOfRank:
    """Costs are equal on all ranks, tokens are not: random numbers with the rank as seed."""

    def __init__(self, rank: int) -> None:
        self._rng = np.random.default_rng(rank)

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return lengths["item_id"] + 1

    def tokens(self, lengths: Lengths) -> Ints:
        return self._rng.integers(0, 1000, len(lengths["item_id"]))


def _batches(rank: int, world_size: int) -> RandomBatches[Any]:
    config = LoaderConfig(batch_size=6, max_history_length=50)
    return RandomBatches(config, num_batches=5, rank=rank, world_size=world_size)


def _samples(batch: Any) -> list[tuple[int, list[int]]]:
    return list(zip(ids_of(batch), rows_of(batch.features, "item_id"), strict=False))


def _train_with_tokens_of_rank(rank: int, world_size: int, options: dict[str, Any]) -> list[Any]:
    with Balancer(_batches(rank, world_size), BalanceConfig(cost=_CostOfRank(rank), **options)) as balancer:
        return [_samples(batch) for batch in balancer]


@pytest.mark.parametrize(
    "options",
    [{"strategy": "min-move", "exchange": "all-gather"}, {"max_tokens_per_rank": 3200, "on_overflow": "warn"}],
)
@pytest.mark.filterwarnings("ignore:max_tokens_per_rank")
def test_tokens_that_each_rank_counts_in_its_own_way_lose_no_sample(ranks: RankPool, options: dict[str, Any]) -> None:
    by_rank = ranks.run(3, _train_with_tokens_of_rank, options)
    for number, steps in enumerate(zip(*by_rank, strict=True)):
        loaded = [_samples(_batches(rank, 3).batch(number)) for rank in range(3)]
        assert sorted(itertools.chain(*steps)) == sorted(itertools.chain(*loaded))


def _train_with_strategy(rank: int, world_size: int, what: str, exchange: str) -> None:
    calls = 0

    def strategy(problem: PartitionProblem) -> NDArray[np.int32]:
        nonlocal calls
        calls += 1
        rank_of = partition(problem.costs, problem.world_size).rank_of.reshape(-1)
        if rank == 1 and calls == 3:  # its third step
            if what == "raises":
                raise ZeroDivisionError("no such sample")
            rank_of = rank_of[::-1].copy()
        return rank_of

    with restored(STRATEGIES):
        register_strategy("mine")(strategy)
        config = BalanceConfig(cost=_CostOfRank(0), strategy="mine", exchange=exchange)
        with Balancer(_batches(rank, world_size), config) as balancer:
            list(balancer)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_that_assigns_differently_is_named_before_a_sample_moves(ranks: RankPool, exchange: str) -> None:
    for failure in ranks.try_run(3, _train_with_strategy, "differs", exchange):
        assert failure.type_name == "RankError"
        message = (
            "in step 2 of epoch 0, rank 1 assigns samples differently from rank 0, given the same costs; the strate"
        )
        assert failure.message.startswith(f"{message}gy 'mine' must be a pure function of its argument")


def test_an_error_in_the_strategy_of_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    own, of_others = "no such sample", "rank 1 failed: ZeroDivisionError: no such sample"
    failures = ranks.try_run(3, _train_with_strategy, "raises", "all-to-all")
    assert [failure.message for failure in failures] == [of_others, own, of_others]


# Loaders that plan alone


class Refitted:
    """A cost whose shape changes in the middle of a job, as one that is fitted to times of steps does."""

    power = 2

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return (1 + lengths["item_id"]) ** self.power


def _loader(path: Path, rank: int, world_size: int, cost: Any = None, **options: Any) -> Any:
    balance = BalanceConfig(**{"cost": cost or Refitted(), "timeout": TIMEOUT, **options})
    return build_loader(path, LoaderConfig(batch_size=4, prefetch=1), rank=rank, world_size=world_size, balance=balance)


def _error(function: Any) -> str | None:
    try:
        function()
    except RankError as error:
        return str(error)
    return None


def _train(rank: int, world_size: int, path: Path, refitted_on: list[int]) -> tuple[list[int], str | None]:
    cost = Refitted()
    loader = _loader(path, rank, world_size, cost)
    ids = []

    def epoch() -> None:
        for batch in loader:
            ids.extend(ids_of(batch))
            if batch.step == 5 and rank in refitted_on:
                cost.power = 0

    return ids, _error(epoch)


@pytest.mark.parametrize("refitted_on", [[1], [0, 2], [0, 1, 2], []])
def test_an_epochs_end_tells_that_plans_differed(ranks: RankPool, small_dataset: Path, refitted_on: list[int]) -> None:
    results = ranks.run(3, _train, small_dataset, refitted_on)
    trained = Counter(sample for ids, _ in results for sample in ids)
    (error,) = {error for _, error in results}
    if len(refitted_on) in (0, 3):
        assert set(trained.values()) == {1}
        assert error is None
    else:
        assert set(trained.values()) > {1}  # some twice, and others never
        assert "have planned steps differently, at the end of epoch 0: samples" in error


def _states(rank: int, world_size: int, path: Path) -> list[str | None]:
    cost = Refitted()
    loader = _loader(path, rank, world_size, cost)
    iterator = iter(loader)
    errors = []
    for step in range(3):
        next(iterator)
        for _ in range(2):  # twice, so that the first rank asks after the others
            dist.barrier()
            errors.append(_error(loader.state_dict))
        if step == 0 and rank == 1:
            cost.power = 0
    return errors


def test_states_tell_a_difference_once_another_rank_has_asked_for_its_own(ranks: RankPool, small_dataset: Path) -> None:
    first, second = ranks.run(2, _states, small_dataset)
    assert first[:2] == second[:2] == [None, None]
    # One of the ranks may have been the first to ask.
    assert [first[2], second[2]].count(None) <= 1
    assert first[3] is not None
    assert {*first[2:], *second[2:]} - {None} == {first[3]}


def _average(rank: int, world_size: int, path: Path) -> list[str | None]:
    cost = Refitted()
    loader = _loader(path, rank, world_size, cost)
    average = LossAverage()
    errors = []
    for batch in itertools.islice(loader, 9):
        average.update(torch.tensor(1.0), batch)
        if batch.step % 3 == 2:
            errors.append(_error(average.compute))
            average.reset()
        if batch.step == 4:
            cost.power = 2 - rank
    if rank == 1:  # of other steps nothing is known
        average.update(torch.tensor(1.0), batch)
    errors.append(_error(average.compute))
    average.reset()
    for skipped in range(2):
        if skipped != rank:
            average.update(torch.tensor(1.0), batch.replace(position=skipped, plan_hash=(1 + skipped) << 50))
    errors.append(_error(average.compute))
    return errors


def test_the_average_of_losses_tells_all_ranks_at_once(ranks: RankPool, small_dataset: Path) -> None:
    message = "ranks have planned the steps of this average differently: samples were left out or"
    for before, at_once, later, *unknown in ranks.run(2, _average, small_dataset):
        assert at_once.startswith(message)
        assert later is not None
        assert [before, *unknown] == [None] * 3


def _out_of_step(rank: int, world_size: int, path: Path, changes: dict[str, int]) -> str | None:
    loader = _loader(path, rank, world_size)
    changed = {name: rank * value for name, value in changes.items()}
    loader.load_state_dict(with_changes(_FORMAT, loader.state_dict(), **changed))
    return _error(lambda: list(loader))


@pytest.mark.parametrize("changes", [{"position": 16}, {"epoch": 1}], ids=str)
def test_ranks_that_load_other_states_are_told(ranks: RankPool, small_dataset: Path, changes: dict[str, int]) -> None:
    first, second = ranks.run(2, _out_of_step, small_dataset, changes)
    assert first == second
    assert first.startswith("ranks are out of step: rank ")


def _abandon(rank: int, world_size: int, path: Path) -> list[str | None]:
    """Leave an epoch of which each rank has pulled another number of steps, as threads do that read ahead."""
    loader = _loader(path, rank, world_size)
    abandoned = iter(loader)
    list(itertools.islice(abandoned, 3 + rank))
    whole = iter(loader)
    next(whole)
    list(itertools.islice(abandoned, 3))  # a thread may go on for a while
    error = _error(lambda: list(whole))
    dist.barrier()
    return [error, _error(loader.state_dict), _error(lambda: list(loader))]


def test_an_epoch_that_is_abandoned_is_not_compared(ranks: RankPool, small_dataset: Path) -> None:
    assert ranks.run(2, _abandon, small_dataset) == [[None] * 3] * 2


def test_plans_can_be_compared_while_another_thread_adds_some() -> None:
    check = PlanCheck(Members(rank=0, world_size=1, store=HashStore()), TIMEOUT)
    iteration, is_over = check.begin_epoch(0, 10), threading.Event()

    def add() -> None:
        while not is_over.is_set():
            iteration.add(7)

    with ThreadPoolExecutor(1) as threads:
        adding = threads.submit(add)
        try:
            for _ in range(100):
                check.compare()
        finally:
            is_over.set()
        adding.result()
    assert iteration.plans[0] > 0


def test_a_forked_process_leaves_the_connection_alone() -> None:
    check = PlanCheck(Members(rank=0, world_size=2, store=HashStore()), timedelta(seconds=60))

    def compare() -> None:
        check.compare()
        check.end_epoch(check.begin_epoch(1, 5))  # would wait for the other rank

    process = multiprocessing.get_context("fork").Process(target=compare)
    process.start()
    process.join(50)
    assert process.exitcode == 0


def _resumed(rank: int, world_size: int, path: Path, options: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    state = None
    for stop in (3, 2, None):
        loader = _loader(path, rank, world_size, **options)
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, stop):
            ids.extend(ids_of(batch))
            state = loader.state_dict()
    assert len(list(loader)) == len(loader)  # the next epoch
    return ids


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"pack": True, "max_tokens_per_rank": 700}], ids=str)
def test_ranks_that_agree_are_never_refused(ranks: RankPool, small_dataset: Path, options: dict[str, Any]) -> None:
    by_rank = ranks.run(3, _resumed, small_dataset, options)
    trained = Counter(sample for ids in by_rank for sample in ids)
    assert len(trained) > 100
    assert set(trained.values()) == {1}


def _fail_in_epoch(rank: int, world_size: int, path: Path) -> None:
    def observe(metrics: StepMetrics) -> None:
        if rank == 1 and metrics.step == 3:
            raise OSError("disk full")

    balance = BalanceConfig(cost=one_per_sample, on_step=observe)
    for _ in build_loader(path, LoaderConfig(batch_size=4), rank=rank, world_size=world_size, balance=balance):
        pass


def test_an_error_within_an_epoch_ends_the_wait_of_the_others_at_its_end(ranks: RankPool, small_dataset: Path) -> None:
    waiting, failed = ranks.try_run(2, _fail_in_epoch, small_dataset)
    assert (failed.type_name, failed.message) == ("OSError", "disk full")
    assert (waiting.type_name, waiting.message) == ("RankError", "rank 1 failed: OSError: disk full")


def _leaves(rank: int, world_size: int, path: Path) -> str | None:
    loader = _loader(path, rank, world_size, timeout=timedelta(seconds=2))
    return _error(lambda: list(itertools.islice(loader, 4 if rank == 1 else None)))


def test_a_rank_that_never_comes_is_an_error_after_the_timeout(ranks: RankPool, small_dataset: Path) -> None:
    first, second = ranks.run(2, _leaves, small_dataset)
    message = "1 of 2 ranks have not reached the end of epoch 0 within 0:00:02; leave loops at the same step on all r"
    assert first.startswith(message)
    assert second is None


def test_the_hash_of_a_plan_is_that_of_who_trains_what(small_dataset: Path) -> None:
    def hashes(cost: Any, rank: int, **options: Any) -> list[int | None]:
        config = LoaderConfig(**{"batch_size": 4, **options})
        balance = BalanceConfig(cost=cost)
        loader = build_loader(small_dataset, config, rank=rank, world_size=2, balance=balance)
        return [batch.plan_hash for batch in loader]

    first = hashes(Refitted(), 0)
    assert len(set(first)) == len(first) > 10
    assert hashes(Refitted(), 1) == first == hashes(Refitted(), 0, num_workers=2, prefetch=3)
    # A few steps, such as a short last one, may be assigned alike.
    assert sum(a != b for a, b in zip(hashes(one_per_sample, 0), first, strict=True)) > 0.8 * len(first)
    assert not set(hashes(Refitted(), 0, seed=1)) & set(first)
