"""Ranks that plan differently learn of it: at once with a Balancer, later where each plans alone. Real Gloo groups."""

import itertools
import multiprocessing
import threading
from collections import Counter
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
from evenrank.dataloader.balance import (
    STRATEGIES,
    BalanceConfig,
    Balancer,
    PartitionProblem,
    partition,
    register_strategy,
)
from evenrank.dataloader.balance.ranks.metadata import MetadataAllGather
from evenrank.dataloader.balance.ranks.consistency import PlanCheck, confirm
from evenrank.dataloader.balance.ranks.process_group import Members, members_of
from evenrank.dataloader.state.resume_point import _FORMAT
from evenrank.training import LossAverage
from tests.dataloader.balance.costs import Ints, Lengths, one_per_sample
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.resuming import with_changes
from tests.ranks import RankPool
from tests.registrations import restored

CONFIG = LoaderConfig(batch_size=6, max_history_length=50)
STEPS = 5


class _CostOfRank:
    """Costs are equal on all ranks, tokens are not: random numbers with the rank as seed."""

    def __init__(self, rank: int) -> None:
        self._rng = np.random.default_rng(rank)

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return lengths["item_id"] + 1

    def tokens(self, lengths: Lengths) -> Ints:
        return self._rng.integers(0, 1000, len(lengths["item_id"]))


def _batches(rank: int, world_size: int) -> RandomBatches[Any]:
    return RandomBatches(CONFIG, num_batches=STEPS, rank=rank, world_size=world_size)


def _samples(batch: Any) -> list[tuple[int, list[int]]]:
    return list(zip(ids_of(batch), rows_of(batch.features, "item_id"), strict=False))


def _train_with_tokens_of_rank(
    rank: int, world_size: int, options: dict[str, Any]
) -> list[list[tuple[int, list[int]]]]:
    with Balancer(_batches(rank, world_size), BalanceConfig(cost=_CostOfRank(rank), **options)) as balancer:
        return [_samples(batch) for batch in balancer]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "lpt-swap"},
        {"strategy": "min-move", "exchange": "all-gather"},
        {"strategy": "karmarkar-karp", "max_tokens_per_rank": 3200, "on_overflow": "warn"},
    ],
)
@pytest.mark.filterwarnings("ignore:max_tokens_per_rank")
def test_tokens_that_each_rank_counts_in_its_own_way_lose_no_sample(ranks: RankPool, options: dict[str, Any]) -> None:
    by_rank = ranks.run(3, _train_with_tokens_of_rank, options)
    for number in range(STEPS):
        loaded = [_samples(_batches(rank, 3).batch(number)) for rank in range(3)]
        expected = itertools.chain.from_iterable(loaded)
        assert sorted(sample for steps in by_rank for sample in steps[number]) == sorted(expected)


def _train_with_strategy(rank: int, world_size: int, what: str, exchange: str) -> list[int]:
    calls = 0

    def strategy(problem: PartitionProblem) -> NDArray[np.int32]:
        nonlocal calls
        calls += 1
        rank_of = partition(problem.costs, problem.world_size, strategy="lpt-swap").rank_of.reshape(-1)
        if rank == 1 and calls == 3:  # its third step
            if what == "raises":
                raise ZeroDivisionError("no such sample")
            rank_of = rank_of[::-1].copy()
        return rank_of

    trained: list[int] = []
    with restored(STRATEGIES):
        register_strategy("mine")(strategy)
        cost = _CostOfRank(0)
        with Balancer(
            _batches(rank, world_size), BalanceConfig(cost=cost, strategy="mine", exchange=exchange)
        ) as balancer:
            for batch in balancer:
                trained.append(batch.step)
    return trained


@pytest.mark.parametrize("exchange", ["all-to-all", "all-gather"])
def test_a_rank_that_assigns_differently_is_named_before_a_sample_moves(ranks: RankPool, exchange: str) -> None:
    for failure in ranks.try_run(3, _train_with_strategy, "differs", exchange):
        assert failure.type_name == "RankError"
        assert failure.message == (
            "in step 2 of epoch 0, rank 1 assigns samples differently from rank 0, given the same costs; the strategy "
            "'mine' must be a pure function of its argument, and the same code on all ranks"
        )


