"""Train an example model on balanced batches; see examples/trainer.

torchrun --nproc_per_node 4 scripts/train.py --data out/ml-20m --positive-action 7
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from evenrank.cli import console
from evenrank.cli.main import run_command
from trainer.command import command_of
from trainer.config import TrainConfig


def train(config: TrainConfig) -> None:
    """Train an example model on balanced batches, evaluate it, and save checkpoints; run it under torchrun.

    Without --data it trains on synthetic data. It resumes from the checkpoints of --out, on any number of ranks; on
    SIGINT and SIGTERM it saves one and ends. Examples:

    \b
        python scripts/train.py
        torchrun --nproc_per_node 2 scripts/train.py --config examples/trainer/configs/ml-20m.toml
        torchrun --nproc_per_node 4 scripts/train.py --data out/kuairand-1k --num-tasks 8 --balance none
    """
    # Imported here, because `--help` does not need torch. Outside torchrun there is no RANK.
    with console.stages(shown=os.environ.get("RANK", "0") == "0") as on_stage:
        on_stage("importing torch")
        from trainer.job import run_job

    run_job(config)


if __name__ == "__main__":
    run_command(command_of(train))
