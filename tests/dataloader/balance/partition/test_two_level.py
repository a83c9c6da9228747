import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import Balancer, HSTUCost, StepMetrics
from evenrank.dataloader.balance.config import PartitionSettings
from evenrank.dataloader.balance.metrics import measure_step
from evenrank.dataloader.balance.partition.registry import STRATEGIES
from evenrank.dataloader.balance.partition.strategies import lower_bound, partition
from evenrank.dataloader.balance.partition.two_level import assign_by_host
from evenrank.datasets.distributions import Distribution, Lognormal, Zipf
from tests.dataloader.balance.partition.steps import costs as step_costs
from tests.dataloader.rich_batch import rich_batch, samples_of
from tests.ranks import RankPool

LENGTHS: dict[str, Distribution] = {"lognormal": Lognormal(mean=512, std=512), "zipf": Zipf(exponent=1.2)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=150)
@given(data=st.data())
def test_every_sample_gets_one_rank_and_no_rank_exceeds_the_batch_size(strategy: str, data: st.DataObject) -> None:
    hosts, ranks_per_host, batch_size = (data.draw(st.integers(1, 4)) for _ in range(3))
    world_size = hosts * ranks_per_host
    costs = data.draw(step_costs(world_size * batch_size))
    num_real = np.array(data.draw(st.lists(st.integers(0, batch_size), min_size=world_size, max_size=world_size)))
    rank_of = assign_by_host(
        costs, (hosts, ranks_per_host), PartitionSettings(strategy=strategy), tokens=costs % 1000, num_real=num_real
    ).rank_of
    is_real = np.arange(batch_size) < num_real[:, np.newaxis]
    assert (rank_of[~is_real] == -1).all()
    counts = np.bincount(rank_of[is_real], minlength=world_size)
    assert len(counts) == world_size
    assert counts.max() <= batch_size


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("topology", [(2, 4), (4, 8), (16, 8)])
def test_two_levels_send_at_most_half_of_the_flat_partitions_bytes_between_hosts(
    topology: tuple[int, int], lengths: Distribution
) -> None:
    world_size = topology[0] * topology[1]
    sent: dict[str, int] = {"flat": 0, "by host": 0}
    for seed in range(10):
        tokens = lengths.sample(np.random.default_rng(seed), world_size * 32)
        costs = 10 * tokens * 1024**2 + 4 * tokens**2 * 1024
        shape = (world_size, 32)
        assignments = {
            "flat": partition(costs, world_size, tokens=tokens),
            "by host": assign_by_host(costs, topology, PartitionSettings(tolerance=0.01), tokens=tokens),
        }
        for name, assignment in assignments.items():
            metrics = measure_step(
                assignment,
                costs=costs.reshape(shape),
                tokens=tokens.reshape(shape),
                sample_bytes=tokens.reshape(shape) * 16,
                ranks_per_host=topology[1],
            )
            sent[name] += metrics.bytes_between_hosts
        assert assignments["by host"].loads(costs).max() <= 1.021 * lower_bound(costs, world_size)
    assert sent["by host"] <= 0.5 * sent["flat"]


def test_samples_that_stay_on_their_host_are_not_counted_as_sent_between_hosts() -> None:
    costs = np.array([[9, 9], [1, 1], [5, 5], [5, 5]])
    assignment = assign_by_host(costs, (2, 2), PartitionSettings(), tokens=costs)
    metrics = measure_step(assignment, costs=costs, tokens=costs, sample_bytes=costs, ranks_per_host=2)
    # Both hosts have a load of 20; the first is levelled within itself.
    assert assignment.loads(costs).tolist() == [10, 10, 10, 10]
    assert metrics.moved_bytes == 10
    assert metrics.bytes_between_hosts == 0


def test_the_token_limit_is_kept_within_hosts() -> None:
    costs, tokens = np.array([[90, 10], [50, 50]] * 2), np.array([[100, 90], [50, 60]] * 2)
    assignment = assign_by_host(costs, (2, 2), PartitionSettings(max_tokens_per_rank=160), tokens=tokens)
    assert assignment.loads(tokens).max() <= 160


@pytest.mark.parametrize("topology", [(3, 1), (0, 2), (2, 2)])
def test_a_topology_of_another_world_size_is_refused(topology: tuple[int, int]) -> None:
    with pytest.raises(
        ConfigError, match=r"topology is \(hosts, ranks per host\): \d \* \d differs from the world size, 1"
    ):
        Balancer(
            [], cost=HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False), topology=topology
        )


def _balance(rank: int, world_size: int) -> tuple[list[int], int, int]:
    batches = [rich_batch([[(rank * 5, 1), (1, 1)], [(1, 1), (1, rank)]], first_id=10 * rank)] * 3
    seen: list[int] = []
    metrics: list[StepMetrics] = []
    cost = HSTUCost(hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=False, history_key="a")
    with Balancer(batches, cost=cost, topology=(2, 2), on_step=metrics.append) as balancer:
        for batch in balancer:
            seen += [sample["id"] for sample in samples_of(batch)]
    return seen, metrics[0].bytes_between_hosts, metrics[0].moved_bytes


def test_ranks_of_two_hosts_are_balanced_without_loss(ranks: RankPool) -> None:
    by_rank = ranks.run(4, _balance)
    assert sorted(sample for seen, _, _ in by_rank for sample in seen) == sorted([0, 1, 10, 11, 20, 21, 30, 31] * 3)
    assert all(0 < between <= moved for _, between, moved in by_rank)
