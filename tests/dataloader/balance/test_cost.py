import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.cost import HSTUCost, cost_shift, count_tokens, scaled_costs
from tests.dataloader.balance.costs import Ints


def test_tokens_are_counted_by_the_cost_or_else_all_values_count() -> None:
    lengths = {"item_id": np.array([5, 0]), "action": np.array([4, 1])}
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False)
    assert count_tokens(cost, lengths, 2).tolist() == [5, 0]
    assert count_tokens(lambda lengths, candidates: candidates, lengths, 2).tolist() == [9, 1]
    assert count_tokens(lambda lengths, candidates: candidates, {}, 3).tolist() == [0, 0, 0]


def test_a_step_of_the_longest_samples_sums_within_62_bits() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False, max_tokens=100_000)
    samples = 16_384 * 128
    longest = {"item_id": np.array([100_000])}
    scaled = scaled_costs(cost, longest, np.zeros(1, dtype=np.int64), num_real=1, samples_per_step=samples)
    assert 2**60 < int(scaled[0]) * samples <= 2**62
    assert cost_shift(cost, 8) == 0


def test_the_scale_is_a_power_of_two_that_depends_on_the_configuration_alone() -> None:
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False)
    samples = 3 * 2**18
    shift = cost_shift(cost, samples)
    lengths = {"item_id": np.array([1, 77, 4096])}
    scaled = scaled_costs(cost, lengths, np.zeros(3, dtype=np.int64), num_real=3, samples_per_step=samples // 3 * 3)
    assert shift > 0
    assert scaled.tolist() == [c >> shift for c in cost(lengths, np.zeros(3, dtype=np.int64)).tolist()]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.array([0.5, 1.0]), r"must return int64 of shape \(2,\), got float64"),
        (np.array([1]), r"got int64 of shape \(1,\)"),
        (np.array([1, -5]), "must not be negative, got -5"),
        (np.array([1, 2**60]), "cost of 1152921504606846976 is too large to be summed over 8 samples"),
    ],
)
def test_what_a_cost_returns_is_checked(returned: Ints, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scaled_costs(
            lambda lengths, candidates: returned, {}, np.zeros(2, dtype=np.int64), num_real=2, samples_per_step=8
        )


def test_padding_costs_0_whatever_the_cost_returns() -> None:
    returned = np.array([5, 6, -7])
    no_candidates = np.zeros(3, dtype=np.int64)
    scaled = scaled_costs(lambda lengths, candidates: returned, {}, no_candidates, num_real=1, samples_per_step=8)
    assert scaled.tolist() == [5, 0, 0]
