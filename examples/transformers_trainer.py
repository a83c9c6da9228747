"""The Trainer of Hugging Face's Transformers with balanced batches, and a resume in the middle of an epoch.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/transformers_trainer.py --data out/synthetic --steps 80
    torchrun --nproc_per_node 4 examples/transformers_trainer.py --data out/synthetic

`BalancedTrainer` is the Trainer with evenrank's loader as its `train_dataset`. Its checkpoints have the position in the
data, so the second command resumes after step 80, within the epoch, and prints the loss of step 100 of a job that was
not stopped. The Trainer writes one file after the other, `trainer_state.json` last, so a job that is killed meanwhile
resumes from the checkpoint before, which `save_total_limit=2` keeps.

On GPUs, leave `use_cpu=True` out.
"""

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed

from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import read_manifest
from evenrank.training import scale_loss
from evenrank.training.trainers.transformers_trainer import BalancedTrainer
from next_item import COST, NextItem


class RecommenderTrainer(BalancedTrainer):
    """The Trainer, and how the loss of a batch is computed."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> Tensor:
        """Return the loss of this rank, of which DDP averages the gradients."""
        batch = inputs["batch"]
        return scale_loss(model(batch), batch)


class PrintLoss(TrainerCallback):  # type: ignore[misc]
    """Prints what the Trainer logs: the mean loss of the last steps, over all ranks."""

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Say where training resumes."""
        if state.global_step and state.is_world_process_zero:
            print(f"resumed after step {state.global_step} on {args.world_size} ranks", flush=True)

    def on_log(self, args: TrainingArguments, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Print a line."""
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step} | loss {logs['loss']:.4f} | epoch {state.epoch:.2f}", flush=True)


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of the last step that is complete, None if there is none."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(complete, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)


def train(options: argparse.Namespace) -> None:
    """Train on this rank, from the last checkpoint if there is one."""
    num_items = read_manifest(options.data).vocabulary_sizes["item_id"]
    args = TrainingArguments(
        output_dir=str(options.checkpoints),
        max_steps=options.steps,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0,  # no clipping
        logging_steps=options.log_every,
        save_steps=options.save_every,
        save_total_limit=2,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
        log_level="error",  # and no warning that other ranks have other batch sizes
        log_level_replica="error",
    )
    rank, world_size = args.process_index, args.world_size
    if options.global_batch_size % world_size:
        raise ConfigError(f"{world_size} ranks do not divide --global-batch-size {options.global_batch_size}")
    args.per_device_train_batch_size = options.global_batch_size // world_size
    config = LoaderConfig(batch_size=args.per_device_train_batch_size, max_history_length=200)
    loader = build_loader(options.data, config, rank=rank, world_size=world_size, balance=BalanceConfig(cost=COST))

    set_seed(0)
    trainer = RecommenderTrainer(NextItem(num_items), args, train_dataset=loader, callbacks=[PrintLoss()])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=newest(options.checkpoints))


def main() -> None:
    """Run this process as one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/synthetic"), help="written by `evenrank preprocess`")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/transformers"), help="folder to resume from")
    parser.add_argument("--global-batch-size", type=int, default=32, help="samples of a batch, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an optimizer step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=20)
    options = parser.parse_args()
    try:
        train(options)
        gc.collect()  # the Trainer refers to the process group, in cycles
        if dist.is_initialized():  # the Trainer leaves it open; its threads can abort the process's end
            dist.destroy_process_group()
    except EvenrankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
