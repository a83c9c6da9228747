from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, LinearCost, register_strategy
from evenrank.dataloader.balance.partition.strategies import PartitionProblem, partition
from evenrank.dataloader.balance.plan import plan_steps
from tests.registrations import restored


def _in_reverse(problem: PartitionProblem) -> Any:
    problem.costs[:] = -1  # a strategy may write to what it gets
    problem.home[:] = problem.home[::-1].copy()
    return problem.home


@pytest.fixture(autouse=True)
def own_strategy() -> Any:
    with restored(STRATEGIES):
        register_strategy("in reverse")(_in_reverse)
        yield


@pytest.mark.filterwarnings("ignore::evenrank.dataloader.balance.TokenLimitWarning")
@settings(max_examples=300)
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_many_steps_are_planned_as_each_alone(
    data: st.DataObject, num_steps: int, world_size: int, batch_size: int
) -> None:
    shape = num_steps, world_size, batch_size
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    costs, tokens = rng.integers(0, 1000, shape) ** 2, rng.integers(0, 100, shape)
    num_real = rng.integers(0, batch_size + 1, shape[:2]) if data.draw(st.booleans()) else None
    options: dict[str, Any] = {
        "strategy": data.draw(st.sampled_from(list(STRATEGIES))),
        "tolerance": data.draw(st.sampled_from([0.0, 0.01, 0.2])),
    }
    if data.draw(st.booleans()):
        options |= {"max_tokens_per_rank": int(tokens.sum(axis=2).max()), "on_overflow": "warn"}
    config = BalanceConfig(cost=LinearCost(interleave_actions=False), **options)
    planned = plan_steps(costs.copy(), tokens.copy(), config, num_real=num_real, steps=range(num_steps))
    for step, rank_of in enumerate(planned):
        of_step = None if num_real is None else num_real[step]
        alone = partition(costs[step], world_size, tokens=tokens[step], num_real=of_step, **options)
        assert rank_of.tolist() == alone.rank_of.tolist()


def test_steps_that_stay_unbalanced_are_among_balanced_ones() -> None:
    costs = np.tile([[9, 9], [1, 1]], (6, 1, 1))
    config = BalanceConfig(cost=LinearCost(interleave_actions=False), compare_every=3)
    planned = plan_steps(costs, costs, config, epoch=1, steps=range(10, 16))
    moved = [bool((rank_of != [[0], [1]]).any()) for rank_of in planned]
    assert moved == [config.balances(1, step) for step in range(10, 16)]
    assert moved.count(False) == 2


def test_a_limit_that_one_step_exceeds_is_an_error_of_all() -> None:
    costs = np.array([[[2, 2], [2, 2]], [[9, 1], [1, 1]]])
    config = BalanceConfig(cost=LinearCost(interleave_actions=False), max_tokens_per_rank=8)
    with pytest.raises(Exception, match=r"max_tokens_per_rank = 8 cannot be kept: .* the longest sample has 9"):
        plan_steps(costs, costs, config, steps=range(2))
