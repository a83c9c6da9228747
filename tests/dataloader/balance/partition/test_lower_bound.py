import numpy as np
import pytest

from evenrank.dataloader.balance.partition.strategies import lower_bound
from tests.dataloader.balance.partition.steps import optimal_heaviest_load


@pytest.mark.parametrize(
    ("costs", "world_size", "bound"),
    [
        ([4, 4, 4, 4], 2, 8),  # the mean
        ([4, 4, 4, 5], 2, 9),  # the mean, rounded up
        ([7], 1, 7),
        ([9, 1, 2, 3, 3, 1], 2, 11),  # the largest takes at least the two smallest
        ([8, 8, 8, 0, 0, 0], 2, 16),  # of the three largest, two share a rank
        ([9, 9, 9, 1, 2, 3, 4, 5, 6, 0, 0, 0], 3, 16),  # mean 48 / 3
        ([20, 20, 1, 1, 1, 1, 9, 9, 9], 3, 24),  # the two largest take 4 of the smallest: (40 + 1 + 1 + 1 + 1) / 2 = 22
        ([6, 6, 6, 6, 6, 0], 2, 18),  # of five, three share a rank
        ([0, 0], 2, 0),
    ],
)
def test_costs_that_must_share_a_rank_are_counted(costs: list[int], world_size: int, bound: int) -> None:
    assert lower_bound(np.array(costs), world_size) == bound


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 3), (2, 2), (2, 4), (3, 2), (3, 3), (4, 2), (5, 2)])
def test_no_assignment_is_below_the_bound(world_size: int, batch_size: int) -> None:
    rng = np.random.default_rng(world_size * 10 + batch_size)
    num_tight = 0
    for _ in range(60):
        costs = (rng.pareto(0.7, world_size * batch_size) * 10).astype(np.int64)
        bound, optimum = lower_bound(costs, world_size), optimal_heaviest_load(costs, world_size)
        assert bound <= optimum
        num_tight += bound == optimum
    assert num_tight >= 15  # of 60
