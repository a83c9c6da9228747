"""`equal_counts=False`: ranks get any numbers of samples, and batches have no padding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import (
    STRATEGIES,
    Balancer,
    StepMetrics,
    TokenLimitWarning,
    lower_bound,
    partition,
    register_strategy,
)
from evenrank.dataloader.balance.config import BalancerSettings, PartitionSettings
from evenrank.dataloader.balance.exchange.collectives import COLLECTIVES
from evenrank.dataloader.balance.partition.registry import UNEQUAL_STRATEGIES
from evenrank.dataloader.batches.schema import check_contents, lengths_of, schema_of
from tests.dataloader.balance.costs import Ints, Lengths
from tests.dataloader.balance.partition.steps import Step, steps
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.rich_batch import rich_batch, samples_of
from tests.ranks import RankPool
from tests.registrations import restored


@settings(max_examples=500)
@given(step=steps())
def test_every_sample_gets_one_rank_and_every_rank_a_sample(step: Step) -> None:
    costs, num_real = step
    world_size, batch_size = costs.shape
    is_real = np.arange(batch_size) < num_real[:, np.newaxis]
    assignment = partition(
        costs, world_size, strategy="karmarkar-karp", num_real=num_real, tokens=costs % 1000, equal_counts=False
    )
    assert (assignment.rank_of[~is_real] == -1).all()
    counts = np.bincount(assignment.rank_of[is_real], minlength=world_size)
    assert len(counts) == world_size
    assert np.count_nonzero(counts) == min(is_real.sum(), world_size)
    loads = assignment.loads(costs)
    assert loads.sum() == costs[is_real].sum()
    assert loads.max() >= lower_bound(np.where(is_real, costs, 0), world_size, equal_counts=False)


def test_a_giant_gets_a_rank_of_its_own() -> None:
    costs = np.array([[90, 10, 20], [30, 20, 10]])
    assert partition(costs, 2, strategy="karmarkar-karp").loads(costs).max() > 90
    assignment = partition(costs, 2, strategy="karmarkar-karp", equal_counts=False)
    assert assignment.rank_of.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert assignment.loads(costs).tolist() == [90, 90]


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "karmarkar-karp"])
def test_only_karmarkar_karp_does_without_equal_counts(strategy: str) -> None:
    message = f"no strategy without equal counts is called '{strategy}'; known are karmarkar-karp"
    with pytest.raises(ConfigError, match=message):
        partition(np.arange(4), 2, strategy=strategy, equal_counts=False)
    with pytest.raises(ConfigError, match=message):
        Balancer([], cost=_squares, strategy=strategy, equal_counts=False)


def test_settings_that_need_equal_counts_are_refused() -> None:
    unequal = PartitionSettings(strategy="karmarkar-karp", equal_counts=False)
    with pytest.raises(ConfigError, match=r"topology needs equal_counts=True, got False and \(1, 1\); leave out one"):
        BalancerSettings(partition=unequal, topology=(1, 1))
    with pytest.raises(ConfigError, match="batch_size, the rows of every balanced batch, needs equal_counts=True, got"):
        BalancerSettings(partition=unequal, batch_size=4)


def test_a_token_limit_that_the_costs_exceed_is_kept_by_tokens() -> None:
    costs, tokens = np.array([[6, 5], [5, 4]]), np.array([[90, 10], [10, 90]])
    options: dict[str, Any] = {"strategy": "karmarkar-karp", "tokens": tokens, "equal_counts": False}
    assert sorted(partition(costs, 2, **options).loads(tokens)) == [20, 180]
    limited = partition(costs, 2, max_tokens_per_rank=100, **options)
    assert limited.loads(tokens).tolist() == [100, 100]
    with pytest.raises(ConfigError, match=r"max_tokens_per_rank = 99 cannot be kept: the best .* a rank with 100 tok"):
        partition(costs, 2, max_tokens_per_rank=99, **options)
    with pytest.warns(TokenLimitWarning):
        partition(costs, 2, max_tokens_per_rank=99, on_overflow="warn", **options)


def test_a_strategy_of_ones_own_must_leave_no_rank_without_a_sample() -> None:
    with restored(UNEQUAL_STRATEGIES):
        register_strategy("mine", equal_counts=False)(lambda problem: np.zeros(len(problem.costs), dtype=np.int32))
        message = "the strategy 'mine' must assign at least one of the 3 samples to each rank; rank 1 got 0"
        with pytest.raises(ConfigError, match=message):
            partition(np.arange(4), 2, num_real=np.array([2, 1]), strategy="mine", equal_counts=False)
        few = partition(np.arange(4), 2, num_real=np.array([1, 0]), strategy="mine", equal_counts=False)
    assert few.rank_of.tolist() == [[0, -1], [-1, -1]]


def _squares(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["a"] ** 2


def _balance(
    rank: int, world_size: int, lengths: list[list[list[int]]], exchange: str
) -> list[tuple[list[dict[str, Any]], tuple[int, int | None], list[int]]]:
    """Return the samples, the loss tokens and the loads of each step; check the form of each batch."""
    batches = [
        rich_batch([[(n, 1), (n % 3, n % 5)] for n in lengths_of_step], first_id=1000 * rank + 10 * number)
        for number, lengths_of_step in enumerate(lengths[rank])
    ]
    metrics: list[StepMetrics] = []
    seen: list[tuple[list[dict[str, Any]], tuple[int, int | None], list[int]]] = []
    with Balancer(
        batches, cost=_squares, strategy="karmarkar-karp", equal_counts=False, exchange=exchange, on_step=metrics.append
    ) as balancer:
        for batch in balancer:
            check_contents(batch)
            assert schema_of(batch).batch_size == batch.batch_size == batch.num_real
            assert batch.max_lengths == schema_of(batch).max_lengths(lengths_of(batch))
            for jagged in (batch.first, batch.weighted):
                assert isinstance(jagged, KeyedJaggedTensor)
                assert jagged.stride() == batch.batch_size
                assert torch.equal(jagged.offsets()[1:], jagged.lengths().cumsum(0))
            assert len(batch.matrix) == len(batch.flags) == batch.batch_size
            assert metrics[-1].after.max() >= metrics[-1].lower_bound
            seen.append((samples_of(batch), (batch.loss_tokens, batch.world_loss_tokens), metrics[-1].after.tolist()))
    return seen


@settings(max_examples=60)
@given(
    lengths=st.lists(
        st.lists(st.lists(st.one_of(st.just(0), st.integers(0, 40)), max_size=5), max_size=3), min_size=1, max_size=4
    ),
    exchange=st.sampled_from(list(COLLECTIVES)),
)
def test_balanced_batches_have_each_sample_once_and_no_padding(
    ranks: RankPool, lengths: list[list[list[int]]], exchange: str
) -> None:
    world_size = len(lengths)
    by_rank = ranks.run(world_size, _balance, lengths, exchange)
    num_steps = max(len(steps_of_rank) for steps_of_rank in lengths)
    assert [len(seen) for seen in by_rank] == [num_steps] * world_size
    for number in range(num_steps):
        loaded = [
            sample
            for rank, steps_of_rank in enumerate(lengths)
            for batch in [
                rich_batch([[(n, 1), (n % 3, n % 5)] for n in step], first_id=1000 * rank + 10 * number)
                for step in steps_of_rank[number : number + 1]
            ]
            for sample in samples_of(batch)
        ]
        shares = [seen[number][0] for seen in by_rank]
        assert sorted((s for share in shares for s in share), key=lambda sample: sample["id"]) == loaded
        assert sum(bool(share) for share in shares) == min(len(loaded), world_size)
        total = sum(len(sample["weighted c values"]) for sample in loaded)
        for share, (_, loss_tokens, loads) in zip(shares, (seen[number] for seen in by_rank), strict=True):
            assert loss_tokens == (sum(len(sample["weighted c values"]) for sample in share), total)
            assert loads == [sum(len(sample["first a values"]) ** 2 for sample in share) for share in shares]


def _epoch(rank: int, world_size: int, path: Path) -> tuple[list[int], list[tuple[int, int]]]:
    loader = build_loader(path, LoaderConfig(batch_size=8), rank=rank, world_size=world_size)
    trained: list[int] = []
    rows: list[tuple[int, int]] = []
    with Balancer(loader, cost=_events, strategy="karmarkar-karp", equal_counts=False) as balancer:
        for batch in balancer:
            trained += ids_of(batch)
            rows.append((batch.batch_size, balancer.state_dict(after=batch)["position"]))
    return trained, rows


def _events(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"] ** 2


def test_an_epoch_has_every_sample_once_and_resumes_at_the_loaders_positions(
    ranks: RankPool, small_dataset: Path
) -> None:
    by_rank = ranks.run(3, _epoch, small_dataset)
    num_samples = build_loader(small_dataset, LoaderConfig(batch_size=8), rank=0, world_size=1).num_samples
    assert sorted(sample for trained, _ in by_rank for sample in trained) == list(range(num_samples))
    rows = [[count for count, _ in rows_of_rank] for _, rows_of_rank in by_rank]
    assert [sum(step) for step in zip(*rows, strict=True)][:-1] == [24] * (len(rows[0]) - 1)
    assert len({count for counts in rows for count in counts}) > 3  # ranks and steps differ
    for _, rows_of_rank in by_rank:
        positions = [position for _, position in rows_of_rank]
        assert positions[:-1] == [24 * (number + 1) for number in range(len(positions) - 1)]
