"""What the tests of checkpoints share: a model that counts what it trains, and the samples of an epoch."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.training import scale_loss

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
GLOBAL_BATCH_SIZE = 24


class Model(torch.nn.Module):
    """A table of item embeddings and a linear layer; the forward returns the scaled loss."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(501, 4)
        self.score = torch.nn.Linear(4, 1)

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Return the scaled sum of the scores of all items."""
        scores: Tensor = self.score(self.items(batch.features["item_id"].values()))
        return scale_loss(scores.sum(), batch)


def balance(path: Path, rank: int, world_size: int, batch_size: int | None = None) -> Balancer[SequenceBatch]:
    """Return the balanced batches of a rank; without a batch size, of the same steps for each world size."""
    config = LoaderConfig(batch_size=batch_size or GLOBAL_BATCH_SIZE // world_size, num_workers=1)
    return Balancer(build_loader(path, config, rank=rank, world_size=world_size), BalanceConfig(cost=COST))


def ids_of(batch: Any) -> list[int]:
    """Return the ids of the samples of a batch."""
    ids: list[int] = batch.sample_ids[: batch.num_real].tolist()
    return ids
