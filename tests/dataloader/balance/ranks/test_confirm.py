"""Whatever makes ranks plan differently: no sample is lost, and the error names rank and step. Real Gloo groups."""

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig, RandomBatches
from evenrank.dataloader.balance import (
    STRATEGIES,
    BalanceConfig,
    Balancer,
    PartitionProblem,
    partition,
    register_strategy,
)
from evenrank.dataloader.balance.ranks.metadata import MetadataAllGather
from evenrank.dataloader.balance.ranks.plan_check import confirm
from evenrank.dataloader.balance.ranks.process_group import members_of
from tests.dataloader.balance.costs import Ints, Lengths
from tests.dataloader.batch_helpers import ids_of, rows_of
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


def _train_with_tokens_of_rank(
    rank: int, world_size: int, options: dict[str, Any]
) -> list[list[tuple[int, list[int]]]]:
    with Balancer(_batches(rank, world_size), BalanceConfig(cost=_CostOfRank(rank), **options)) as balancer:
        return [list(zip(ids_of(batch), rows_of(batch.features, "item_id"), strict=False)) for batch in balancer]


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
        loaded = [_batches(rank, 3).batch(number) for rank in range(3)]
        expected = [
            sample
            for batch in loaded
            for sample in zip(ids_of(batch), rows_of(batch.features, "item_id"), strict=False)
        ]
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
        confirm(
            gather,
            metadata=metadata,
            rank_of=rank_of,
            error=None,
            step_name="step 7 of epoch 1",
            strategy="min-move",
        )
    finally:
        gather.close()


def test_equal_plans_are_confirmed(ranks: RankPool) -> None:
    assert ranks.run(3, _confirm, "nothing") == [None] * 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("metadata", "in step 7 of epoch 1, rank 2 received other metadata than rank 0; the memory or the network"),
        ("assignment", "in step 7 of epoch 1, rank 2 assigns samples differently from rank 0, given the same costs;"),
    ],
)
def test_a_single_bit_that_differs_is_found_on_every_rank(ranks: RankPool, what: str, message: str) -> None:
    for failure in ranks.try_run(3, _confirm, what):
        assert failure.type_name == "RankError"
        assert failure.message.startswith(message)
