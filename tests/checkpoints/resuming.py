"""What the tests of checkpoints share: a model, balanced batches, and the samples that a job trains."""

from collections.abc import Callable, Iterable
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
        self.items, self.score = torch.nn.Embedding(501, 4), torch.nn.Linear(4, 1)

    def forward(self, batch: SequenceBatch) -> Tensor:
        scores: Tensor = self.score(self.items(batch.features["item_id"].values()))
        return scale_loss(scores.sum(), batch)


def balance(path: Path, rank: int, world_size: int, batch_size: int | None = None) -> Balancer[SequenceBatch]:
    """Return the balanced batches of a rank; without a batch size, of the same steps for each world size."""
    config = LoaderConfig(batch_size=batch_size or GLOBAL_BATCH_SIZE // world_size, num_workers=1)
    return Balancer(build_loader(path, config, rank=rank, world_size=world_size), BalanceConfig(cost=COST))


def ids_of(batch: Any) -> list[int]:
    ids: list[int] = batch.sample_ids[: batch.num_real].tolist()
    return ids


def train(steps: Iterable[Any], step: Callable[[Any], None], count: int = 1000) -> list[int]:
    """Train some steps, at most those that are left; return the samples."""
    seen: list[int] = []
    for _, batch in zip(range(count), steps, strict=False):
        step(batch)
        seen += ids_of(batch)
    return seen


def environment_of(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables of torchrun, for trainers that read them although the process group exists already."""
    job = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return {**job, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
