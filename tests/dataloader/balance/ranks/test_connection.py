"""Ranks that plan differently are told before a sample moves or, where each plans alone, at the next comparison."""

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import HashStore  # type: ignore[attr-defined]

from evenrank.core.errors import EvenrankError
from evenrank.dataloader import LoaderConfig, RandomBatches, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, StepMetrics, partition, register_strategy
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.partition.strategies import PartitionProblem
from evenrank.dataloader.balance.ranks.connection import PlanCheck
from evenrank.dataloader.balance.ranks.process_group import Members
from evenrank.training import LossAverage
from tests.dataloader.balance.costs import Ints, Lengths, one_per_sample
from tests.dataloader.batch_helpers import ids_of
from tests.ranks import RankPool
from tests.registrations import restored

TIMEOUT = timedelta(seconds=30)


def _error(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except (EvenrankError, ZeroDivisionError, OSError) as error:
        return str(error)
    return None


def _batches(rank: int, world_size: int) -> RandomBatches[Any]:
    config = LoaderConfig(batch_size=6, max_history_length=50)
    return RandomBatches(config, num_batches=5, rank=rank, world_size=world_size)


def _train_with_strategy(rank: int, world_size: int) -> list[str | None]:
    calls, what, errors = 0, "", []

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
        for case in (*(("differs", name) for name in EXCHANGES), ("raises", "all-to-all")):
            calls, (what, exchange) = 0, case
            config = BalanceConfig(cost=one_per_sample, strategy="mine", exchange=exchange)
            with Balancer(_batches(rank, world_size), config) as balancer:
                errors.append(_error(lambda: list(balancer)))
    return errors


def test_a_rank_that_assigns_differently_or_fails_is_named_on_all_before_a_sample_moves(ranks: RankPool) -> None:
    differs = (
        "in step 2 of epoch 0, rank 1 assigns samples differently from rank 0, given the same costs; the strategy "
        "'mine' must be a pure function of its argument, and the same code on all ranks"
    )
    own, of_others = "no such sample", "rank 1 failed: ZeroDivisionError: no such sample"
    expected = [[differs, differs, line] for line in (of_others, own, of_others)]
    assert ranks.run(3, _train_with_strategy) == expected


# Loaders that plan alone


class Refitted:
    """A cost whose shape changes in the middle of a job, as one that is fitted to times of steps does."""

    power = 2

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return (1 + lengths["item_id"]) ** self.power


def _loader(path: Path, rank: int, world_size: int, cost: Any = None, **options: Any) -> Any:
    balance = BalanceConfig(**{"cost": cost or Refitted(), "timeout": TIMEOUT, **options})
    return build_loader(path, LoaderConfig(batch_size=4, prefetch=1), rank=rank, world_size=world_size, balance=balance)


REFITTED_ON: list[list[int]] = [[1], [0, 2], [0, 1, 2], []]


def _train(rank: int, world_size: int, path: Path) -> list[tuple[list[int], str | None]]:
    of_cases = []
    for refitted_on in REFITTED_ON:
        ids: list[int] = []
        cost = Refitted()

        def epoch(loader: Any, ids: list[int] = ids, cost: Any = cost, is_refitted: bool = rank in refitted_on) -> None:
            for batch in loader:
                ids.extend(ids_of(batch))
                if batch.step == 5 and is_refitted:
                    cost.power = 0

        loader = _loader(path, rank, world_size, cost)
        of_cases.append((ids, _error(lambda: epoch(loader))))  # noqa: B023
    return of_cases


def test_an_epochs_end_tells_that_plans_differed(ranks: RankPool, small_dataset: Path) -> None:
    for refitted_on, results in zip(REFITTED_ON, zip(*ranks.run(3, _train, small_dataset), strict=True), strict=True):
        trained = Counter(sample for ids, _ in results for sample in ids)
        (error,) = {error for _, error in results}
        if len(refitted_on) in (0, 3):
            assert set(trained.values()) == {1}
            assert error is None
        else:
            assert set(trained.values()) > {1}  # some twice, and others never
            assert "have planned steps differently, at the end of epoch 0: samples" in str(error)


def _states(rank: int, world_size: int, path: Path) -> tuple[list[str | None], list[str | None]]:
    """Return the errors of states, after each step twice, and of averages of losses, after every third step."""
    cost = Refitted()
    loader = _loader(path, rank, world_size, cost)
    iterator = iter(loader)
    states, averages = [], []
    for step in range(3):
        next(iterator)
        for _ in range(2):  # twice, so that the first rank asks after the others
            dist.barrier()
            states.append(_error(loader.state_dict))
        if step == 0 and rank == 1:
            cost.power = 0
    cost = Refitted()
    average = LossAverage()
    for batch in itertools.islice(_loader(path, rank, world_size, cost), 9):
        average.update(torch.tensor(1.0), batch)
        if batch.step % 3 == 2:
            averages.append(_error(average.compute))
            average.reset()
        if batch.step == 4:
            cost.power = 2 - rank
    if rank == 1:  # of other steps nothing is known
        average.update(torch.tensor(1.0), batch)
    averages.append(_error(average.compute))
    average.reset()
    for skipped in range(2):
        if skipped != rank:
            average.update(torch.tensor(1.0), batch.replace(position=skipped, plan_hash=(1 + skipped) << 50))
    return states, [*averages, _error(average.compute)]


def test_states_and_averages_of_losses_tell_a_difference(ranks: RankPool, small_dataset: Path) -> None:
    (first, of_first), (second, of_second) = ranks.run(2, _states, small_dataset)
    # States do once another rank has asked for its own; one of the ranks may have been the first to ask.
    assert first[:2] == second[:2] == [None, None]
    assert [first[2], second[2]].count(None) <= 1
    assert first[3] is not None
    assert {*first[2:], *second[2:]} - {None} == {first[3]}
    for before, at_once, later, *unknown in (of_first, of_second):
        assert str(at_once).startswith("ranks have planned the steps of this average differently: samples were left")
        assert later is not None
        assert [before, *unknown] == [None] * 3


def _come_apart(rank: int, world_size: int, path: Path) -> list[str | None]:
    """Load other states on each rank; abandon an epoch of which each has pulled other steps; fail in one; leave one."""
    errors = []
    for epoch in (0, 1):
        loader = _loader(path, rank, world_size)
        if rank == 1:
            other = build_loader(path, LoaderConfig(batch_size=4), rank=0, world_size=1)
            other.begin_at(epoch)
            list(itertools.islice(other, 4))
            loader.load_state_dict(other.state_dict())
        errors.append(_error(lambda: list(loader)))  # noqa: B023
    loader = _loader(path, rank, world_size)
    abandoned, whole = iter(loader), iter(loader)
    list(itertools.islice(abandoned, 3 + rank))
    next(whole)
    list(itertools.islice(abandoned, 3))  # a thread may go on for a while
    errors.append(_error(lambda: list(whole)))
    dist.barrier()
    errors += [_error(loader.state_dict), _error(lambda: list(loader))]

    def observe(metrics: StepMetrics) -> None:
        if rank == 1 and metrics.step == 3:
            raise OSError("disk full")

    errors.append(_error(lambda: list(_loader(path, rank, world_size, one_per_sample, on_step=observe))))
    loader = _loader(path, rank, world_size, timeout=timedelta(seconds=2))
    errors.append(_error(lambda: list(itertools.islice(loader, 4 if rank == 1 else None))))
    return errors


def test_ranks_that_are_out_of_step_are_told_and_epochs_that_are_abandoned_not_compared(
    ranks: RankPool, small_dataset: Path
) -> None:
    first, second = ranks.run(2, _come_apart, small_dataset)
    assert first[:5] == second[:5]
    assert all(str(error).startswith("ranks are out of step: rank ") for error in first[:2])
    # An error within an epoch ends the wait of the others at its end.
    assert first[2:6] == [None, None, None, "rank 1 failed: OSError: disk full"]
    message = "1 of 2 ranks have not reached the end of epoch 0 within 0:00:02; leave loops at the same step on all r"
    assert str(first[6]).startswith(message)
    assert second[5:] == ["disk full", None]


def test_a_forked_process_leaves_the_connection_alone() -> None:
    check = PlanCheck(Members(rank=0, world_size=2, store=HashStore()), timedelta(seconds=60))

    def compare() -> None:
        check.compare()
        check.end_epoch(check.begin_epoch(1, 5))  # would wait for the other rank

    process = multiprocessing.get_context("fork").Process(target=compare)
    process.start()
    process.join(50)
    assert process.exitcode == 0
