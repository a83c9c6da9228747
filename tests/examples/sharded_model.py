"""A small model with sharded and replicated tables, and batches for it, on the CPU or on GPUs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec import EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import JaggedTensor

from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal, Uniform
from evenrank.training import make_dmp_optimizer, scale_loss
from hstu import Embeddings, shard
from tests.dataloader.balance.costs import COST

DIM, RATE = 4, 0.5
ROWS = {"item_id": 41, "action": 10, "region": 5}  # 41 rows: shards of different sizes
CONFIG = LoaderConfig(batch_size=8, max_history_length=40, max_num_candidates=2)
ITEMS, REGIONS = (Uniform(high=ROWS[key] - 1) for key in ("item_id", "region"))
LENGTHS = Lognormal(mean=10, std=10, high=40)
DATA = RandomData(lengths=LENGTHS, items=ITEMS, contextual={"region": REGIONS}, num_real=Uniform(low=0, high=8))


@torch.no_grad()
def _fill(table: Tensor) -> Tensor:
    return table.copy_(torch.linspace(-1, 1, table.numel()).reshape(table.shape))


class Head(nn.Module):
    """Scores a sample by the sum of its embeddings, once for each of its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, DIM).unsqueeze(-1))

    def forward(self, batch: SequenceBatch, embeddings: dict[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        pooled = torch.zeros(batch.batch_size, DIM, device=self.weight.device)
        for key in ROWS:
            values, lengths = embeddings[key].values(), embeddings[key].lengths()
            rows = torch.arange(len(lengths), device=values.device)
            pooled = pooled.index_add(0, rows.repeat_interleave(lengths, output_size=len(values)), values)
        scores = torch.tanh(0.1 * pooled @ self.weight)
        logits = scores.repeat_interleave(batch.num_candidates, dim=0, output_size=batch.loss_tokens)
        return ((logits - 0.5) ** 2).sum(0), logits


class Model(nn.Module):
    """Returns loss sums [1] and logits [labels, 1]."""

    def __init__(self, *, min_sharded_rows: int = 20) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=f"{key}_table", num_embeddings=rows, embedding_dim=DIM, feature_names=[key], init_fn=_fill
            )
            for key, rows in ROWS.items()
        ]
        self.embeddings = Embeddings(tables, min_sharded_rows=min_sharded_rows)
        self.head = Head()

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.head(batch, self.embeddings(batch.features))
        return result


def scaled(output: tuple[Tensor, Tensor], batch: SequenceBatch) -> Tensor:
    """Return the loss of a model."""
    return scale_loss(output[0], batch).sum()


def join(rank: int, device_type: str) -> torch.device:
    """Return the device of this rank."""
    if device_type == "cpu":
        return torch.device("cpu")
    skip_without_kernels()
    device = torch.device(device_type, rank)
    torch.cuda.set_device(device)
    return device


def distribute(model: Model, device: torch.device, *, cached: bool = False) -> tuple[DistributedModelParallel, Any]:
    """Return the model on all ranks, and its optimizer, SGD of all parameters. Collective."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    group = None if device.type == "cpu" else dist.new_group(backend="nccl")
    parallel = shard(model, device, fused=fused, group=group, cached=cached)
    return parallel, make_dmp_optimizer(parallel, lambda parameters: torch.optim.SGD(parameters, lr=RATE))


def batches_of(rank: int, world_size: int, *, num_batches: int = 8) -> RandomBatches[SequenceBatch]:
    return RandomBatches(CONFIG, DATA, num_batches=num_batches, rank=rank, world_size=world_size)


def balanced(batches: RandomBatches[SequenceBatch], device: torch.device) -> Balancer[SequenceBatch]:
    return Balancer(batches, BalanceConfig(cost=COST), device=device)


def weights_of(model: nn.Module) -> dict[str, list[tuple[int, NDArray[np.float32]]]]:
    """Return the weights by name, as a list of first row and rows: those of this rank."""
    return {
        name: [(shard.metadata.shard_offsets[0], shard.tensor.cpu().numpy()) for shard in value.local_shards()]
        if hasattr(value, "local_shards")
        else [(0, value.detach().cpu().numpy())]
        for name, value in model.state_dict().items()
    }


def skip_without_kernels() -> None:
    kernel = "split_embedding_codegen_lookup_sgd_function"
    if not any(hasattr(torch.ops.fbgemm, name) for name in (kernel, f"{kernel}_pt2")):
        pytest.skip("this build of fbgemm_gpu has no embedding kernels")
