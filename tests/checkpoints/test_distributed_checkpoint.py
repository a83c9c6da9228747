"""Data, model and optimizer in one call of torch.distributed.checkpoint, resumed on other numbers of ranks."""

import contextlib
import warnings
from collections.abc import Iterator
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
from tests.checkpoints.resuming import COST, Model, balance, ids_of
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


def _train(steps: Iterator[SequenceBatch], count: int, job: Job) -> list[int]:
    seen: list[int] = []
    for _, batch in zip(range(count), steps, strict=False):
        job.optimizer.zero_grad()
        job.model(batch).backward()
        job.optimizer.step()
        seen += ids_of(batch)
    return seen


def _train_and_save(rank: int, world_size: int, path: Path, kind: str, folder: Path, step: int) -> Any:
    warnings.simplefilter("ignore")  # of torch.distributed.checkpoint about its own internals
    job = Job(kind)
    with balance(path, rank, world_size) as balancer:
        steps = iter(balancer)
        trained = _train(steps, step, job)
        save({"job": job, "data": balancer}, checkpoint_id=folder)
        return trained, _train(steps, 1000, job)


def _load_and_train(rank: int, world_size: int, path: Path, kind: str, folder: Path) -> Any:
    warnings.simplefilter("ignore")
    job = Job(kind)
    with balance(path, rank, world_size) as balancer:
        load({"job": job, "data": balancer}, checkpoint_id=folder)
        length = len(balancer)
        return _train(iter(balancer), 1000, job), _train(iter(balancer), 1000, job), length


def _all(parts: Any) -> list[int]:
    return sorted(sample for part in parts for sample in part)


@pytest.mark.parametrize(
    ("kind", "saving", "loading", "step"),
    [("DDP", 2, 3, 3), ("DDP", 3, 1, 0), ("FSDP2", 2, 4, 4)],
)
def test_job_resumes_with_each_sample_once(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, kind: str, saving: int, loading: int, step: int
) -> None:
    before = ranks.run(saving, _train_and_save, small_dataset, kind, tmp_path, step)
    after = ranks.run(loading, _load_and_train, small_dataset, kind, tmp_path)
    trained, rest = _all(part for part, _ in before), _all(part for _, part in before)
    assert (len(trained) > 0) == (step > 0)
    assert _all(part for part, _, _ in after) == rest  # as without the stop
    assert _all(part for _, part, _ in after) == sorted(trained + rest)  # the next epoch
    assert {length for _, _, length in after} == {-(-len(trained + rest) // 24)}  # of a whole epoch


def _open(path: Path, rank: int, world_size: int, is_stream: bool) -> Any:
    config = LoaderConfig(batch_size=6)
    if not is_stream:
        return contextlib.nullcontext(build_loader(path, config, rank=rank, world_size=world_size))
    stream = StreamConfig(num_shards=7, buffer_rows=16, open_shards=2)
    loader = build_stream_loader(path, config, stream, rank=rank, world_size=world_size)
    return Balancer(loader, BalanceConfig(cost=COST))


def _save_data(rank: int, world_size: int, path: Path, folder: Path, is_stream: bool, step: int) -> Any:
    warnings.simplefilter("ignore")
    with _open(path, rank, world_size, is_stream) as data:
        steps = iter(data)
        trained = [sample for _ in range(step) for sample in ids_of(next(steps))]
        save({"data": data}, checkpoint_id=folder)
        return trained, [sample for batch in steps for sample in ids_of(batch)]


def _load_data(rank: int, world_size: int, path: Path, folder: Path, is_stream: bool) -> list[int]:
    warnings.simplefilter("ignore")
    with _open(path, rank, world_size, is_stream) as data:
        load({"data": data}, checkpoint_id=folder)
        return [sample for batch in data for sample in ids_of(batch)]


@pytest.mark.parametrize(
    ("is_stream", "saving", "loading", "step"),
    [(True, 2, 3, 4), (True, 3, 1, 0), (False, 2, 3, 4)],
    ids=["stream", "stream that has not begun", "loader alone"],
)
def test_data_resumes_without_merging_states_by_hand(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, is_stream: bool, saving: int, loading: int, step: int
) -> None:
    before = ranks.run(saving, _save_data, small_dataset, tmp_path, is_stream, step)
    after = ranks.run(loading, _load_data, small_dataset, tmp_path, is_stream)
    trained, rest = (_all(part[index] for part in before) for index in (0, 1))
    assert len(trained) == len(set(trained)) == saving * step * 6
    assert not set(trained) & set(rest)
    assert _all(after) == rest
