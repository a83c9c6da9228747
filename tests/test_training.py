"""The code of docs/how-to/training.md, run as it stands there."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer, SelfAttentionCost
from evenrank.datasets.distributions import Uniform
from evenrank.training import FiniteCheck, LossAverage, accumulate, scale_loss
from tests.ranks import RankPool

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "training.md"
COST = SelfAttentionCost(hidden=64, heads=4, head_dim=16, layers=2, ffn_multiplier=4)
CONFIG = LoaderConfig(batch_size=4, max_history_length=20, max_num_candidates=1)
DATA = RandomData(lengths=Uniform(low=2, high=20), num_real=Uniform(low=0, high=4))
NUM_BATCHES = 6


def _code(section: str) -> str:
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    return str(code)


class _Model(torch.nn.Module):
    """Its first task has the number of items as its loss, its second twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, batch: SequenceBatch) -> Tensor:
        return self.weight * len(batch.features["item_id"].values())


def _train(rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]
    model = DistributedDataParallel(_Model(), process_group=dp.get_group())
    loader = RandomBatches(CONFIG, DATA, num_batches=NUM_BATCHES, rank=dp.get_local_rank(), world_size=2)
    printed: list[Any] = []
    with Balancer(loader, BalanceConfig(cost=COST), group=dp) as balancer:
        names = {
            "FiniteCheck": FiniteCheck,
            "LossAverage": LossAverage,
            "accumulate": accumulate,
            "balancer": balancer,
            "contextlib": contextlib,
            "device": "cpu",
            "mesh": mesh,
            "model": model,
            "num_tasks": 2,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
            "print": printed.append,
            "scale_loss": scale_loss,
        }
        exec(_code("Losses"), names)
    return printed


def test_the_loop_prints_the_mean_loss_of_each_task_over_all_batches(ranks: RankPool) -> None:
    num_items, num_tokens = 0, 0
    for rank in range(2):
        for batch in RandomBatches(CONFIG, DATA, num_batches=NUM_BATCHES, rank=rank, world_size=2):
            num_items += len(batch.features["item_id"].values())
            num_tokens += batch.loss_tokens
    for printed in ranks.run(4, _train):
        assert printed == [[pytest.approx(num_items / num_tokens), pytest.approx(2 * num_items / num_tokens)]]
