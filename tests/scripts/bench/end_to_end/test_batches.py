import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from end_to_end.batches import even_lengths
from evenrank.dataloader.balance import HSTUCost
from evenrank.datasets.distributions import ClippedZipf, Distribution, Lognormal

COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=True, contextual=("user_id",))
MAX_LENGTH = 4096


def cost(events: NDArray[np.int64]) -> NDArray[np.int64]:
    return COST.of_tokens(2 * events + 1, np.zeros_like(events))


@pytest.mark.parametrize("distribution", [Lognormal(mean=512, std=512), ClippedZipf()])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_even_batch_has_the_mean_cost_and_the_mean_events_of_a_step(distribution: Distribution, num_ranks: int) -> None:
    for seed in range(5):
        lengths = distribution.sample(np.random.default_rng(seed), num_ranks * 32)
        even = even_lengths(lengths, num_ranks, cost, max_length=MAX_LENGTH)
        assert len(even) == 32
        assert even.sum() == pytest.approx(lengths.sum() / num_ranks, rel=5e-4)
        assert cost(even).sum() == pytest.approx(cost(lengths).sum() / num_ranks, rel=5e-4)


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=40), num_ranks=st.integers(1, 4))
def test_lengths_are_possible_for_any_step(lengths: list[int], num_ranks: int) -> None:
    whole = np.array((lengths * num_ranks)[: len(lengths) // num_ranks * num_ranks or num_ranks])
    even = even_lengths(whole, num_ranks, cost, max_length=MAX_LENGTH)
    assert len(even) == len(whole) // num_ranks
    assert even.min() >= 1
    assert even.max() <= MAX_LENGTH
    # Rounding changes each sample by at most half an event.
    assert abs(cost(even).sum() - cost(whole).sum() / num_ranks) <= (cost(even + 1) - cost(even)).sum()
