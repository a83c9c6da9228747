from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, StepMetrics, partition, register_strategy
from evenrank.dataloader.balance.partition.strategies import PartitionProblem
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import Ints, Lengths
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


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_rank": 260}], ids=str)
def test_a_cost_in_place_trains_the_same_samples(small_dataset: Path, options: dict[str, Any]) -> None:
    config = LoaderConfig(batch_size=4, max_history_length=30, max_num_candidates=1)
    build = partial(build_loader, small_dataset, config)
    by_cost = []
    for in_place in (False, True):
        balance = BalanceConfig(cost=_Cost(in_place=in_place), on_step=_mangle, **options)
        alone = [build(rank=rank, world_size=2, balance=balance) for rank in range(2)]
        with Balancer(build(rank=0, world_size=1), balance) as balancer:
            by_cost.append([[bits_of(batch) for batch in batches] for batches in (*alone, balancer)])
    pure, mangled = by_cost
    assert min(map(len, pure)) > 10
    assert mangled == pure


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
            register_strategy(name)(strategy)
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
