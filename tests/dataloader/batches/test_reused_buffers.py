"""Loaders that write all batches to the same buffers, as a loop without a Balancer would not notice."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.nodes import IterableWrapper

from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.own_samples import COLLATE
from tests.ranks import RankPool

BATCH_SIZE, NUM_STEPS = 4, 12


class _InOneBuffer:
    def __init__(self, rank: int) -> None:
        self.batch = COLLATE([{"item_id": [0] * 3, "sample_ids": 0}] * BATCH_SIZE)
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for step in range(NUM_STEPS):
            ids = 1000 * self.rank + step * BATCH_SIZE + torch.arange(BATCH_SIZE)
            for tensor, value in (
                (self.batch.features.values(), ids.repeat_interleave(3)),
                (self.batch.sample_ids, ids),
            ):
                tensor.numpy()[:] = value.numpy()
            yield self.batch


def _loaders(rank: int) -> list[Any]:
    iterator = iter(_InOneBuffer(rank))
    steps: Any = range(NUM_STEPS)  # a sequence, which serves as a Dataset
    data_loader = DataLoader(steps, batch_size=1, collate_fn=lambda _: next(iterator))
    return [_InOneBuffer(rank), IterableWrapper(_InOneBuffer(rank)), data_loader]


def _balance(rank: int, world_size: int) -> list[list[int]]:
    ids = []
    for loader in _loaders(rank):
        with Balancer(loader, BalanceConfig(cost=item_tokens, lookahead=3)) as balancer:
            for batch in balancer:
                assert batch.features.values().tolist() == batch.sample_ids.repeat_interleave(3).tolist()
                ids.append(batch.sample_ids.tolist())
    return ids


def test_every_sample_comes_once_from_buffers_that_are_used_again(ranks: RankPool) -> None:
    steps = [sorted(first + second) for first, second in zip(*ranks.run(2, _balance), strict=True)]
    expected = [
        [1000 * rank + first + row for rank in range(2) for row in range(BATCH_SIZE)]
        for first in range(0, NUM_STEPS * BATCH_SIZE, BATCH_SIZE)
    ]
    assert steps == expected * 3
