"""`evenrank inspect-balance`: iterate over one epoch of a dataset through the Balancer, under torchrun."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from evenrank.cli import console
from evenrank.cli.options import STRATEGIES, make_cost
from evenrank.core.errors import ConfigError


def inspect_balance_command(
    path: Annotated[
        Path, typer.Argument(help="Folder written by `evenrank preprocess`.", metavar="PATH", show_default=False)
    ],
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 32,
    max_history_length: Annotated[
        int, typer.Option(help="Events per sample; longer histories are cut to their newest events.")
    ] = 2048,
    max_num_candidates: Annotated[int, typer.Option(help="How many of each user's last events are candidates.")] = 1,
    strategy: Annotated[str, typer.Option(help=f"Balancing strategy: one of {', '.join(STRATEGIES)}.")] = "lpt-swap",
    hidden: Annotated[int, typer.Option(help="Width of the HSTU layers whose cost is balanced.")] = 1024,
    heads: Annotated[int, typer.Option(help="Attention heads per layer, each hidden / heads wide.")] = 4,
) -> None:
    """Iterate over one epoch through the Balancer; run it under torchrun.

    Prints the load of the heaviest rank before and after balancing, and checks that each sample was seen exactly once
    and unaltered. Example:

    \b
        torchrun --nproc_per_node 4 -m evenrank inspect-balance out/ml-20m
    """
    # Some schedulers set WORLD_SIZE too, but not the others.
    if missing := [name for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"{missing[0]} is not set, because torchrun has not started this process; run "
            f"torchrun --nproc_per_node 4 -m evenrank inspect-balance {path}"
        )

    cost = make_cost(None, hidden=hidden, heads=heads, layers=8)
    with console.stages(shown=os.environ["RANK"] == "0") as on_stage:
        on_stage("importing torch")
        import torch.distributed as dist

        from evenrank.cli.balance_walk import walk_epoch
        from evenrank.cli.reports.epoch_report import EXPLANATION, load_table
        from evenrank.dataloader import LoaderConfig
        from evenrank.dataloader.balance import BalanceConfig

        config = LoaderConfig(
            batch_size=batch_size,
            split=split,
            max_history_length=max_history_length,
            max_num_candidates=max_num_candidates,
        )
        on_stage("waiting for the other ranks")
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        is_first = dist.get_rank() == 0
        walk = walk_epoch(path, config, BalanceConfig(cost=cost, strategy=strategy), show_progress=is_first)
        if is_first:
            console.print_result(load_table([walk]))
            console.print_result(EXPLANATION)
            console.print_result(
                f"{walk.num_samples:,} samples in {len(walk.metrics):,} steps on {dist.get_world_size()} ranks: each "
                "seen exactly once and unaltered"
            )
    finally:
        dist.destroy_process_group()
