import contextlib
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

from evenrank.dataloader import LoaderConfig, SequenceBatch, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.checkpoints.resuming import COST, GLOBAL_BATCH_SIZE, Model, balance, train
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
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def step(self, batch: SequenceBatch) -> None:
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()


def _open(kind: str, path: Path, rank: int, world_size: int) -> tuple[Any, Job | None]:
    """Return the data of a job and, except for a stream and for a Loader alone, its model."""
    warnings.simplefilter("ignore")  # of torch.distributed.checkpoint about its own internals
    if kind in ("DDP", "FSDP2"):
        return balance(path, rank, world_size), Job(kind)
    config = LoaderConfig(batch_size=GLOBAL_BATCH_SIZE // world_size)
    if kind == "loader":
        return contextlib.nullcontext(build_loader(path, config, rank=rank, world_size=world_size)), None
    stream = StreamConfig(lanes=7, window_rows=1)
    loader = build_stream_loader(path, config, stream, rank=rank, world_size=world_size)
    return Balancer(loader, BalanceConfig(cost=COST)), None


def _skip(batch: SequenceBatch) -> None:
    pass


def _train_and_save(rank: int, world_size: int, path: Path, kind: str, folder: Path, count: int) -> Any:
    opened, job = _open(kind, path, rank, world_size)
    step = job.step if job else _skip
    with opened as data:
        steps = iter(data)
        trained = train(steps, step, count)
        save({"data": data} | ({"job": job} if job else {}), checkpoint_id=folder)
        return trained, train(steps, step)


def _load_and_train(rank: int, world_size: int, path: Path, kind: str, folder: Path) -> Any:
    opened, job = _open(kind, path, rank, world_size)
    step = job.step if job else _skip
    with opened as data:
        load({"data": data} | ({"job": job} if job else {}), checkpoint_id=folder)
        length = len(data) if job else None
        return train(data, step), train(data, step), length


def _all(parts: Any) -> list[int]:
    return sorted(sample for part in parts for sample in part)


@pytest.mark.parametrize(
    ("kind", "saving", "loading", "step"),
    [
        *(("DDP", 2, 3, 3), ("DDP", 3, 1, 0), ("FSDP2", 2, 4, 4)),
        *(("stream", 2, 3, 4), ("stream", 3, 1, 0), ("loader", 2, 3, 4)),
    ],
)
def test_job_resumes_with_each_sample_once(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, kind: str, saving: int, loading: int, step: int
) -> None:
    before = ranks.run(saving, _train_and_save, small_dataset, kind, tmp_path, step)
    after = ranks.run(loading, _load_and_train, small_dataset, kind, tmp_path)
    trained, rest = _all(part for part, _ in before), _all(part for _, part in before)
    assert len(trained) == step * GLOBAL_BATCH_SIZE
    assert _all(part for part, _, _ in after) == rest  # as without the stop
    everything = sorted(trained + rest)
    assert len(everything) == len(set(everything))
    if kind in ("DDP", "FSDP2"):
        assert _all(part for _, part, _ in after) == everything  # the next epoch
        assert {length for _, _, length in after} == {-(-len(everything) // GLOBAL_BATCH_SIZE)}  # of a whole epoch
