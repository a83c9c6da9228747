"""torch.distributed.checkpoint: stop in the middle of an epoch, and resume on another number of ranks.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/checkpoint_resume.py --data out/synthetic --steps 60
    torchrun --nproc_per_node 3 examples/checkpoint_resume.py --data out/synthetic

The first job saves a checkpoint after 60 steps and ends. The second one trains on what is left of the epoch with 3
ranks, and checks that the two jobs trained on each sample exactly once. One call saves or loads model, optimizer and
position in the data: the loader is one more entry of the state.

A step has 96 samples on any number of ranks that divides 96, so the losses after resuming are those of a job that was
never stopped, up to rounding.
"""

import math
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, scale_loss
from next_item import COST, NextItem, report, run


class AppState:
    """Model and optimizer as torch.distributed.checkpoint saves them: by the names of parameters, on any rank."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return what to save and, before loading, where to load it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main(
    data: Path = Path("out/synthetic"),
    checkpoint: Path = Path("out/checkpoint-resume"),
    steps: int | None = None,
    global_batch_size: int = 96,
    log_every: int = 20,
) -> None:
    """Train from the checkpoint, if there is one, to the end of the epoch or for some steps; run it under torchrun."""
    num_items = read_manifest(data).vocabulary_sizes["item_id"]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if global_batch_size % world_size:
        raise ConfigError(f"--global-batch-size {global_batch_size} is no multiple of {world_size} ranks; choose one")
    torch.manual_seed(0)
    config = LoaderConfig(batch_size=global_batch_size // world_size, max_history_length=100)
    loader = build_loader(data, config, rank=rank, world_size=world_size, balance=BalanceConfig(cost=COST))
    model = DistributedDataParallel(NextItem(num_items))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    average = LossAverage()
    trained = torch.zeros(loader.num_samples, dtype=torch.int64)  # how often each sample was trained on, by all ranks

    job = {"app": AppState(model, optimizer), "data": loader, "trained": trained}
    if checkpoint.exists():
        dcp.load(job, checkpoint_id=checkpoint)  # type: ignore[attr-defined]
        report(f"resumed on {world_size} ranks; {loader.remaining_batches()} of {len(loader)} steps are left")
    mine = torch.zeros_like(trained)
    for batch in islice(loader, steps):
        optimizer.zero_grad()
        loss_sum = model(batch)
        scale_loss(loss_sum, batch).backward()
        optimizer.step()
        mine[batch.sample_ids[: batch.num_real]] += 1
        average.update(loss_sum, batch)
        step = math.ceil(batch.position / global_batch_size)
        if step % log_every == 0:
            (loss,) = average.compute()
            average.reset()
            report(f"step {step} | loss {loss:.4f}")
    dist.all_reduce(mine)
    trained += mine
    if steps is not None:
        partial = checkpoint.with_suffix(".partial")  # what stays if the job is killed here is never loaded
        dcp.save(job, checkpoint_id=partial)  # type: ignore[attr-defined]
        if rank == 0:  # where it returns when all ranks have written
            shutil.rmtree(checkpoint, ignore_errors=True)
            partial.rename(checkpoint)
    once, repeated = int((trained == 1).sum()), int((trained > 1).sum())
    report(f"{once:,} of {loader.num_samples:,} samples were trained on exactly once, {repeated:,} more often")
    if steps is None and once < loader.num_samples:
        raise RuntimeError("the epoch is over, but not every sample was trained on exactly once")


if __name__ == "__main__":
    run(main)
