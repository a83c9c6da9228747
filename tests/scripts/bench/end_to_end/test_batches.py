from contextlib import closing
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from end_to_end.batches import Source, draw_data, even_lengths
from end_to_end.experiments import Workload
from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.distributions import ClippedZipf, Distribution, Lognormal
from tests.ranks import RankPool
from tests.scripts.bench.end_to_end import made_up
from trainer.world import World

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


def test_users_and_items_are_drawn_from_zipf_distributions_over_the_rows_of_their_tables() -> None:
    workload = Workload(lengths={"a": "uniform"}, item_rows=1000, user_rows=300, item_exponent=0.5)
    data = draw_data(workload, Lognormal(), num_tasks=1)
    for ids, rows, exponent in ((data.items, 1000, 0.5), (data.users, 300, 1.05)):
        drawn = np.bincount(ids.sample(np.random.default_rng(0), 100_000))
        masses = np.arange(1, rows + 1.0) ** -exponent
        assert len(drawn) == rows
        assert drawn[:20] / 100_000 == pytest.approx(masses[:20] / masses.sum(), rel=0.15)


NUM_BATCHES = 3
WORKLOAD = Workload(lengths={"a": "lognormal:mean=9,std=9,high=40"}, item_rows=99, user_rows=9, num_batches=NUM_BATCHES)
READ = LoaderConfig(batch_size=5, max_history_length=30, user_id=True, num_tasks=2, seed=4)


def _contents(batch: SequenceBatch) -> list[list[int]]:
    features = batch.features
    values = [features.values(), features.lengths(), made_up.given(batch.labels).values(), batch.sample_ids]
    return [value.tolist() for value in values]


def _batches(rank: int, world_size: int) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Return the batches of a Balancer, and more than two cycles of those that are read."""
    world = World(rank=rank, size=world_size, device=torch.device("cpu"))
    key_map = KeyMap(num_embeddings=99, world_size=world_size, mode="roundrobin")
    source = Source(WORKLOAD, WORKLOAD.lengths["a"], replace(READ, key_maps={"item_id": key_map}), world)
    balance = BalanceConfig(cost=COST)
    with Balancer(source.once(), balance) as balancer:
        exchanged = [_contents(batch) for batch in balancer]
    with closing(source.reading(balance, num_workers=1, endless=True)) as loader:
        return exchanged, [_contents(batch) for batch in islice(loader, 2 * NUM_BATCHES + 1)]


def test_batches_that_are_read_are_those_of_a_balancer_again_and_again(ranks: RankPool) -> None:
    for exchanged, read in ranks.run(2, _batches):
        assert len(exchanged) == NUM_BATCHES
        assert read == [*exchanged, *exchanged, exchanged[0]]
