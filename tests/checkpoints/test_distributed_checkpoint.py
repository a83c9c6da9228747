"""Data, model and optimizer in one call of torch.distributed.checkpoint, resumed on other numbers of ranks."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import LoaderConfig, SequenceBatch, StreamConfig, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.training import scale_loss
from tests.checkpoints.resuming import COST, Model, balance, ids_of
from tests.ranks import RankPool


class Embeddings(torch.nn.Module):
    """The same model with TorchRec's table, which DistributedModelParallel shards."""

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        table = EmbeddingBagConfig(name="table", num_embeddings=501, embedding_dim=4, feature_names=["item_id"])
        self.items = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.score = torch.nn.Linear(4, 1)

    def forward(self, batch: SequenceBatch) -> torch.Tensor:
        """Return the scaled sum of the scores of all samples."""
        return scale_loss(self.score(self.items(batch.features).values()).sum(), batch)


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


class ShardedJob(Job):
    """A model whose table is on one of the ranks, with TorchRec's optimizers."""

    def __init__(self) -> None:
        from torchrec.distributed import DistributedModelParallel, collective_utils, comm
        from torchrec.distributed.model_parallel import get_default_sharders
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        logging.disable(logging.WARNING)  # from TorchRec's planner
        # TorchRec initializes these once per process; the ranks of an earlier test would not take part again.
        for module, name, value in (
            (comm, "_INTRA_PG", None),
            (comm, "_CROSS_PG", None),
            (collective_utils, "_INITIALIZED", False),
        ):
            setattr(module, name, value)
        torch.manual_seed(0)
        model, sharders = Embeddings(), get_default_sharders()
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
            constraints={"table": ParameterConstraints(sharding_types=["table_wise"])},
        )
        plan = planner.plan(model, sharders)  # the same on all ranks
        parallel: Any = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        logging.disable(logging.NOTSET)
        dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
        keyed = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        keyed.init_state()
        self.model = parallel
        self.optimizer = CombinedOptimizer([parallel.fused_optimizer, keyed])

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _make_job(kind: str) -> Job:
    return ShardedJob() if kind == "DMP" else Job(kind)


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
    job = _make_job(kind)
    with balance(path, rank, world_size) as balancer:
        steps = iter(balancer)
        trained = _train(steps, step, job)
        save({"job": job, "data": balancer}, checkpoint_id=folder)
        return trained, _train(steps, 1000, job)


def _load_and_train(rank: int, world_size: int, path: Path, kind: str, folder: Path) -> Any:
    warnings.simplefilter("ignore")
    job = _make_job(kind)
    with balance(path, rank, world_size) as balancer:
        # By default, a rank without any part of a sharded table takes the checkpoint for one of PyTorch 2.3.
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False) if kind == "DMP" else None
        load({"job": job, "data": balancer}, checkpoint_id=folder, planner=planner)
        length = len(balancer)
        return _train(iter(balancer), 1000, job), _train(iter(balancer), 1000, job), length


def _all(parts: Any) -> list[int]:
    return sorted(sample for part in parts for sample in part)


@pytest.mark.parametrize(
    ("kind", "saving", "loading", "step"),
    [("DDP", 2, 3, 3), ("DDP", 3, 1, 0), ("FSDP2", 2, 4, 4), ("DMP", 2, 3, 2)],
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


def _stream(path: Path, rank: int, world_size: int) -> Balancer[SequenceBatch]:
    stream = StreamConfig(num_shards=7, buffer_rows=16, open_shards=2)
    loader = build_stream_loader(path, LoaderConfig(batch_size=6), stream, rank=rank, world_size=world_size)
    return Balancer(loader, BalanceConfig(cost=COST))


def _save_stream(rank: int, world_size: int, path: Path, folder: Path, step: int) -> Any:
    warnings.simplefilter("ignore")
    with _stream(path, rank, world_size) as balancer:
        steps = iter(balancer)
        trained = [sample for _ in range(step) for sample in ids_of(next(steps))]
        save({"data": balancer}, checkpoint_id=folder)
        return trained, [sample for batch in steps for sample in ids_of(batch)]


def _load_stream(rank: int, world_size: int, path: Path, folder: Path) -> list[int]:
    warnings.simplefilter("ignore")
    with _stream(path, rank, world_size) as balancer:
        load({"data": balancer}, checkpoint_id=folder)
        return [sample for batch in balancer for sample in ids_of(batch)]


@pytest.mark.parametrize(("saving", "loading", "step"), [(2, 3, 4), (3, 2, 0)])
def test_stream_resumes_without_merging_states_by_hand(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, saving: int, loading: int, step: int
) -> None:
    before = ranks.run(saving, _save_stream, small_dataset, tmp_path, step)
    after = ranks.run(loading, _load_stream, small_dataset, tmp_path)
    assert _all(after) == _all(part for _, part in before)
