"""Train an example model on balanced batches; see examples/trainer.

torchrun --nproc_per_node 4 scripts/train.py --data out/ml-20m --positive-action 7
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from evenrank.cli import console
from evenrank.cli.main import run_command
from evenrank.cli.settings_options import chosen, command_of, config_option, options_of
from evenrank.core.errors import EvenrankError
from trainer import TrainConfig

OPTIONS = options_of(TrainConfig)
IS_FIRST = os.environ.get("RANK", "0") == "0"  # which torchrun sets


@contextlib.contextmanager
def _on_first_rank() -> Iterator[None]:
    """Let the first rank alone show an error: all have the same, or a RankError with that of another one."""
    try:
        yield
    except EvenrankError:
        if IS_FIRST:
            raise
        raise typer.Exit(2) from None


_FILE = config_option(OPTIONS, "TOML file with settings, under the names of these options; options override it.")
_FILE.callback = _on_first_rank()(_FILE.callback)


@command_of(OPTIONS)
@_on_first_rank()
def train(ctx: typer.Context, config_file: Annotated[Path | None, _FILE] = None) -> None:
    """Train an example model on balanced batches, evaluate it, and save checkpoints; run it under torchrun.

    Without --data it trains on synthetic data. It resumes from the checkpoints of --out, on any number of ranks; on
    SIGINT and SIGTERM it saves one and ends. Examples:

    \b
        python scripts/train.py
        torchrun --nproc_per_node 2 scripts/train.py --config examples/trainer/configs/ml-20m.toml
        torchrun --nproc_per_node 4 scripts/train.py --data out/kuairand-1k --num-tasks 8 --balance none
    """
    config = chosen(TrainConfig, ctx, OPTIONS)
    with console.stages(shown=IS_FIRST) as on_stage:
        on_stage("importing torch")  # here, because `--help` does not need it
        from trainer import run_job

    run_job(config)


if __name__ == "__main__":
    run_command(train)
