"""`scripts/inspect_balance.py`: an epoch of a dataset through the Balancer, under torchrun."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from evenrank.cli import console
from evenrank.cli.balance_walk import walk_epoch
from evenrank.cli.reports.epoch_report import EXPLANATION, load_table
from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import STRATEGIES, HSTUCost


def inspect_balance_command(
    path: Annotated[Path, typer.Argument(help="Folder that `evenrank preprocess` wrote.", show_default=False)],
    split: Annotated[str, typer.Option(help="Which split.")] = "train",
    batch_size: Annotated[int, typer.Option(help="Samples of a rank in a step.")] = 32,
    max_history_length: Annotated[int, typer.Option(help="Events; longer histories keep their newest.")] = 2048,
    max_num_candidates: Annotated[int, typer.Option(help="The last events of each user are candidates.")] = 1,
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")] = "lpt-swap",
    hidden: Annotated[int, typer.Option(help="Width of the HSTU layers whose cost is balanced.")] = 1024,
    heads: Annotated[int, typer.Option(help="Their heads, of width hidden / heads each.")] = 4,
) -> None:
    """Walk one epoch through the Balancer; run it under torchrun.

    Prints the heaviest rank's load before and after, and checks that each sample was seen exactly once, unaltered:

    \b
        torchrun --nproc_per_node 4 scripts/inspect_balance.py out/ml-20m
    """
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError("run it under torchrun, which starts the ranks: torchrun --nproc_per_node 4 " + __file__)
    if heads < 1 or hidden % heads:
        raise ConfigError(f"hidden must be a multiple of heads, got {hidden} and {heads}")
    cost = HSTUCost(hidden=hidden, heads=heads, head_dim=hidden // heads, layers=8)
    config = LoaderConfig(
        batch_size=batch_size,
        split=split,
        max_history_length=max_history_length,
        max_num_candidates=max_num_candidates,
    )
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        walk = walk_epoch(path, config, cost=cost, strategy=strategy, show_progress=dist.get_rank() == 0)
        if dist.get_rank() == 0:
            console.stdout.print(load_table([walk]))
            console.stdout.print(EXPLANATION)
            console.stdout.print(
                f"{walk.samples:,} samples in {len(walk.metrics):,} steps on {dist.get_world_size()} ranks: each seen "
                "exactly once and unaltered"
            )
    finally:
        dist.destroy_process_group()
