"""TorchRec's training pipeline, which pulls several batches ahead of the one that it trains, accepts our batches."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal, Uniform
from tests.dataloader.batch_helpers import ids_of
from tests.ranks import RankPool

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)


NUM_ITEMS = 501
RATE = 2.0**-10  # a power of two, so that all weights are exact in float32
CONFIG = LoaderConfig(batch_size=8, max_history_length=200, max_num_candidates=1)
DATA = RandomData(
    lengths=Lognormal(mean=30, std=40, high=200), items=Uniform(high=NUM_ITEMS - 1), num_real=Uniform(low=0, high=8)
)


class CountingModel(torch.nn.Module):
    """A model whose weights count the items and the samples that it was trained on."""

    busy: torch.Tensor

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        table = EmbeddingBagConfig(
            name="table",
            num_embeddings=NUM_ITEMS,
            embedding_dim=8,
            feature_names=["item_id"],
            init_fn=torch.nn.init.zeros_,
        )
        self.items: torch.nn.Module = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.samples = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("busy", torch.zeros(512, 512))

    def forward(self, batch: SequenceBatch) -> tuple[torch.Tensor, SequenceBatch]:
        busy = self.busy
        for _ in range(4):  # so that the GPU falls behind the host
            busy = torch.tanh(busy @ busy)
        return self.items(batch.features).values().sum() + busy.sum() + self.samples.sum() * batch.num_real, batch


def _make_pipeline(rank: int, world_size: int, device_type: str) -> tuple[Any, CountingModel, Any]:
    """Return a pipeline, its model, and the model with its table sharded over ranks."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv

    logging.disable(logging.WARNING)  # from TorchRec's planner
    device = torch.device(device_type)
    group = dist.group.WORLD
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    assert group is not None
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE})
    sharding = "row_wise" if device_type == "cuda" else "table_wise"  # TorchRec does not shard by rows on the CPU
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device_type),
        constraints={"table": ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])},
    )
    model = CountingModel()
    plan = planner.collective_plan(model, [sharder], group)
    parallel = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(group), device=device, plan=plan, sharders=[sharder]
    )
    optimizer = torch.optim.SGD([model.samples], lr=RATE)
    return TrainPipelineSparseDist(parallel, optimizer, device), model, parallel


def _train_and_resume(rank: int, world_size: int, path: Path, num_steps: int, balanced: bool) -> dict[str, object]:
    pipeline, *_ = _make_pipeline(rank, world_size, "cpu")
    config = LoaderConfig(batch_size=8)
    loader = build_loader(path, config, rank=rank, world_size=world_size)
    source = Balancer(loader, BalanceConfig(cost=COST)) if balanced else loader
    iterator = iter(source)
    trained: list[int] = []
    for _ in range(num_steps):
        batch = pipeline.progress(iterator)
        trained += ids_of(batch)
    state = source.state_dict(after=batch)
    ahead = loader.state_dict()["position"] - state["position"]
    if isinstance(source, Balancer):
        iterator.close()  # type: ignore[attr-defined]
        source.close()

    resumed = build_loader(path, config, rank=rank, world_size=world_size)
    resumed.load_state_dict(state)
    rest = [sample for batch in resumed for sample in ids_of(batch)]
    return {
        "trained": trained,
        "rest": rest,
        "steps_ahead": ahead // (8 * world_size),
        "num_samples": resumed.num_samples,
    }


@pytest.mark.parametrize("balanced", [False, True])
def test_a_state_is_that_of_the_batch_trained_last_not_of_those_pulled_ahead(
    small_dataset: Path, ranks: RankPool, balanced: bool
) -> None:
    results = ranks.run(2, _train_and_resume, small_dataset, 4, balanced)
    assert all(result["steps_ahead"] >= 2 for result in results)
    trained = [sample for result in results for sample in result["trained"]]
    assert len(trained) == 2 * 4 * 8
    rest = [sample for result in results for sample in result["rest"]]
    assert sorted(trained + rest) == list(range(results[0]["num_samples"]))


def _train_counting(rank: int, world_size: int, device_type: str, num_steps: int, balanced: bool) -> dict[str, Any]:
    pipeline, model, parallel = _make_pipeline(rank, world_size, device_type)
    batches = RandomBatches(CONFIG, DATA, num_batches=num_steps, rank=rank, world_size=world_size)
    source = (
        Balancer(batches, BalanceConfig(cost=COST, strategy="min-move"), device=parallel.device)
        if balanced
        else batches
    )
    iterator = iter(source)
    trained: list[int] = []
    for step in itertools.count():
        try:
            batch = pipeline.progress(iterator)
        except StopIteration:
            break
        if step % 10 == 0:
            trained.append(batch.step)
    if isinstance(source, Balancer):
        source.close()
    (table,) = [value for name, value in parallel.state_dict().items() if name.endswith("table.weight")]
    shards = [(shard.metadata.shard_offsets[0], shard.tensor.cpu().numpy()) for shard in table.local_shards()]
    return {"shards": shards, "samples": float(model.samples.detach().cpu()), "trained": trained}


def _check_counts(results: list[dict[str, Any]], num_steps: int) -> None:
    """Compare the weights with counts of the batches; gradients are averaged over ranks."""
    world_size = len(results)
    counts, num_samples = np.zeros(NUM_ITEMS), 0
    for rank in range(world_size):
        for batch in RandomBatches(CONFIG, DATA, num_batches=num_steps, rank=rank, world_size=world_size):
            counts += np.bincount(batch.features["item_id"].values().numpy(), minlength=NUM_ITEMS)
            num_samples += batch.num_real
    shards = sorted((shard for result in results for shard in result["shards"]), key=lambda shard: shard[0])
    rows = np.concatenate([values for _, values in shards])
    assert counts.sum() > 50 * num_steps
    assert np.array_equal(rows, np.repeat(counts[:, np.newaxis] * -RATE / world_size, 8, axis=1))
    assert [result["samples"] for result in results] == [-RATE * num_samples / world_size] * world_size
    assert all(result["trained"] == list(range(0, num_steps, 10)) for result in results)


def test_a_sharded_model_counts_every_item_and_every_sample_once(ranks: RankPool) -> None:
    _check_counts(ranks.run(2, _train_counting, "cpu", 12, True), 12)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("balanced", [False, True])
def test_on_gpus_a_sharded_model_counts_every_item_and_every_sample_once(balanced: bool) -> None:
    kernel = "split_embedding_codegen_lookup_sgd_function"
    if not any(hasattr(torch.ops.fbgemm, name) for name in (kernel, f"{kernel}_pt2")):
        pytest.skip("this build of fbgemm_gpu has no embedding kernels")
    pool = RankPool()
    try:
        world_size = 4 if torch.cuda.device_count() >= 4 else 2  # averages over 2 or 4 ranks are exact
        _check_counts(pool.run(world_size, _train_counting, "cuda", 300, balanced), 300)
    finally:
        pool.stop()
