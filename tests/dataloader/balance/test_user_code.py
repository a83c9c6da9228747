"""Functions of users that write to the arrays that they are given change nothing but their own result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import (
    STRATEGIES,
    BalanceConfig,
    Balancer,
    PartitionProblem,
    StepMetrics,
    partition,
    register_strategy,
)
from tests.dataloader.balance.costs import Ints, Lengths
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.ranks import RankPool
from tests.registrations import restored

CONFIG = LoaderConfig(batch_size=4, max_history_length=30, max_num_candidates=1)


class Pure:
    """Squared lengths, with as many tokens as twice the items."""

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return (2 * lengths["item_id"] + num_candidates) ** 2

    def tokens(self, lengths: Lengths) -> Ints:
        return 2 * lengths["item_id"]


class InPlace:
    """The same, computed in the arrays that it is given, which are mangled afterwards."""

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        cost = self.tokens(lengths)
        cost += num_candidates
        cost *= cost
        result = cost.copy()
        for values in (*lengths.values(), num_candidates):
            values.sort()
            values += 1
        return result

    def tokens(self, lengths: Lengths) -> Ints:
        tokens = lengths["item_id"]
        tokens *= 2
        return tokens


def _mangle(metrics: StepMetrics) -> None:
    metrics.before[:] = -1
    metrics.after[:] = -1


def _steps(batches: Any) -> list[Any]:
    def contents(batch: SequenceBatch) -> list[Any]:
        assert batch.labels is not None
        features = {key: rows_of(batch.features, key) for key in batch.features.keys()}  # noqa: SIM118
        labels, candidates = rows_of(batch.labels, "label"), batch.num_candidates.tolist()
        return [ids_of(batch), features, labels, candidates, batch.loss_tokens, batch.world_loss_tokens]

    steps = [contents(batch) for batch in batches]
    batches.close()
    return steps


def _every_way(rank: int, world_size: int, path: Path, cost: Any, options: dict[str, Any]) -> list[Any]:
    """Return the steps without an exchange and with either exchange."""
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    balance = BalanceConfig(cost=cost, on_step=_mangle, **options)
    ways = [_steps(build_loader(path, CONFIG, **ranks, balance=balance))]
    for exchange in ("all-to-all", "all-gather"):
        loader = build_loader(path, CONFIG, **ranks)
        ways.append(_steps(Balancer(loader, BalanceConfig(cost=cost, exchange=exchange, on_step=_mangle, **options))))
    return ways


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_rank": 260}], ids=str)
def test_a_cost_that_works_in_place_trains_the_same_samples(
    ranks: RankPool, small_dataset: Path, options: dict[str, Any]
) -> None:
    pure = ranks.run(2, _every_way, small_dataset, Pure(), options)
    in_place = ranks.run(2, _every_way, small_dataset, InPlace(), options)
    for of_pure, of_in_place in zip(pure, in_place, strict=True):
        assert len(of_pure[0]) > 10
        assert of_pure[0] == of_pure[1] == of_pure[2] == of_in_place[0] == of_in_place[1] == of_in_place[2]


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_a_strategy_that_works_in_place_assigns_the_same(max_tokens: int | None) -> None:
    rng = np.random.default_rng(0)
    costs, tokens = rng.integers(1, 100, 24), rng.integers(1, 15, 24)
    problems: list[PartitionProblem] = []

    def in_rows(problem: PartitionProblem) -> Ints:
        problems.append(problem)
        return np.sort(np.arange(len(problem.costs)) % problem.world_size).astype(np.int64)

    def mangles(problem: PartitionProblem) -> Ints:
        assigned = in_rows(problem)
        assert problem.tokens is not None
        for values in (problem.costs, problem.tokens, problem.order, problem.home):
            values[:] = 0
        return assigned

    options: dict[str, Any] = {"tokens": tokens, "max_tokens_per_rank": max_tokens}
    before = costs.copy(), tokens.copy()
    with restored(STRATEGIES):
        register_strategy("in rows")(in_rows)  # type: ignore[arg-type]
        register_strategy("mangles")(mangles)  # type: ignore[arg-type]
        expected = partition(costs, 4, strategy="in rows", **options)
        assigned = partition(costs, 4, strategy="mangles", **options)
    assert assigned.rank_of.tolist() == expected.rank_of.tolist()
    assert (costs.tolist(), tokens.tolist()) == (before[0].tolist(), before[1].tolist())
    assert len(problems) == 2
    if max_tokens is not None:  # which the strategy alone does not keep
        assert np.bincount(np.arange(24) // 6, weights=tokens).max() > max_tokens
        assert expected.loads(tokens).max() <= max_tokens


def test_a_strategy_that_works_in_place_cannot_hide_that_a_limit_is_exceeded() -> None:
    def none(problem: PartitionProblem) -> Ints:
        problem.costs[:] = 0
        assert problem.tokens is not None
        problem.tokens[:] = 0
        return np.array([0, 0, 1, 1])

    with restored(STRATEGIES):
        register_strategy("mine")(none)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="max_tokens_per_rank = 95 cannot be kept"):
            partition(
                np.array([4, 3, 2, 1]), 2, tokens=np.array([100, 90, 10, 5]), strategy="mine", max_tokens_per_rank=95
            )
