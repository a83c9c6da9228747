"""Loaders that write all batches to the same buffers, as a loop without a Balancer would not notice."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.nodes import IterableWrapper

from evenrank.dataloader import JaggedCollate, dense, jagged
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import Ints, Lengths
from tests.ranks import RankPool

COLLATE = JaggedCollate({"item_id": jagged(), "id": dense(dtype=torch.int64, shape=())})
BATCH_SIZE, NUM_STEPS = 4, 12


def _tokens(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"]


class _InOneBuffer:
    """Yields batches of 3 values per sample, each in the storage of the one before."""

    def __init__(self, rank: int) -> None:
        self.batch = COLLATE([{"item_id": [0] * 3, "id": 0}] * BATCH_SIZE)
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for step in range(NUM_STEPS):
            ids = 1000 * self.rank + step * BATCH_SIZE + torch.arange(BATCH_SIZE)
            for tensor, value in ((self.batch.features.values(), ids.repeat_interleave(3)), (self.batch.id, ids)):
                tensor.numpy()[:] = value.numpy()
            yield self.batch


STEPS: Any = range(NUM_STEPS)  # a sequence, which serves as a Dataset
LOADERS: dict[str, Callable[[int], Any]] = {
    "iterable": lambda rank: _InOneBuffer(rank),
    "node": lambda rank: IterableWrapper(_InOneBuffer(rank)),
    "DataLoader": lambda rank: DataLoader(STEPS, batch_size=1, collate_fn=_Collate(rank)),
}


class _Collate:
    """A collate_fn that does the same."""

    def __init__(self, rank: int) -> None:
        self.iterator = iter(_InOneBuffer(rank))

    def __call__(self, steps: list[int]) -> Any:
        return next(self.iterator)


def _balance(rank: int, world_size: int, kind: str) -> list[list[int]]:
    with Balancer(LOADERS[kind](rank), BalanceConfig(cost=_tokens, lookahead=3)) as balancer:
        ids = []
        for batch in balancer:
            assert batch.features.values().tolist() == batch.id.repeat_interleave(3).tolist()
            ids.append(batch.id.tolist())
        return ids


@pytest.mark.parametrize("kind", LOADERS)
def test_every_sample_comes_once_from_buffers_that_are_used_again(ranks: RankPool, kind: str) -> None:
    steps = zip(*ranks.run(2, _balance, kind), strict=True)
    for step, (first, second) in enumerate(steps):
        expected = [1000 * rank + step * BATCH_SIZE + row for rank in range(2) for row in range(BATCH_SIZE)]
        assert sorted(first + second) == expected
