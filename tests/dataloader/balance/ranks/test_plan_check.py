"""Ranks that plan alone, and plan differently, learn of it. Real Gloo groups, and the stores of these."""

import itertools
import multiprocessing
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.balance.ranks.plan_check import PlanCheck
from evenrank.dataloader.balance.ranks.process_group import Members
from evenrank.dataloader.state.resume_point import _FORMAT
from evenrank.training import LossAverage
from tests.dataloader.balance.costs import Ints, Lengths, one_per_sample
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.resuming import with_changes
from tests.ranks import RankPool


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
