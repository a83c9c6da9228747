import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import SequenceBatch
from tests.checkpoints.resuming import GLOBAL_BATCH_SIZE, Model, balance, train
from tests.ranks import RankPool


class Job:
    """Model and optimizer, as torch.distributed.checkpoint wants them."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        model = Model()
        if kind == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.model: torch.nn.Module = DistributedDataParallel(model) if kind == "DDP" else model
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def step(self, batch: SequenceBatch) -> None:
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()


def _train(rank: int, world_size: int, path: Path, kind: str, folder: Path, count: int | None) -> list[list[int]]:
    """Train some steps and save, or load; return the samples before that, after it, and of the next epoch."""
    warnings.simplefilter("ignore")  # of torch.distributed.checkpoint about its own internals
    with balance(path, rank, world_size) as data:
        job, trained = Job(kind), list[int]()
        saved = {"data": data, "job": job}
        if count is None:
            load(saved, checkpoint_id=folder)
        steps = iter(data)
        if count is not None:
            trained = train(steps, job.step, count)
            save(saved, checkpoint_id=folder)
        return [trained, train(steps, job.step), train(data, job.step)]


@pytest.mark.parametrize(
    ("kind", "saving", "loading", "step"), [("DDP", 2, 3, 3), ("DDP", 3, 1, 0), ("FSDP2", 2, 4, 4)]
)
def test_job_resumes_with_each_sample_once(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, kind: str, saving: int, loading: int, step: int
) -> None:
    before = ranks.run(saving, _train, small_dataset, kind, tmp_path, step)
    after = ranks.run(loading, _train, small_dataset, kind, tmp_path, None)
    (trained, rest, following), (_, resumed, again) = (
        [sorted(sample for of_rank in job for sample in of_rank[part]) for part in range(3)] for job in (before, after)
    )
    everything = sorted(trained + rest)
    assert (len(trained), len({*everything})) == (step * GLOBAL_BATCH_SIZE, len(everything))
    assert resumed == rest  # as without the stop
    assert following == again == everything
