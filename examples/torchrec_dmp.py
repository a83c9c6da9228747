"""TorchRec's DistributedModelParallel and TrainPipelineSparseDist on balanced batches, and a resume within an epoch.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/torchrec_dmp.py --data out/synthetic

The table of items is sharded by rows: each rank holds a part of them. The rest of the model is replicated. While a
batch trains, TorchRec's pipeline sends the ids of the next one to the ranks that hold their rows. So it pulls batches
ahead; the position to save in a checkpoint is `loader.state_dict(after=batch)`, of the batch trained last.

Run the same command again: it resumes from the last checkpoint, which is that of step 80 of 100, as a job does that was
killed, and prints the same loss for step 100.

On GPUs, `device` is `torch.device("cuda", int(os.environ["LOCAL_RANK"]))`, after `torch.cuda.set_device(device)`, and
the process group is initialized with "cpu:gloo,cuda:nccl". Only there does the pipeline overlap communication and
training.
"""

import argparse
import gc
import sys
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

from evenrank.core.errors import EvenrankError
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, SelfAttentionCost, StepMetrics, summarize
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, load_dmp, make_dmp_optimizer, save_dmp, scale_loss

WIDTH, HEADS = 32, 2


class NextItemHead(nn.Module):
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


def attend(qkv: Tensor) -> Tensor:
    """Return the causal self-attention [n, WIDTH] of a sample with the projections `qkv` [n, 3 * WIDTH]."""
    q, k, v = qkv.view(len(qkv), 3, HEADS, WIDTH // HEADS).transpose(0, 2).unbind(1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


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
        self.head = NextItemHead()

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


def train(args: argparse.Namespace) -> None:
    """Train on this rank, from the checkpoint if there is one."""
    num_items = read_manifest(args.data).vocabulary_sizes["item_id"]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    torch.manual_seed(0)

    def add_negatives(batch: SequenceBatch) -> SequenceBatch:
        """Add a random item for each event, which is looked up like the history."""
        lengths = batch.features["item_id"].lengths()
        rng = np.random.default_rng([batch.epoch, batch.position, rank])
        ids = torch.from_numpy(rng.integers(1, num_items, int(lengths.sum())))
        negatives = KeyedJaggedTensor(keys=["negative_id"], values=ids, lengths=lengths)
        return batch.replace(features=KeyedJaggedTensor.concat([batch.features, negatives]))

    config = LoaderConfig(batch_size=16, max_history_length=200)
    cost = SelfAttentionCost(hidden=WIDTH, heads=HEADS, head_dim=WIDTH // HEADS, layers=1, ffn_multiplier=4)
    steps: list[StepMetrics] = []
    balance = BalanceConfig(cost=cost, on_step=steps.append)
    loader = build_loader(args.data, config, rank=rank, world_size=world_size, balance=balance)

    model = shard_by_rows(NextItem(num_items), device)
    optimizer = make_dmp_optimizer(model, lambda parameters: torch.optim.Adam(parameters, lr=3e-3))

    def forward(batch: SequenceBatch) -> tuple[Tensor, tuple[SequenceBatch, Tensor]]:
        """Return the loss to minimize, and what `progress` returns: the batch and its sum of losses."""
        loss_sum = model(batch)
        return scale_loss(loss_sum, batch), (batch, loss_sum.detach())

    pipeline = TrainPipelineSparseDist(model, optimizer, device, custom_model_fwd=forward)

    first = 1
    if (saved := load_dmp(args.checkpoint, model, optimizer)) is not None:
        loader.load_state_dict(saved["data"])
        first = saved["step"] + 1
        if rank == 0:
            print(f"resumed after step {saved['step']}", flush=True)
    average = LossAverage(device=device)
    batches = map(add_negatives, chain.from_iterable(repeat(loader)))  # of one epoch after the other
    for step in range(first, args.steps + 1):
        batch, loss_sum = pipeline.progress(batches)
        average.update(loss_sum, batch)
        if step % args.log_every == 0:
            (loss,) = average.compute()
            average.reset()
            load = summarize(steps)
            steps.clear()
            if rank == 0:
                print(
                    f"step {step} | loss {loss:.4f} | heaviest rank over lower bound "
                    f"{load.ratio_before:.3f} before balancing, {load.ratio_after:.3f} after",
                    flush=True,
                )
        if step % args.save_every == 0:
            values = {"data": loader.state_dict(after=batch), "step": step}
            save_dmp(args.checkpoint, model, optimizer, values)
    (table,) = model.module.get_submodule("embeddings").parameters()
    if rank == 0:
        print(f"rank 0 has {len(table):,} of the {num_items:,} rows of the table")


def main() -> None:
    """Run this process as one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/synthetic"), help="written by `evenrank preprocess`")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/torchrec-dmp"), help="folder to resume from")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=20)
    args = parser.parse_args()
    # TorchRec passes DistributedDataParallel an argument that PyTorch has renamed.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", ".*we are deprecating ShardedTensor", FutureWarning)  # of which its states are
    try:
        train(args)
    except EvenrankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    gc.collect()  # DistributedDataParallel refers to the process group, in cycles
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
