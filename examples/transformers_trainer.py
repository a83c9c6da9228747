"""The Trainer of Hugging Face's Transformers with balanced batches, and a resume in the middle of an epoch.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/transformers_trainer.py --data out/synthetic --steps 80
    torchrun --nproc_per_node 4 examples/transformers_trainer.py --data out/synthetic

`BalancedTrainer` is the Trainer with evenrank's loader as its `train_dataset`. Its checkpoints have the position in the
data, so the second command resumes after step 80, within the epoch, and prints the loss of step 100 of a job that was
not stopped. The Trainer writes one file after the other, `trainer_state.json` last, so a job that is killed meanwhile
resumes from the checkpoint before, which `save_total_limit=2` keeps. On GPUs, leave `use_cpu=True` out.
"""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import read_manifest
from evenrank.training import scale_loss
from evenrank.training.trainers.transformers_trainer import BalancedTrainer
from next_item import COST, NextItem, run


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


def main(
    data: Path = Path("out/synthetic"),
    checkpoints: Path = Path("out/transformers"),
    global_batch_size: int = 32,
    accumulate: int = 1,
    steps: int = 100,
    save_every: int = 40,
    log_every: int = 20,
) -> None:
    """Train from the last checkpoint, if there is one; run it under torchrun. Of `accumulate` batches, one step."""
    num_items = read_manifest(data).vocabulary_sizes["item_id"]
    args = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        gradient_accumulation_steps=accumulate,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0,  # no clipping
        logging_steps=log_every,
        save_steps=save_every,
        save_total_limit=2,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
        log_level="error",  # and no warning that other ranks have other batch sizes
        log_level_replica="error",
    )
    rank, world_size = args.process_index, args.world_size
    if global_batch_size % world_size:
        raise ConfigError(f"{world_size} ranks do not divide --global-batch-size {global_batch_size}")
    args.per_device_train_batch_size = global_batch_size // world_size
    config = LoaderConfig(batch_size=args.per_device_train_batch_size, max_history_length=200)
    loader = build_loader(data, config, rank=rank, world_size=world_size, balance=BalanceConfig(cost=COST))

    set_seed(0)
    trainer = RecommenderTrainer(NextItem(num_items), args, train_dataset=loader, callbacks=[PrintLoss()])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=newest(checkpoints))


if __name__ == "__main__":
    run(main)
