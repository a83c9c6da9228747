"""A program of a user, whose types must be clean under mypy --strict and pyright from the installed wheel."""

import sys
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedCollate, LoaderConfig, build_loader, dense, jagged
from evenrank.dataloader import balance as of
from evenrank.training import scale_loss

Ints = NDArray[np.int64]


class Histories(Dataset[dict[str, object]]):
    """20 users, of whom user i has i events."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"item_id": np.arange(index), "label": 1.0}


@of.register_cost("squares")
def squares(events: Mapping[str, Ints], candidates: Ints) -> Ints:
    return events["item_id"] ** 2 + candidates


@of.register_strategy("back and forth")
def back_and_forth(problem: of.PartitionProblem) -> Ints:
    turns = np.arange(len(problem.costs)) % (2 * problem.world_size)
    rank_of = np.empty_like(problem.costs)
    rank_of[problem.order] = np.minimum(turns, 2 * problem.world_size - 1 - turns)
    return rank_of


steps: list[of.StepMetrics] = []
config = of.BalanceConfig(cost=squares, strategy="back and forth", on_step=steps.append)
loader = build_loader(sys.argv[1], LoaderConfig(batch_size=8), rank=0, world_size=1, balance=config)
losses: list[torch.Tensor] = []
for batch in loader:
    losses.append(scale_loss(batch.features["item_id"].values().float().sum(), batch, dp_size=1))
assert of.summarize(steps).steps == len(losses) > 0
state: dict[str, object] = loader.state_dict()
loader.load_state_dict(state)

collate = JaggedCollate({"item_id": jagged(max_length=20), "label": dense(dtype=torch.float32)})
with of.Balancer(DataLoader(Histories(), batch_size=4, collate_fn=collate), config) as balancer:
    assert sum(own.num_real for own in balancer) == len(Histories())

try:
    of.BalanceConfig.from_dict({"cost": {"name": "squares", "power": 2}})
except ConfigError as error:
    print(f"{len(losses)} steps, the last with loss {losses[-1].item():.1f}; an error reads: {error}")