def test_an_error_in_the_strategy_of_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    first, culprit, last = ranks.try_run(3, _train_with_strategy, "raises", "all-to-all")
    assert (culprit.type_name, culprit.message) == ("ZeroDivisionError", "no such sample")
    for failure in (first, last):
        assert failure.type_name == "RankError"
        assert failure.message == "rank 1 failed: ZeroDivisionError: no such sample"


class _FailingTokens(_CostOfRank):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._fails = rank == 1

    def tokens(self, lengths: Lengths) -> Ints:
        if self._fails:
            raise ZeroDivisionError("no tokens")
        return super().tokens(lengths)


def _catch_failing_tokens(rank: int, world_size: int) -> str:
    balancer = Balancer(_batches(rank, world_size), BalanceConfig(cost=_FailingTokens(rank)))
    try:
        list(balancer)
    except RankError as error:  # and the program goes on without closing the Balancer
        return str(error)
    return "trained"


def test_tokens_that_raise_on_one_rank_end_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(3, _catch_failing_tokens) == ["rank 1 failed: ZeroDivisionError: no tokens"] * 3


def _confirm(rank: int, world_size: int, what: str) -> None:
    metadata, rank_of = np.arange(24, dtype=np.uint8).reshape(3, 8), np.zeros((3, 2), dtype=np.int32)
    if rank == 2 and what == "metadata":
        metadata[1, 7] ^= 1
    if rank == 2 and what == "assignment":
        rank_of[2, 1] = 1
    timeout = timedelta(seconds=30)
    gather = MetadataAllGather(members_of(None, timeout), None, timeout)
    try:
        confirm(gather, metadata=metadata, rank_of=rank_of, error=None, step_name="step 7", strategy="min-move")
    finally:
        gather.close()


def test_equal_plans_are_confirmed(ranks: RankPool) -> None:
    assert ranks.run(3, _confirm, "nothing") == [None] * 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("metadata", "in step 7, rank 2 received other metadata than rank 0; the memory or the network"),
        ("assignment", "in step 7, rank 2 assigns samples differently from rank 0, given the same costs;"),
    ],
)
def test_a_single_bit_that_differs_is_found_on_every_rank(ranks: RankPool, what: str, message: str) -> None:
    for failure in ranks.try_run(3, _confirm, what):
        assert failure.type_name == "RankError"
        assert failure.message.startswith(message)


# Loaders that plan alone


class Refitted:
    """A cost whose shape changes in the middle of a job, as one that is fitted to times of steps does."""

    power = 2

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return (1 + lengths["item_id"]) ** self.power


def _loader(path: Path, rank: int, world_size: int, cost: Any, **options: Any) -> Any:
    balance = BalanceConfig(cost=cost, timeout=timedelta(seconds=30), **options)
    return build_loader(path, LoaderConfig(batch_size=4, prefetch=1), rank=rank, world_size=world_size, balance=balance)


def _error(function: Any) -> str | None:
    try:
        function()
    except RankError as error:
        return str(error)
    return None


def _train(rank: int, world_size: int, path: Path, refitted_on: list[int]) -> tuple[list[int], str | None]:
    """Return the samples of an epoch, in which the cost changes on some ranks, and the error at its end."""
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
def test_the_end_of_an_epoch_tells_all_ranks_that_plans_differed(
    ranks: RankPool, small_dataset: Path, refitted_on: list[int]
) -> None:
    results = ranks.run(3, _train, small_dataset, refitted_on)
    trained = Counter(sample for ids, _ in results for sample in ids)
    errors = [error for _, error in results]
    if len(refitted_on) in (0, 3):
        assert set(trained.values()) == {1}
        assert errors == [None] * 3
    else:
        assert set(trained.values()) > {1}  # some twice, and others never
        assert all(
            error is not None and "have planned steps differently, at the end of epoch 0: samples" in error
            for error in errors
        )
        assert len(set(errors)) == 1


def _states(rank: int, world_size: int, path: Path) -> list[str | None]:
    cost = Refitted()
    loader = _loader(path, rank, world_size, cost)
    iterator = iter(loader)
    errors = []
    for step in range(3):
        next(iterator)
        dist.barrier()
        errors.append(_error(loader.state_dict))
        dist.barrier()  # for the second time, so that the first rank asks after the others
        errors.append(_error(loader.state_dict))
        if step == 0 and rank == 1:
            cost.power = 0
    return errors


