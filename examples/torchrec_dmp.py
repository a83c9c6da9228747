"""TorchRec's DistributedModelParallel and TrainPipelineSparseDist on balanced batches, and a resume within an epoch.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/torchrec_dmp.py --data out/synthetic

The table of items is sharded by rows: each rank holds a part of them. The rest of the model is replicated. While a
batch trains, TorchRec's pipeline sends the ids of the next one to the ranks that hold their rows. So it pulls batches
ahead; the position to save in a checkpoint is `loader.state_dict(after=batch)`, of the batch trained last. Run the same
command again: it resumes from the checkpoint of step 80 of 100, and prints the same loss for step 100.

On GPUs, `device` is `torch.device("cuda", int(os.environ["LOCAL_RANK"]))`, after `torch.cuda.set_device(device)`, and
the process group is initialized with "cpu:gloo,cuda:nccl". Only there does the pipeline overlap communication and
training.
"""

import warnings
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, StepMetrics, summarize
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, load_dmp, make_dmp_optimizer, save_dmp, scale_loss
from next_item import COST, WIDTH, attend, report, run


class Head(nn.Module):
    """Causal self-attention over the embeddings of each history, and the loss of predicting the next item."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, batch: SequenceBatch, embeddings: dict[str, JaggedTensor]) -> Tensor:
        """Return the sum of the losses of this rank's events but the first of each history, a scalar."""
        x, negatives = embeddings["item_id"].values(), embeddings["negative_id"].values()
        lengths = batch.features["item_id"].lengths()
        hidden = x + torch.cat([attend(sample) for sample in self.qkv(x).split(lengths.tolist())])
        hidden = hidden + self.mlp(hidden)
        has_next = torch.ones(len(x), dtype=torch.bool, device=x.device)
        has_next[lengths.cumsum(0)[lengths > 0] - 1] = False
        is_next = has_next.roll(1)
        positive = (hidden[has_next] * x[is_next]).sum(-1)
        negative = (hidden[has_next] * negatives[is_next]).sum(-1)
        return F.softplus(-positive).sum() + F.softplus(negative).sum()


class NextItem(nn.Module):
    """Passes a feature to the sharded table, and all else to the head: TorchRec's pipeline traces this forward."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item_table",
            num_embeddings=num_items,
            embedding_dim=WIDTH,
            feature_names=["item_id", "negative_id"],
            init_fn=lambda weight: nn.init.normal_(weight, std=0.1),
        )
        self.embeddings = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.head = Head()

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Return the sum of the losses."""
        loss: Tensor = self.head(batch, self.embeddings(batch.features))
        return loss


def shard_by_rows(model: NextItem, device: torch.device) -> DistributedModelParallel:
    """Return the model with each rank's rows of the table, which the backward pass updates with Adagrad."""
    sharder = EmbeddingCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
    plan = construct_module_sharding_plan(
        model.embeddings, {"item_table": row_wise(compute_kernel="fused")}, sharder, device_type=device.type
    )
    return DistributedModelParallel(model, device=device, plan=ShardingPlan({"embeddings": plan}), sharders=[sharder])


def main(
    data: Path = Path("out/synthetic"),
    checkpoint: Path = Path("out/torchrec-dmp"),
    steps: int = 100,
    save_every: int = 40,
    log_every: int = 20,
) -> None:
    """Train from the checkpoint, if there is one; run it under torchrun."""
    # TorchRec passes DistributedDataParallel an argument that PyTorch has renamed.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", ".*we are deprecating ShardedTensor", FutureWarning)  # of which its states are
    num_items = read_manifest(data).vocabulary_sizes["item_id"]
    dist.init_process_group("gloo")
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.manual_seed(0)

    def add_negatives(batch: SequenceBatch) -> SequenceBatch:
        """Add a random item for each event, which is looked up like the history."""
        lengths = batch.features["item_id"].lengths()
        rng = np.random.default_rng([batch.epoch, batch.position, rank])
        ids = torch.from_numpy(rng.integers(1, num_items, int(lengths.sum())))
        negatives = KeyedJaggedTensor(keys=["negative_id"], values=ids, lengths=lengths)
        return batch.replace(features=KeyedJaggedTensor.concat([batch.features, negatives]))

    loads: list[StepMetrics] = []
    config, balance = (
        LoaderConfig(batch_size=16, max_history_length=200),
        BalanceConfig(cost=COST, on_step=loads.append),
    )
    loader = build_loader(data, config, rank=rank, world_size=world_size, balance=balance)
    model = shard_by_rows(NextItem(num_items), device)
    optimizer = make_dmp_optimizer(model, lambda parameters: torch.optim.Adam(parameters, lr=3e-3))

    def forward(batch: SequenceBatch) -> tuple[Tensor, tuple[SequenceBatch, Tensor]]:
        """Return the loss to minimize, and what `progress` returns: the batch and its sum of losses."""
        loss_sum = model(batch)
        return scale_loss(loss_sum, batch), (batch, loss_sum.detach())

    pipeline = TrainPipelineSparseDist(model, optimizer, device, custom_model_fwd=forward)
    first = 1
    if (saved := load_dmp(checkpoint, model, optimizer)) is not None:
        loader.load_state_dict(saved["data"])
        first = saved["step"] + 1
        report(f"resumed after step {saved['step']}")
    average = LossAverage(device=device)
    batches = map(add_negatives, chain.from_iterable(repeat(loader)))  # of one epoch after the other
    for step in range(first, steps + 1):
        batch, loss_sum = pipeline.progress(batches)
        average.update(loss_sum, batch)
        if step % log_every == 0:
            (loss,), load = average.compute(), summarize(loads)
            average.reset()
            loads.clear()
            ratios = f"{load.ratio_before:.3f} before balancing, {load.ratio_after:.3f} after"
            report(f"step {step} | loss {loss:.4f} | heaviest rank over lower bound {ratios}")
        if step % save_every == 0:
            save_dmp(checkpoint, model, optimizer, {"data": loader.state_dict(after=batch), "step": step})
    (table,) = model.module.get_submodule("embeddings").parameters()
    report(f"rank 0 has {len(table):,} of the {num_items:,} rows of the table")


if __name__ == "__main__":
    run(main)
