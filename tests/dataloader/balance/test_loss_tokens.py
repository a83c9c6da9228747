"""Loss tokens: each of them counts once, on whichever rank it is trained."""

import pytest

from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.costs import Ints, Lengths
from tests.ranks import RankPool

# What trains a history without candidates: its next items, or a label of each of its events.
RETRIEVAL = LoaderConfig(batch_size=4, max_history_length=6)
HISTORY_LABELS = LoaderConfig(batch_size=4, max_history_length=6, num_tasks=2)
CANDIDATES = LoaderConfig(batch_size=4, max_history_length=6, max_num_candidates=2)


def _per_item(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"] ** 2


def _counted(batch: SequenceBatch) -> int:
    """Count the loss tokens of a batch from its tensors, row by row."""
    if batch.labels is not None:
        return len(batch.labels["label"].values())
    lengths = batch.features["item_id"].lengths()[: batch.num_real].tolist()
    return sum(max(length - 1, 0) for length in lengths)


def _count(rank: int, world_size: int, config: LoaderConfig) -> list[tuple[int, int, int, int | None]]:
    data = RandomData(lengths=Uniform(low=0, high=9), num_real=Uniform(low=0, high=4))
    batches = RandomBatches(config, data, num_batches=6, rank=rank, world_size=world_size)
    loaded = list(batches)
    assert [batch.loss_tokens for batch in loaded] == [_counted(batch) for batch in loaded]
    with Balancer(batches, BalanceConfig(cost=_per_item)) as balancer:
        balanced = list(balancer)
    return [
        (before.loss_tokens, after.loss_tokens, _counted(after), after.world_loss_tokens)
        for before, after in zip(loaded, balanced, strict=True)
    ]


@pytest.mark.parametrize("config", [RETRIEVAL, HISTORY_LABELS, CANDIDATES], ids=["retrieval", "labels", "candidates"])
def test_all_ranks_have_the_same_loss_tokens_before_and_after_balancing(ranks: RankPool, config: LoaderConfig) -> None:
    for step in zip(*ranks.run(3, _count, config), strict=True):
        total = sum(loaded for loaded, _, _, _ in step)
        assert total > 0
        assert [balanced for _, balanced, _, _ in step] == [counted for _, _, counted, _ in step]
        assert sum(balanced for _, balanced, _, _ in step) == total
        assert [world for _, _, _, world in step] == [total] * 3
