"""Lightning with balanced batches: strategy "ddp", and a resume in the middle of an epoch.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/lightning_fit.py --data out/synthetic

Lightning saves the position in the data along with model and optimizer, because the loader has `state_dict`. Run the
same command again: it resumes from the last checkpoint, which is that of step 80 of 100, as a job does that was killed,
and prints the same loss for step 100. Without the callback `ElasticResume`, Lightning would lose batches; with it, the
job resumes with any other --nproc_per_node that divides 32, the global batch size.

Create the loader in `train_dataloader`: before `fit` there is no process group through which ranks could compare their
loaders. On GPUs, pass the Trainer `accelerator="gpu"`; it moves the batches.
"""

import argparse
import gc
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, scale_loss
from evenrank.training.trainers.lightning_callback import ElasticResume
from next_item import COST, NextItem


class Recommender(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, num_items: int, *, log_every: int) -> None:
        super().__init__()
        self.model = NextItem(num_items)
        self.log_every = log_every

    def on_train_start(self) -> None:
        """Create the average over ranks, which is a collective."""
        self.average = LossAverage(device=self.device)
        if self.global_step:
            self.print(f"resumed after step {self.global_step}")

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> Tensor:
        """Return the loss of this rank, of which DDP averages the gradients."""
        loss_sum: Tensor = self.model(batch)
        self.average.update(loss_sum, batch)
        return scale_loss(loss_sum, batch)

    def on_train_batch_end(self, outputs: object, batch: SequenceBatch, batch_idx: int) -> None:
        """Print the mean loss of the last steps, over all ranks."""
        if self.global_step % self.log_every == 0:
            (loss,) = self.average.compute()
            self.average.reset()
            self.print(f"step {self.global_step} | loss {loss:.4f} | epoch {batch.epoch}, sample {batch.position:,}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class BalancedData(lightning.LightningDataModule):
    """The balanced batches of this rank."""

    def __init__(self, path: Path, *, global_batch_size: int) -> None:
        super().__init__()
        self.path = path
        self.global_batch_size = global_batch_size

    def train_dataloader(self) -> Loader[SequenceBatch]:
        """Return the loader. Collective: every rank must call this, as Lightning does."""
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        if self.global_batch_size % world_size:
            raise ConfigError(f"{world_size} ranks do not divide --global-batch-size {self.global_batch_size}")
        config = LoaderConfig(batch_size=self.global_batch_size // world_size, max_history_length=200)
        balance = BalanceConfig(cost=COST)
        return build_loader(self.path, config, rank=rank, world_size=world_size, balance=balance)


def train(args: argparse.Namespace) -> None:
    """Train on this rank, from the last checkpoint if there is one."""
    num_items = read_manifest(args.data).vocabulary_sizes["item_id"]
    torch.manual_seed(0)
    checkpoints = ModelCheckpoint(
        dirpath=args.checkpoints, filename="last", every_n_train_steps=args.save_every, enable_version_counter=False
    )
    last = args.checkpoints / "last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=args.steps,
        callbacks=[checkpoints, ElasticResume()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    recommender = Recommender(num_items, log_every=args.log_every)
    data = BalancedData(args.data, global_batch_size=args.global_batch_size)
    trainer.fit(recommender, data, ckpt_path=last if last.exists() else None)


def quiet() -> None:
    """Hide Lightning's progress messages, and what it warns about its own code and about resuming."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")


def main() -> None:
    """Run this process as one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/synthetic"), help="written by `evenrank preprocess`")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/lightning-fit"), help="folder to resume from")
    parser.add_argument("--global-batch-size", type=int, default=32, help="samples of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=20)
    args = parser.parse_args()
    quiet()
    try:
        train(args)
        gc.collect()  # the Trainer refers to the process group, in cycles
        if dist.is_initialized():  # the Trainer leaves it open; its threads can abort the process's end
            dist.destroy_process_group()
    except EvenrankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
