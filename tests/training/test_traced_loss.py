"""`scale_loss` in the forward of a model that torch.fx traces, also inside a training pipeline of TorchRec."""

import sys
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.train_pipeline import Tracer

import evenrank.training
from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedBatch, LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal, Uniform
from evenrank.training import accumulate, scale_loss
from tests.ranks import RankPool


class _Summing(torch.nn.Module):
    def __init__(self, dp_size: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self._dp_size = dp_size

    def forward(self, batch: JaggedBatch) -> Tensor:
        return scale_loss(self.weight.sum(), batch, dp_size=self._dp_size)


class _OfTasks(_Summing):
    def forward(self, batch: JaggedBatch) -> Tensor:
        return scale_loss(self.weight, batch)


class _UsingThePackage(_Summing):
    def forward(self, batch: JaggedBatch) -> Tensor:
        return evenrank.training.scale_loss(self.weight.sum(), batch)


def _batch(**changes: Any) -> JaggedBatch:
    return JaggedBatch(batch_size=1, num_real=0).replace(**changes)


@pytest.fixture(params=[torch.fx.Tracer, Tracer])
def tracer(request: pytest.FixtureRequest) -> torch.fx.Tracer:
    made: torch.fx.Tracer = request.param()
    return made


def _traced(model: torch.nn.Module, tracer: torch.fx.Tracer) -> torch.fx.GraphModule:
    return torch.fx.GraphModule(model, tracer.trace(model))


def test_a_traced_model_scales_by_the_batch_that_it_runs_on(tracer: torch.fx.Tracer) -> None:
    traced = _traced(_Summing(), tracer)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [scale_loss]
    assert traced(_batch(world_loss_tokens=8, dp_size=4)).item() == 2 * 4 / 8
    assert traced(_batch(world_loss_tokens=5, dp_size=1)).item() == pytest.approx(2 / 5)
    with pytest.raises(ConfigError, match="the batch has no world_loss_tokens"):
        traced(_batch())


def test_a_traced_model_divides_by_the_loss_tokens_of_each_task(tracer: torch.fx.Tracer) -> None:
    batch = _batch(world_loss_tokens=8, dp_size=4, world_task_tokens=torch.tensor([8, 2]))
    assert _traced(_OfTasks(), tracer)(batch).tolist() == [4 / 8, 4 / 2]


def test_a_traced_model_keeps_the_dp_size_that_it_passes(tracer: torch.fx.Tracer) -> None:
    assert _traced(_Summing(dp_size=3), tracer)(_batch(world_loss_tokens=8, dp_size=4)).item() == 2 * 3 / 8


def test_a_traced_model_without_loss_tokens_has_zero_gradients(tracer: torch.fx.Tracer) -> None:
    model = _Summing()
    _traced(model, tracer)(_batch(world_loss_tokens=0, dp_size=2)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [0, 0]


def test_the_first_use_may_be_while_tracing(tracer: torch.fx.Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "evenrank.training.loss")
    monkeypatch.delitem(vars(evenrank.training), "scale_loss", raising=False)  # as if no one had used it before
    traced = _traced(_UsingThePackage(), tracer)
    assert "evenrank.training.loss" in sys.modules
    assert traced(_batch(world_loss_tokens=8, dp_size=4)).item() == 2 * 4 / 8


NUM_ITEMS = 50
RATE = 0.5
CONFIG = LoaderConfig(batch_size=8, max_history_length=40, max_num_candidates=2)
DATA = RandomData(
    lengths=Lognormal(mean=10, std=10, high=40),
    items=Uniform(high=NUM_ITEMS - 1),
    num_real=Uniform(low=0, high=8),
)
NUM_STEPS = 12


@torch.no_grad()
def _fill(table: Tensor) -> Tensor:
    return table.copy_(torch.linspace(-0.1, 0.1, table.numel()).reshape(table.shape))


class _Model(torch.nn.Module):
    """Its forward ends with the scaled loss."""

    def __init__(self, device: str) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="table", num_embeddings=NUM_ITEMS, embedding_dim=4, feature_names=["item_id"], init_fn=_fill
        )
        self.items: torch.nn.Module = EmbeddingBagCollection(tables=[table], device=torch.device(device))
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4))

    def local_sum(self, batch: SequenceBatch) -> Tensor:
        """Return the sum of the loss over the candidates; padding rows have none."""
        scores = torch.tanh(self.items(batch.features).values() @ self.weight)
        return (batch.num_candidates * (scores - 0.5) ** 2).sum()

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, SequenceBatch]:
        return scale_loss(self.local_sum(batch).view(1), batch).sum(), batch


def _batches(rank: int, world_size: int) -> RandomBatches[SequenceBatch]:
    return RandomBatches(CONFIG, DATA, num_batches=NUM_STEPS, rank=rank, world_size=world_size)


def _train_in_a_pipeline(rank: int, world_size: int, counts_tasks: bool) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv

    assert dist.group.WORLD is not None
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"),
        constraints={"table": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])},
    )
    model = _Model("meta")
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=planner.collective_plan(model, [sharder], dist.group.WORLD),
        sharders=[sharder],
    )
    pipeline = TrainPipelineSparseDist(
        parallel, torch.optim.SGD([model.weight], lr=RATE), torch.device("cpu"), execute_all_batches=True
    )
    gradients = []
    with Balancer(
        _batches(rank, world_size),
        BalanceConfig(cost=HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)),
    ) as balancer:
        iterator = iter(balancer)
        if counts_tasks:
            steps = accumulate(balancer, 1, task_tokens=lambda batch: batch.num_candidates.sum().view(1))
            iterator = chain.from_iterable(steps)
        for _ in range(NUM_STEPS):
            pipeline.progress(iterator)
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.numpy().copy())
    (table,) = [value for name, value in parallel.state_dict().items() if name.endswith("table.weight")]
    return {
        "weight": model.weight.detach().numpy(),
        "gradients": np.array(gradients),
        "tables": [shard.tensor.numpy() for shard in table.local_shards()],
    }


def _train_plainly(world_size: int) -> tuple[_Model, NDArray[np.float32]]:
    """Train on the same batches without balancing, pipeline or ranks; return the model and the weight's gradients."""
    model = _Model("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gradients = []
    for batches in zip(*(_batches(rank, world_size) for rank in range(world_size)), strict=True):
        optimizer.zero_grad()
        loss = torch.stack([model.local_sum(batch) for batch in batches]).sum()
        (loss / sum(batch.loss_tokens for batch in batches)).backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.numpy().copy())
        optimizer.step()
    return model, np.array(gradients)


@pytest.mark.parametrize("counts_tasks", [False, True])
def test_a_pipeline_whose_model_scales_the_loss_trains_like_a_plain_loop(ranks: RankPool, counts_tasks: bool) -> None:
    model, gradients = _train_plainly(2)
    (table,) = [value for name, value in model.named_parameters() if name.endswith("table.weight")]
    assert not torch.allclose(table, _fill(torch.empty_like(table)), atol=1e-2)  # it has been trained
    results = ranks.run(2, _train_in_a_pipeline, counts_tasks)
    for result in results:
        np.testing.assert_allclose(result["gradients"], gradients, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(result["weight"], model.weight.detach().numpy(), rtol=1e-4, atol=1e-6)
    (trained,) = [shard for result in results for shard in result["tables"]]
    np.testing.assert_allclose(trained, table.detach().numpy(), rtol=1e-4, atol=1e-6)
