"""Loaders that write all batches to the same buffers, as a loop without a Balancer would not notice."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.nodes import IterableWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import JaggedCollate, dense, jagged
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import Ints, Lengths
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankPool

COLLATE = JaggedCollate({"item_id": jagged(), "id": dense(dtype=torch.int64, shape=())})
BATCH_SIZE, NUM_STEPS = 4, 12


def _tokens(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"]


class _InOneBuffer:
    """Yields batches of 3 values per sample, each in the storage of the one before."""

    def __init__(self, rank: int, *, through_numpy: bool) -> None:
        self.batch = COLLATE([{"item_id": [0] * 3, "id": 0}] * BATCH_SIZE)
        self.rank = rank
        self.through_numpy = through_numpy

    def __iter__(self) -> Iterator[Any]:
        for step in range(NUM_STEPS):
            ids = 1000 * self.rank + step * BATCH_SIZE + torch.arange(BATCH_SIZE)
            for tensor, value in ((self.batch.features.values(), ids.repeat_interleave(3)), (self.batch.id, ids)):
                if self.through_numpy:
                    tensor.numpy()[:] = value.numpy()
                else:
                    tensor.copy_(value)
            yield self.batch


STEPS: Any = range(NUM_STEPS)  # a sequence, which serves as a Dataset
LOADERS: dict[str, Callable[[int], Any]] = {
    "iterable, by torch": lambda rank: _InOneBuffer(rank, through_numpy=False),
    "iterable, by NumPy": lambda rank: _InOneBuffer(rank, through_numpy=True),
    "node": lambda rank: IterableWrapper(_InOneBuffer(rank, through_numpy=True)),
    "DataLoader": lambda rank: DataLoader(STEPS, batch_size=1, collate_fn=_Collate(rank)),
}


class _Collate:
    """A collate_fn that does the same."""

    def __init__(self, rank: int) -> None:
        self.batches = _InOneBuffer(rank, through_numpy=True)
        self.iterator = iter(self.batches)

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


def test_clone_is_equal_and_shares_no_memory() -> None:
    batch = rich_batch([[(2, 1), (0, 3)], [(1, 1), (4, 0)]])
    for (name, value), (_, original) in zip(batch.clone().tensors(), batch.tensors(), strict=True):
        if original is None:
            assert value is None
            continue
        parts: list[tuple[Any, Any]] = [(value, original)]
        if isinstance(original, KeyedJaggedTensor):
            assert isinstance(value, KeyedJaggedTensor)
            assert value.keys() == original.keys()
            assert value.length_per_key() == original.length_per_key()
            parts = [(value.values(), original.values()), (value.lengths(), original.lengths())]
            if original.weights_or_none() is not None:
                parts.append((value.weights(), original.weights()))
        for tensor, other in parts:
            assert torch.equal(tensor, other), name
            assert tensor.dtype == other.dtype
            assert not tensor.numel() or tensor.data_ptr() != other.data_ptr()


def test_clone_copies_tensors_of_any_layout() -> None:
    wide = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    for tensor in (
        wide,
        wide[:, 1:3],
        wide.t(),
        wide[0].expand(3, 4),
        torch.zeros(3, 0),
        torch.ones(3, dtype=torch.bool),
    ):
        batch = COLLATE([{"item_id": [], "id": 0}] * 3).replace(id=tensor)
        assert torch.equal(batch.clone().id, tensor)
