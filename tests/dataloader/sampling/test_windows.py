from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import BalanceConfig, LinearCost, PaddedCost
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.balance.plan import assign_to_steps
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.balance.costs import Ints, one_per_sample


def _assign(costs: Ints, num_steps: int, world_size: int, tokens: Ints | None = None, **options: Any) -> Ints:
    shape: dict[str, int] = {"num_steps": num_steps, "world_size": world_size}
    shape |= {name: options.pop(name, 0) for name in ("seed", "epoch")}
    config = BalanceConfig(**{"cost": one_per_sample, **options})
    step_of = assign_to_steps(costs, costs if tokens is None else tokens, config=config, **shape)
    return np.argsort(step_of, kind="stable").reshape(num_steps, -1)


PADDED = PaddedCost(LinearCost(interleave_actions=False))
STRATEGIES = ("lpt-swap", "karmarkar-karp", "min-move")
LENGTHS = Lognormal(mean=512, std=512, low=1, high=4096)


WAYS: list[dict[str, Any]] = [*({"strategy": strategy} for strategy in STRATEGIES), {"cost": PADDED}]


@settings(max_examples=80)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 6)),
    options=st.sampled_from(WAYS),
    seed=st.integers(0, 1 << 62),
    high=st.sampled_from([0, 1, 10, 1 << 40]),
)
def test_steps_are_full(shape: tuple[int, int, int], options: Any, seed: int, high: int) -> None:
    num_steps, world_size, batch_size = shape
    costs = np.random.default_rng(seed).integers(0, high, num_steps * world_size * batch_size, endpoint=True)
    steps = _assign(costs, num_steps, world_size, seed=seed, **options)
    assert sorted(steps.reshape(-1).tolist()) == list(range(len(costs)))
    assert (np.diff(steps, axis=1) > 0).all()  # in the order of the epoch
    assert steps.tolist() == _assign(costs, num_steps, world_size, seed=seed, **options).tolist()
    if "cost" in options:  # the least sum of longest samples: of neighbours in the order of costs
        size = world_size * batch_size
        assert sorted(costs[steps].max(axis=1).tolist()) == sorted(costs)[size - 1 :: size]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_wait_less_in_all_and_those_of_equal_loads_differ_by_chance(strategy: str) -> None:
    lengths = LENGTHS.sample(np.random.default_rng(0), 8 * 8 * 8)
    costs = lengths * (2560 + lengths)
    own, assigned = (
        sum(partition(step, 8).loads(step).max() for step in steps)  # the load of the heaviest rank
        for steps in (costs.reshape(8, -1), costs[_assign(costs, 8, 8, strategy=strategy)])
    )
    assert own > 1.15 * costs.sum() / 8  # far from even, because single samples are above the mean of a rank
    assert assigned < 1.1 * costs.sum() / 8
    # Bins get one of the longest samples each. Sorted by what little their loads differ, many of these would meet.
    is_long = costs > np.quantile(costs, 0.9)
    counts = [is_long[_assign(costs, 8, 8, seed=seed, strategy=strategy)].sum(axis=1) for seed in range(10)]
    assert len({tuple(count.tolist()) for count in counts}) == 10


def test_samples_above_the_mean_come_together() -> None:
    costs = np.array([9, 1, 1, 1, 9, 1, 1, 1])
    assert sorted(costs[_assign(costs, 2, 2)].sum(axis=1).tolist()) == [4, 20]


def test_steps_come_in_a_random_order_and_not_with_the_heaviest_first() -> None:
    for world_size in (1, 2):
        costs = np.where(np.arange(4 * world_size * 2) < world_size, 100, 1)
        heaviest = [int(np.argmax(costs[_assign(costs, 4, world_size, seed=seed)].sum(axis=1))) for seed in range(200)]
        assert np.bincount(heaviest, minlength=4).min() > 25
    epochs = {tuple(_assign(costs, 4, 2, epoch=epoch).reshape(-1).tolist()) for epoch in range(5)}
    assert len(epochs) == 5
    costs = np.arange(16)
    longest = [tuple(costs[_assign(costs, 4, 2, seed=seed, cost=PADDED)].max(axis=1).tolist()) for seed in range(200)]
    assert len(set(longest)) == 24
    assert np.bincount([of_steps[0] for of_steps in longest])[[3, 7, 11, 15]].min() > 25


def test_the_token_limit_holds_for_bins() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 100, 4 * 4 * 8)
    costs = rng.integers(1, 1000, len(tokens))  # unrelated, so that levelling costs alone would exceed the limit
    limit = int(tokens.sum() / 16 * 1.02)
    for step in _assign(costs, 4, 4, tokens, max_tokens_per_rank=limit):
        within = partition(costs[step], 4, tokens=tokens[step], max_tokens_per_rank=limit)
        assert within.loads(tokens[step]).max() <= limit
    with pytest.raises(ConfigError, match="max_tokens_per_rank = 5 cannot be kept"):
        _assign(costs, 4, 4, tokens, max_tokens_per_rank=5)
