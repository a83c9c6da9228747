"""The whole pipeline offline: synthetic data -> Parquet -> balanced batches on several processes, a table, a plot."""

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Annotated

import typer

from evenrank.cli import console
from evenrank.cli.balance_walk import Walk, walk_epoch
from evenrank.cli.options import STRATEGIES

_NUM_RANKS = 4
_BATCH_SIZE = 32  # per rank
# Strategies, and whether samples are exchanged.
_WAYS = [*((strategy, True) for strategy in STRATEGIES), ("lpt-swap", False)]
# What the ranks need of torch, which takes seconds to import: imported once, in the process that they are forked from.
_RANK_MODULES = [
    "evenrank.dataloader.loader",
    "evenrank.dataloader.batches.padding",
    "evenrank.dataloader.balance.balancer",
]


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the data and the plot; data of an earlier run is replaced.")] = (
        Path("out/demo")
    ),
) -> None:
    """Run the whole pipeline offline: synthetic data, balanced batches on 4 processes, a table and a plot.

    It needs no GPU and takes about a minute. Example:

    \b
        evenrank demo
    """
    data = out / "data"
    console.print_result(f"synthetic logs -> {data}")
    # Started here, so that it imports torch while this process preprocesses.
    forkserver.set_forkserver_preload(_RANK_MODULES)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(_NUM_RANKS, mp_context=context) as pool:
        compiled = [pool.submit(_compile, strategy) for strategy in STRATEGIES]
        with console.stages() as on_stage:
            on_stage("importing Polars")
            from evenrank.preprocess import PreprocessConfig, preprocess

            manifest = preprocess(PreprocessConfig(dataset="synthetic", out=data), on_stage=on_stage)
        train = manifest.splits["train"]
        console.print_result(
            f"{data}: {train.rows:,} users, {train.interactions:,} interactions; median history length "
            f"{train.lengths['p50']:,}, longest {train.lengths['max']:,}"
        )
        console.print_result(f"one epoch on {_NUM_RANKS} processes (Gloo, CPU), batches of {_BATCH_SIZE}:")
        with console.stages() as on_stage:
            on_stage(f"starting {_NUM_RANKS} processes")
            for process in compiled:
                process.result()
        walks = _walk_on_ranks(pool, data)
    plot = out / "balance.png"
    with console.stages() as on_stage:
        on_stage("drawing")
        from evenrank.cli.reports.epoch_report import EXPLANATION, draw_loads, load_table

        title = f"{_NUM_RANKS} ranks, {_BATCH_SIZE} samples each, lognormal histories, cost of an HSTU model"
        draw_loads([walk for walk in walks if walk.has_exchange], plot, title=title)
    console.print_result(load_table(walks))
    console.print_result(
        EXPLANATION + "*         no exchange: every rank plans all steps from lengths, and reads what it trains\n"
    )
    console.print_result(f"every strategy: {walks[0].num_samples:,} samples, each seen exactly once and unaltered")
    console.print_result(f"plot: {plot}")


def _compile(strategy: str) -> None:
    """Compile the loops of a strategy, for all ranks, while the data are made."""
    from evenrank.dataloader.balance.warmup import warm_up

    warm_up(strategy)


def _walk_on_ranks(pool: ProcessPoolExecutor, data: Path) -> list[Walk]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [pool.submit(_rank_main, rank, data, f"file://{folder}/store") for rank in range(_NUM_RANKS)]
        for rank in as_completed(ranks):
            rank.result()  # raises the first error, not one that follows from it on another rank
        return ranks[0].result()


def _rank_main(rank: int, data: Path, store: str) -> list[Walk]:
    """Walk one epoch in each way; return the walks on rank 0, as the metrics are the same on all."""
    import torch
    import torch.distributed as dist

    from evenrank.dataloader import LoaderConfig
    from evenrank.dataloader.balance import BalanceConfig, HSTUCost

    torch.set_num_threads(1)  # the ranks share the machine
    config = LoaderConfig(batch_size=_BATCH_SIZE, max_history_length=2048, max_num_candidates=1)
    # The model of the published balancing results: 8 layers, width 1024, 4 heads of 256.
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=True, contextual=("segment",))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_NUM_RANKS, timeout=timedelta(minutes=5))
    try:
        walks = []
        for strategy, has_exchange in _WAYS:
            balance = BalanceConfig(cost=cost, strategy=strategy)
            walks.append(walk_epoch(data, config, balance, has_exchange=has_exchange, show_progress=rank == 0))
    finally:
        dist.destroy_process_group()
    return walks if rank == 0 else []