def test_states_tell_a_difference_as_soon_as_another_rank_has_asked_for_its_own(
    ranks: RankPool, small_dataset: Path
) -> None:
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
    for errors in ranks.run(2, _average, small_dataset):
        assert errors[0] is None
        assert errors[1] is not None
        assert errors[1].startswith(
            "ranks have planned the steps of this average differently: samples were left out or"
        )
        assert errors[2] is not None
        assert errors[3:] == [None, None]


def _out_of_step(rank: int, world_size: int, path: Path, changes: dict[str, int]) -> str | None:
    loader = _loader(path, rank, world_size, Refitted())
    changed = {name: rank * value for name, value in changes.items()}
    loader.load_state_dict(with_changes(_FORMAT, loader.state_dict(), **changed))
    return _error(lambda: list(loader))


@pytest.mark.parametrize("changes", [{"position": 16}, {"epoch": 1}], ids=str)
def test_ranks_that_load_other_states_learn_of_it_by_the_end_of_the_epoch(
    ranks: RankPool, small_dataset: Path, changes: dict[str, int]
) -> None:
    errors = ranks.run(2, _out_of_step, small_dataset, changes)
    assert all(error is not None and error.startswith("ranks are out of step: rank ") for error in errors)
    assert errors[0] == errors[1]


def _abandon(rank: int, world_size: int, path: Path) -> list[str | None]:
    """Leave an epoch of which each rank has pulled another number of steps, as threads do that read ahead."""
    loader = _loader(path, rank, world_size, Refitted())
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
    check = PlanCheck(Members(rank=0, world_size=1, store=HashStore()), timedelta(seconds=30))
    iteration, is_over = check.begin_epoch(0, 10), threading.Event()

    def add() -> None:
        while not is_over.is_set():
            iteration.add(7)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(100):
            check.compare()
    finally:
        is_over.set()
        thread.join()
    assert iteration.plans[0] > 0


def _compare_elsewhere(check: PlanCheck) -> None:
    check.compare()
    check.end_epoch(check.begin_epoch(1, 5))  # would wait for the other rank


def test_a_forked_process_leaves_the_connection_alone() -> None:
    check = PlanCheck(Members(rank=0, world_size=2, store=HashStore()), timedelta(seconds=60))
    process = multiprocessing.get_context("fork").Process(target=_compare_elsewhere, args=(check,))
    process.start()
    process.join(50)
    assert process.exitcode == 0


def _resumed(rank: int, world_size: int, path: Path, options: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    state = None
    for stop in (3, 2, None):
        loader = _loader(path, rank, world_size, Refitted(), **options)
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


def _leaves(rank: int, world_size: int, path: Path) -> str | None:
    balance = BalanceConfig(cost=Refitted(), timeout=timedelta(seconds=2))
    loader = build_loader(path, LoaderConfig(batch_size=4), rank=rank, world_size=world_size, balance=balance)
    if rank == 1:
        list(itertools.islice(loader, 4))
        return None
    return _error(lambda: list(loader))


def test_a_rank_that_never_comes_is_an_error_after_the_timeout(ranks: RankPool, small_dataset: Path) -> None:
    assert ranks.run(2, _leaves, small_dataset) == [
        "1 of 2 ranks have not reached the end of epoch 0 within 0:00:02; leave loops at the same step on all ranks, "
        "or raise timeout",
        None,
    ]


def test_the_hash_of_a_plan_is_that_of_who_trains_what(small_dataset: Path) -> None:
    def hashes(cost: Any, rank: int, **config: Any) -> list[int | None]:
        balance = BalanceConfig(cost=cost)
        config = {"batch_size": 4, **config}
        loader = build_loader(small_dataset, LoaderConfig(**config), rank=rank, world_size=2, balance=balance)
        return [batch.plan_hash for batch in loader]

    first = hashes(Refitted(), 0)
    assert len(set(first)) == len(first) > 10
    assert hashes(Refitted(), 1) == first == hashes(Refitted(), 0, num_workers=2, prefetch=3)
    # A few steps, such as a short last one, may be assigned alike.
    assert sum(a != b for a, b in zip(hashes(one_per_sample, 0), first, strict=True)) > 0.8 * len(first)
    assert not set(hashes(Refitted(), 0, seed=1)) & set(first)
