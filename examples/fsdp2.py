"""FSDP2 and tensor parallelism on a two-dimensional device mesh, with samples balanced over one of its dimensions.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 4 examples/fsdp2.py --data out/synthetic

                 tp 0     tp 1
        dp 0    rank 0   rank 1     train on the same samples, each with half of the MLP
        dp 1    rank 2   rank 3

`fully_shard` divides all parameters along `dp`. Samples are balanced along `dp` as well (`group=mesh["dp"]`): ranks 0
and 2 are one group, ranks 1 and 3 another. Both read the same samples and compute the same plans, so tensor-parallel
peers get equal batches without communicating; the example checks that they do.

In hybrid sharding, with `mesh_dim_names=("replicate", "shard")` and `fully_shard(model, mesh=mesh)`, each rank trains
samples of its own: pass its rank among all, and leave `group` out. On GPUs, call `torch.cuda.set_device`, initialize
the process group with "cpu:gloo,cuda:nccl" and the mesh with "cuda", move batches with `batch.to(device)`, and pass
`device=` to LossAverage.
"""

import argparse
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, StepMetrics, summarize
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, scale_loss
from next_item import COST, NextItem


def have_equal_samples(batch: SequenceBatch, group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of a group have the same samples in the same rows. Collective over the group."""
    ids = [torch.empty_like(batch.sample_ids) for _ in range(group.size())]
    dist.all_gather(ids, batch.sample_ids, group=group)
    return all(torch.equal(other, batch.sample_ids) for other in ids)


def train(args: argparse.Namespace) -> None:
    """Train on this rank."""
    num_items = read_manifest(args.data).vocabulary_sizes["item_id"]
    dist.init_process_group("gloo")
    if dist.get_world_size() % 2:
        raise ConfigError(f"{dist.get_world_size()} ranks cannot be divided into pairs; run it with --nproc_per_node 4")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    torch.manual_seed(0)
    config = LoaderConfig(batch_size=16, max_history_length=200)
    steps: list[StepMetrics] = []
    balance = BalanceConfig(cost=COST, on_step=steps.append)
    rank, world_size = dp.get_local_rank(), dp.size()
    loader = build_loader(args.data, config, rank=rank, world_size=world_size, balance=balance, group=dp)

    model = NextItem(num_items)
    parallelize_module(model, tp, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    fully_shard(model, mesh=dp)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    average = LossAverage(group=dp)
    unequal = 0
    epochs = chain.from_iterable(repeat(loader))
    for step, batch in enumerate(islice(epochs, args.steps), start=1):
        optimizer.zero_grad()
        loss_sum = model(batch)
        scale_loss(loss_sum, batch).backward()  # divides by the loss tokens of the ranks along `dp`
        optimizer.step()
        average.update(loss_sum, batch)
        unequal += not have_equal_samples(batch, tp.get_group())
        if step % args.log_every == 0:
            (loss,) = average.compute()
            average.reset()
            load = summarize(steps)
            steps.clear()
            if dist.get_rank() == 0:
                print(
                    f"step {step} | loss {loss:.4f} | heaviest rank over lower bound "
                    f"{load.ratio_before:.3f} before balancing, {load.ratio_after:.3f} after",
                    flush=True,
                )
    if dist.get_rank() == 0:
        print(f"tensor-parallel peers had equal samples in {args.steps - unequal} of {args.steps} steps")


def main() -> None:
    """Run this process as one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/synthetic"), help="written by `evenrank preprocess`")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=20)
    args = parser.parse_args()
    try:
        train(args)
    except EvenrankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
