"""Functions of users that write to the arrays that they are given change nothing but their own result."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import (
    STRATEGIES,
    BalanceConfig,
    Balancer,
    PartitionProblem,
    StepMetrics,
    partition,
    register_strategy,
)
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import Ints, Lengths
from tests.ranks import RankPool
from tests.registrations import restored


class _Cost:
    """Squared lengths, with as many tokens as twice the items; maybe computed in the arrays that it is given."""

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        cost = self.tokens(lengths)
        cost += num_candidates
        cost *= cost
        result = cost.copy()
        if self._in_place:
            for values in (*lengths.values(), num_candidates):
                values.sort()
                values += 1
        return result

    def tokens(self, lengths: Lengths) -> Ints:
        tokens = lengths["item_id"] if self._in_place else lengths["item_id"].copy()
        tokens *= 2
        return tokens


def _mangle(metrics: StepMetrics) -> None:
    metrics.before[:] = -1
    metrics.after[:] = -1


def _every_way(rank: int, world_size: int, path: Path, in_place: bool, options: dict[str, Any]) -> list[Any]:
    """Return the steps without an exchange and with either exchange."""
    ways = []
    for exchange in (None, "all-to-all", "all-gather"):
        balance = BalanceConfig(cost=_Cost(in_place=in_place), on_step=_mangle, **options)
        config = LoaderConfig(batch_size=4, max_history_length=30, max_num_candidates=1)
        build = partial(build_loader, path, config, rank=rank, world_size=world_size)
        batches: Any = (
            build(balance=balance) if exchange is None else Balancer(build(), replace(balance, exchange=exchange))
        )
        ways.append([bits_of(batch) for batch in batches])
        batches.close()
    return ways


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_rank": 260}], ids=str)
def test_a_cost_that_works_in_place_trains_the_same_samples(
    ranks: RankPool, small_dataset: Path, options: dict[str, Any]
) -> None:
    pure, in_place = (ranks.run(2, _every_way, small_dataset, in_place, options) for in_place in (False, True))
    for of_rank, of_rank_in_place in zip(pure, in_place, strict=True):
        first, *others = [*of_rank, *of_rank_in_place]
        assert len(first) > 10
        assert all(way == first for way in others)


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_a_strategy_that_works_in_place_assigns_the_same(max_tokens: int | None) -> None:
    rng = np.random.default_rng(0)
    costs, tokens = rng.integers(1, 100, 24), rng.integers(1, 15, 24)
    before = costs.tolist(), tokens.tolist()

    def in_rows(problem: PartitionProblem) -> Ints:
        return np.sort(np.arange(len(problem.costs)) % problem.world_size).astype(np.int64)

    def mangles(problem: PartitionProblem) -> Ints:
        assigned = in_rows(problem)
        assert problem.tokens is not None
        for values in (problem.costs, problem.tokens, problem.order, problem.home):
            values[:] = 0
        return assigned

    assignments = []
    with restored(STRATEGIES):
        for name, strategy in (("in rows", in_rows), ("mangles", mangles)):
            register_strategy(name)(strategy)  # type: ignore[arg-type]
            assignments.append(partition(costs, 4, strategy=name, tokens=tokens, max_tokens_per_rank=max_tokens))
        # Nor can it hide that a limit is exceeded.
        with pytest.raises(ConfigError, match="max_tokens_per_rank = 5 cannot be kept"):
            partition(costs, 4, strategy="mangles", tokens=tokens, max_tokens_per_rank=5)
    expected, assigned = assignments
    assert assigned.rank_of.tolist() == expected.rank_of.tolist()
    assert (costs.tolist(), tokens.tolist()) == before
    if max_tokens is not None:  # which the strategy alone does not keep
        assert np.bincount(np.arange(24) // 6, weights=tokens).max() > max_tokens
        assert expected.loads(tokens).max() <= max_tokens
