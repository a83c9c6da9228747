"""Lightning with balanced batches: strategy "ddp", and a resume in the middle of an epoch.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/lightning_fit.py --data out/synthetic

Lightning saves the position in the data along with model and optimizer, because the loader has `state_dict`. Run the
same command again: it resumes from the last checkpoint, which is that of step 80 of 100, and prints the same loss for
step 100. Without the callback `ElasticResume`, Lightning would lose batches; with it, the job resumes with any other
--nproc_per_node that divides 32, the global batch size.

Create the loader in `train_dataloader`: before `fit` there is no process group through which ranks could compare their
loaders. On GPUs, pass the Trainer `accelerator="gpu"`; it moves the batches.
"""

import logging
import os
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, scale_loss
from evenrank.training.trainers.lightning_callback import ElasticResume
from next_item import COST, NextItem, run


class Recommender(lightning.LightningModule):
    """The model, its loss, its optimizer, and the balanced batches of this rank."""

    def __init__(self, data: Path, *, global_batch_size: int, log_every: int) -> None:
        super().__init__()
        self.model = NextItem(read_manifest(data).vocabulary_sizes["item_id"])
        self.data, self.global_batch_size, self.log_every = data, global_batch_size, log_every

    def train_dataloader(self) -> Loader[SequenceBatch]:
        """Return the loader. Collective: every rank must call this, as Lightning does."""
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        if self.global_batch_size % world_size:
            raise ConfigError(f"{world_size} ranks do not divide --global-batch-size {self.global_batch_size}")
        config = LoaderConfig(batch_size=self.global_batch_size // world_size, max_history_length=200)
        return build_loader(self.data, config, rank=rank, world_size=world_size, balance=BalanceConfig(cost=COST))

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


def main(
    data: Path = Path("out/synthetic"),
    checkpoints: Path = Path("out/lightning-fit"),
    global_batch_size: int = 32,
    steps: int = 100,
    save_every: int = 40,
    log_every: int = 20,
) -> None:
    """Train from the last checkpoint, if there is one; run it under torchrun."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no progress messages
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)  # in its own code
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    torch.manual_seed(0)
    recommender = Recommender(data, global_batch_size=global_batch_size, log_every=log_every)
    saving = ModelCheckpoint(checkpoints, "last", every_n_train_steps=save_every, enable_version_counter=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=steps,
        callbacks=[saving, ElasticResume()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = checkpoints / "last.ckpt"
    trainer.fit(recommender, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    run(main)
