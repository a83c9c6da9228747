"""The whole pipeline offline: synthetic data -> Parquet -> balanced batches on several processes, a table, a plot."""

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.cli import console
from evenrank.cli.inspect_balance import walk_epoch
from evenrank.cli.options import BATCH_SIZE, STRATEGIES, CostOptions, make_cost
from evenrank.cli.reports.gains import Gain, describe_settings, print_gains

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_RANKS = 4
_COLORS, _IDLE = ("#d9534f", "#d98a1f", "#4a8fdc", "#2f9e6a"), "#9aa0a855"
# Of plots on a page that is light or dark: no background, and text that is readable on both.
_TEXT = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE: dict[Any, Any] = dict.fromkeys(_TEXT, "#777e88") | {"font.size": 11, "legend.frameon": False}
# Strategies, and whether samples are exchanged.
_WAYS = [*((strategy, True) for strategy in STRATEGIES), ("lpt-swap", False)]
# What the ranks need of torch, which takes seconds to import: imported once, in the process that they are forked from.
_RANK_MODULES = [
    "evenrank.dataloader.loader",
    "evenrank.dataloader.batches.padding",
    "evenrank.dataloader.balance.balancer",
]


def demo_command(
    out: Annotated[
        Path,
        typer.Option(help="Folder for the data and the plot; data of an earlier run is replaced.", metavar="FOLDER"),
    ] = Path("out/demo"),
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
        gains = _walk_on_ranks(pool, data)
    plot = out / "balance.png"
    with console.stages() as on_stage:
        on_stage("drawing")
        title = f"{_NUM_RANKS} ranks, {BATCH_SIZE} samples each\nlognormal histories, cost of an HSTU model"
        draw_loads([gain for gain in gains if gain.has_exchange], plot, title=title)
    marks = {"*": "no exchange: every rank plans from the lengths and reads the samples that it trains on"}
    print_gains(gains, marks=marks)
    console.print_result(f"every strategy: {gains[0].num_samples:,} samples, each seen exactly once and unaltered")
    console.print_result(f"plot: {plot}")


def _compile(strategy: str) -> None:
    """Compile the loops of a strategy, for all ranks, while the data are made."""
    from evenrank.dataloader.balance.partition.strategies import warm_up

    warm_up(strategy)


def _walk_on_ranks(pool: ProcessPoolExecutor, data: Path) -> list[Gain]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [pool.submit(_rank_main, rank, data, f"file://{folder}/store") for rank in range(_NUM_RANKS)]
        for rank in as_completed(ranks):
            rank.result()  # raises the first error, not one that follows from it on another rank
        return ranks[0].result()


def _rank_main(rank: int, data: Path, store: str) -> list[Gain]:
    """Walk one epoch in each way; return the gains on rank 0, as the metrics are the same on all."""
    import torch
    import torch.distributed as dist

    from evenrank.dataloader import LoaderConfig
    from evenrank.dataloader.balance import BalanceConfig

    torch.set_num_threads(1)  # the ranks share the machine
    config, cost = LoaderConfig(batch_size=BATCH_SIZE), make_cost(CostOptions())
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_NUM_RANKS, timeout=timedelta(minutes=5))
    try:
        gains = []
        for strategy, has_exchange in _WAYS:
            balance = BalanceConfig(cost=cost, strategy=strategy)
            gains.append(walk_epoch(data, config, balance, has_exchange=has_exchange, show_progress=rank == 0))
    finally:
        dist.destroy_process_group()
    return gains if rank == 0 else []


def draw_loads(gains: Sequence[Gain], path: Path, *, title: str) -> "Figure":
    """Write a PNG with the load of each rank in a typical step per strategy, and the idle time of every step, sorted.

    Idle times are on a logarithmic scale, because those of balanced steps differ by orders of magnitude.
    """
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    before = [step.ratio_before for step in gains[0].steps]
    typical_step = int(np.argsort(before, kind="stable")[len(before) // 2])  # with the median imbalance
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 6.2), layout="constrained")  # readable where 360 pixels are all there is
        figure.suptitle(title, fontsize=12)
        of_a_step, of_all = figure.subplots(2, height_ratios=(1.25, 1))
        for axes in (of_a_step, of_all):
            axes.spines[["top", "right"]].set_visible(False)
        for row, (gain, color) in enumerate(zip(gains, _COLORS, strict=False)):
            loads = gain.steps[typical_step].after
            relative = loads / max(float(loads.mean()), 1.0)
            heaviest = float(relative.max())
            bars = row + 0.8 * (np.arange(len(loads)) / len(loads) - 0.5)
            of_a_step.barh(bars, heaviest, 0.6 / len(loads), align="edge", color=_IDLE)
            of_a_step.barh(bars, relative, 0.6 / len(loads), align="edge", color=color)
            of_a_step.text(heaviest, row, f"  idle {1 - 1 / heaviest:.2%}", va="center")
            idle = sorted(100 * (1 - step.after.mean() / max(step.after.max(), 1)) for step in gain.steps)
            label = f"{gain.label}: {gain.summary.idle_after:.2%}"
            of_all.plot(np.linspace(0, 100, len(idle)), idle, color=color, label=label)
        of_a_step.set(
            xlim=(0, 1.4 * before[typical_step]), xlabel=f"load of each rank in step {typical_step} (mean = 1)"
        )
        of_a_step.set_yticks(range(len(gains)), [gain.label for gain in gains])
        of_a_step.invert_yaxis()
        of_all.set_yscale("symlog", linthresh=0.01)
        of_all.yaxis.set_major_formatter("{x:g} %")
        of_all.set(ylabel="idle rank time", ylim=(0, 100), xlabel="steps (%), from the most even to the least")
        figure.legend(title="idle in all steps together", loc="outside lower center", ncols=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, transparent=True)
    return figure
