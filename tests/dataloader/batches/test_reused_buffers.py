"""Loaders that write all batches to the same buffers, as a loop without a Balancer would not notice."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.nodes import IterableWrapper

from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import COLLATE

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


def test_every_sample_comes_once_from_buffers_that_are_used_again() -> None:
    iterator, steps = iter(_InOneBuffer(0)), range(NUM_STEPS)
    data_loader: Any = DataLoader(steps, batch_size=1, collate_fn=lambda _: next(iterator))  # type: ignore[arg-type]
    for loader in (_InOneBuffer(0), IterableWrapper(_InOneBuffer(0)), data_loader):
        with Balancer(loader, BalanceConfig(cost=item_tokens, lookahead=3)) as balancer:
            batches = [(batch.features.values().tolist(), batch.sample_ids.tolist()) for batch in balancer]
        assert sorted(sample for _, ids in batches for sample in ids) == list(range(NUM_STEPS * BATCH_SIZE))
        assert all(values == [sample for sample in ids for _ in range(3)] for values, ids in batches)
