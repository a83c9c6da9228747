"""DistributedDataParallel has the same settings, whether TorchRec wraps a model in it or the job itself."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from evenrank.datasets import read_manifest
from tests.examples.trainer.jobs import reset_torchrec
from tests.ranks import RankPool
from trainer.config import TrainConfig
from trainer.parallel import distribute
from trainer.tasks import ranking
from trainer.world import World

FLAGS = ("gradient_as_bucket_view", "static_graph", "broadcast_buffers", "find_unused_parameters")


def _settings(rank: int, world_size: int, data: Path) -> list[list[Any]]:
    warnings.simplefilter("ignore")
    reset_torchrec()
    world = World(rank=rank, size=world_size, device=torch.device("cpu"))
    found = []
    for tables in ({}, {"embeddings": "sharded", "min_sharded_rows": 300}):
        config = TrainConfig(**tables, hidden=8)  # type: ignore[arg-type]
        parallel = distribute(ranking(config, read_manifest(data), world).model, config, world)
        (wrapped,) = (module for module in parallel.model.modules() if isinstance(module, DistributedDataParallel))
        found.append([getattr(wrapped, name) for name in (*FLAGS, "bucket_bytes_cap")])
    return found


def test_gradients_are_averaged_with_equal_settings(ranks: RankPool, small_dataset: Path) -> None:
    for replicated, sharded in ranks.run(2, _settings, small_dataset):
        assert replicated == sharded
        assert replicated[: len(FLAGS)] == [True, True, False, False]
