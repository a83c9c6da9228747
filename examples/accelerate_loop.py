"""Hugging Face Accelerate with balanced batches, and a checkpoint in the middle of an epoch.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/accelerate_loop.py --data out/synthetic

`accelerator.save_state` saves the position in the data along with model and optimizer, because the loader is
registered with `register_for_checkpointing`. Run the same command again: it resumes from the last checkpoint, which is
that of step 80 of 100, as a job does that was killed, and prints the same loss for step 100. `save_state` writes one
file after the other, so each checkpoint has a folder of its own, which gets its name when it is complete: a job that is
killed meanwhile resumes from the one before.

Do not pass the loader to `accelerator.prepare`: it has distributed the samples over the ranks already. On GPUs, leave
`cpu=True` out.
"""

import argparse
import math
import shutil
import sys
from itertools import chain, repeat
from pathlib import Path

import torch
from accelerate import Accelerator

from evenrank.core.errors import EvenrankError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, scale_loss
from next_item import COST, NextItem


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of the last step, None if there is none."""
    return max(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save a checkpoint, and delete the one before once it is complete. Collective: every rank must call this."""
    partial = folder / "partial"
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()  # all ranks have written their files
    if accelerator.is_main_process:
        complete = partial.rename(folder / f"step-{step}")
        for path in folder.glob("step-*"):
            if path != complete:
                shutil.rmtree(path)


def train(args: argparse.Namespace) -> None:
    """Train on this rank, from the last checkpoint if there is one."""
    num_items = read_manifest(args.data).vocabulary_sizes["item_id"]
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = LoaderConfig(batch_size=16, max_history_length=200)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    balance = BalanceConfig(cost=COST)
    loader = build_loader(args.data, config, rank=rank, world_size=world_size, balance=balance)

    model = NextItem(num_items)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    average = LossAverage(device=accelerator.device)
    accelerator.register_for_checkpointing(loader)
    if (last := newest(args.checkpoints)) is not None:
        accelerator.load_state(str(last))
        state = loader.state_dict()
        accelerator.print(f"resumed in epoch {state['epoch']} after {state['position']:,} samples")
    for batch in chain.from_iterable(repeat(loader)):  # epoch after epoch
        batch = batch.to(accelerator.device)
        optimizer.zero_grad()
        loss_sum = model(batch)
        accelerator.backward(scale_loss(loss_sum, batch))
        optimizer.step()
        average.update(loss_sum, batch)
        step = batch.epoch * len(loader) + math.ceil(batch.position / (world_size * config.batch_size))
        if step % args.log_every == 0:
            (loss,) = average.compute()
            average.reset()
            accelerator.print(f"step {step} | loss {loss:.4f} | epoch {batch.epoch}, sample {batch.position:,}")
        if step % args.save_every == 0:
            save(accelerator, args.checkpoints, step)
        if step >= args.steps:
            break
    accelerator.end_training()


def main() -> None:
    """Run this process as one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/synthetic"), help="written by `evenrank preprocess`")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/accelerate-loop"), help="folder to resume from")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=20)
    args = parser.parse_args()
    try:
        train(args)
    except EvenrankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
