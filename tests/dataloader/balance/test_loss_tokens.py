"""Loss tokens: each of them counts once, on whichever rank it is trained."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.exchange.plan import make_plan
from evenrank.dataloader.balance.partition.strategies import Assignment
from evenrank.dataloader.balance.ranks.metadata import Header, decode, encode
from evenrank.dataloader.batches.batch import keyed_jagged_tensor
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.costs import Ints, Lengths
from tests.ranks import RankPool

# What trains a history without candidates: its next items, or a label of each of its events.
RETRIEVAL = LoaderConfig(batch_size=4, max_history_length=6)
HISTORY_LABELS = LoaderConfig(batch_size=4, max_history_length=6, num_tasks=2)
CANDIDATES = LoaderConfig(batch_size=4, max_history_length=6, max_num_candidates=2)


def _retrieval_batch(lengths: Sequence[int], batch_size: int) -> SequenceBatch:
    rows = np.array([lengths, lengths], dtype=np.int64)
    batch = SequenceBatch(
        batch_size=len(lengths),
        num_real=len(lengths),
        features=keyed_jagged_tensor(["item_id", "action"], torch.zeros(int(rows.sum()), dtype=torch.int64), rows),
        num_candidates=torch.zeros(len(lengths), dtype=torch.int64),
        sample_ids=torch.arange(len(lengths)),
    )
    return pad_batch(batch, batch_size)


@settings(max_examples=200)
@given(data=st.data())
def test_moving_samples_changes_no_loss_token(data: st.DataObject) -> None:
    world_size, batch_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    histories = [data.draw(st.lists(st.integers(0, 5), max_size=batch_size)) for _ in range(world_size)]
    batches = [_retrieval_batch(lengths, batch_size) for lengths in histories]
    schema = schema_of(batches[0])
    step = decode(
        np.stack(
            [
                encode(
                    Header(schema_hash=1, status=0, ended=0, num_real=batch.num_real),
                    schema,
                    costs=np.zeros(batch_size, dtype=np.int64),
                    tokens=np.zeros(batch_size, dtype=np.int64),
                    lengths=lengths_of(batch),
                )
                for batch in batches
            ]
        ),
        schema,
    )
    slots = data.draw(st.permutations([rank for rank in range(world_size) for _ in range(batch_size)]))
    rank_of = np.array(slots, dtype=np.int32).reshape(world_size, batch_size)
    for rank, lengths in enumerate(histories):
        rank_of[rank, len(lengths) :] = -1
    plans = [make_plan(schema, step, Assignment(rank_of=rank_of), rank) for rank in range(world_size)]
    total = sum(length - 1 for lengths in histories for length in lengths if length > 0)
    assert [plan.world_loss_tokens for plan in plans] == [total] * world_size
    for plan in plans:
        trained = plan.lengths[0, : plan.num_real].tolist()
        assert plan.loss_tokens == sum(length - 1 for length in trained if length > 0)
    assert sum(plan.loss_tokens for plan in plans) == total


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
