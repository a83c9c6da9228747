"""The whole pipeline offline: synthetic data -> Parquet -> balanced batches on several processes, a table, a plot."""

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Annotated

import typer

from evenrank.cli import console
from evenrank.cli.gains import describe_settings, print_gains
from evenrank.cli.inspect_balance import Walk, walk_epoch
from evenrank.cli.options import BATCH_SIZE, LAYERS, STRATEGIES, make_cost

_NUM_RANKS = 4
_WORK, _IDLE, _LIMIT = "#3b6ea8", "#e8e3d9", "#c0392b"
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
        console.print_result(f"one epoch on {_NUM_RANKS} processes (Gloo, CPU), {describe_settings()}:")
        with console.stages() as on_stage:
            on_stage(f"starting {_NUM_RANKS} processes")
            for process in compiled:
                process.result()
        walks = _walk_on_ranks(pool, data)
    plot = out / "balance.png"
    with console.stages() as on_stage:
        on_stage("drawing")
        title = f"{_NUM_RANKS} ranks, {BATCH_SIZE} samples each, lognormal histories, cost of an HSTU model"
        draw_loads([walk for walk in walks if walk.has_exchange], plot, title=title)
    note = "*           no exchange: every rank plans from lengths, and reads what it trains on"
    print_gains([walk.gain(_NUM_RANKS) for walk in walks], note)
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
    from evenrank.dataloader.balance import BalanceConfig

    torch.set_num_threads(1)  # the ranks share the machine
    config, cost = LoaderConfig(batch_size=BATCH_SIZE), make_cost("hstu", LAYERS)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_NUM_RANKS, timeout=timedelta(minutes=5))
    try:
        walks = []
        for strategy, has_exchange in _WAYS:
            balance = BalanceConfig(cost=cost, strategy=strategy)
            walks.append(walk_epoch(data, config, balance, has_exchange=has_exchange, show_progress=rank == 0))
    finally:
        dist.destroy_process_group()
    return walks if rank == 0 else []


def draw_loads(walks: Sequence[Walk], path: Path, *, title: str) -> None:
    """Draw the load of each rank in a typical step per strategy, and the idle time of every step; write a PNG."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, len(walks), height_ratios=(1.25, 1))
    figure.suptitle(title, fontsize=13)
    before = [step.ratio_before for step in walks[0].metrics]
    typical_step = int(np.argsort(before, kind="stable")[len(before) // 2])  # with the median imbalance
    loads_after = [walk.metrics[typical_step].after for walk in walks]
    relative_loads = [loads / max(float(loads.mean()), 1.0) for loads in loads_after]
    highest = max(float(loads.max()) for loads in relative_loads)
    for column, (walk, loads) in enumerate(zip(walks, relative_loads, strict=True)):
        axes = figure.add_subplot(grid[0, column])
        ranks, heaviest = range(len(loads)), loads.max()
        axes.bar(ranks, heaviest, color=_IDLE, label="waiting")
        axes.bar(ranks, loads, color=_WORK, label="work")
        axes.axhline(heaviest, color=_LIMIT, linewidth=1.2)
        axes.set_title(f"{walk.strategy}\nthe step takes {heaviest:.2f}", fontsize=11)
        axes.set(xlabel="rank", ylim=(0, highest * 1.12))
        axes.set_xticks(ranks if len(ranks) <= 8 else ranks[:: len(ranks) // 4])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
        if column == 0:
            axes.set_ylabel(f"load of each rank in step {typical_step}\n(mean of the ranks = 1)")
    axes = figure.add_subplot(grid[1, :])
    for walk in walks:
        idle = [100 * (1 - step.after.mean() / max(step.after.max(), 1)) for step in walk.metrics]
        axes.plot(idle, label=walk.strategy, linewidth=1.3)
    axes.set(xlabel="step", ylabel="idle rank time (%)")
    axes.legend(frameon=False, ncols=len(walks), loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
