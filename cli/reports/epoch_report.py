"""What balancing did, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from rich import box
from rich.table import Table

from evenrank.cli.balance_walk import Walk
from evenrank.dataloader.balance import StepMetrics, summarize

mpl.use("agg")  # files only; no window, no display needed
import matplotlib.pyplot as plt

_WORK, _IDLE, _LIMIT = "#3b6ea8", "#e8e3d9", "#c0392b"


def load_table(walks: Sequence[Walk]) -> Table:
    """One row per strategy: the heaviest rank's load before and after, and what it costs to move there."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits into 80 columns
    table.add_column("strategy", no_wrap=True)
    for name in (
        "load\nbefore",
        "load\nafter",
        "worst\nafter",
        "idle\nbefore",
        "idle\nafter",
        "expected\nspeed-up",
        "moved",
        "plan\n(ms)",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for walk in walks:
        summary = summarize(walk.metrics)
        table.add_row(
            walk.strategy,
            f"{summary.ratio_before:.3f}",
            f"{summary.ratio_after:.3f}",
            f"{summary.worst_after:.3f}",
            f"{_idle([step.before for step in walk.metrics]):.1%}",
            f"{_idle([step.after for step in walk.metrics]):.1%}",
            f"{summary.speedup:.2f}x",
            f"{summary.moved_samples:.0%}",
            f"{np.median([step.plan_seconds for step in walk.metrics] or [0.0]) * 1e3:.2f}",
        )
    return table


EXPLANATION = """\
load      the heaviest rank's cost over the lower bound, mean over steps; 1 is perfect
idle      part of the ranks' time that is spent waiting for each step's heaviest rank
speed-up  what the cost model expects: heaviest loads before to heaviest loads after
moved     samples that are trained on another rank than the one that loaded them
plan      median time to plan a step, in the background
"""


def _idle(loads: Sequence[np.ndarray]) -> float:
    """Return the part of all ranks' time that is spent waiting for each step's heaviest rank."""
    needed = sum(int(load.max()) * len(load) for load in loads)
    return 1 - sum(int(load.sum()) for load in loads) / needed if needed else 0.0


def draw_loads(walks: Sequence[Walk], path: Path, *, title: str) -> None:
    """Draw each rank's load in one typical step per strategy, and every step's heaviest rank; write a PNG."""
    figure = plt.figure(figsize=(10, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, len(walks), height_ratios=(1.25, 1))
    figure.suptitle(title, fontsize=13)
    shown = _typical_step(walks[0].metrics)
    highest = max(walk.metrics[shown].after.max() / walk.metrics[shown].after.mean() for walk in walks)
    for column, walk in enumerate(walks):
        axes = figure.add_subplot(grid[0, column])
        _draw_ranks(axes, walk, shown, highest)
        if column == 0:
            axes.set_ylabel(f"load of each rank in step {shown}\n(mean of the ranks = 1)")
    axes = figure.add_subplot(grid[1, :])
    for walk in walks:
        axes.plot([step.ratio_after for step in walk.metrics], label=walk.strategy, linewidth=1.3)
    axes.set_xlabel("step")
    axes.set_ylabel("heaviest rank\n(lower bound = 1)")
    axes.legend(frameon=False, ncols=len(walks), loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ranks(axes: Axes, walk: Walk, step: int, highest: float) -> None:
    load = walk.metrics[step].after
    relative = load / max(float(load.mean()), 1.0)
    ranks = np.arange(len(relative))
    axes.bar(ranks, np.full(len(ranks), relative.max()), color=_IDLE, label="waiting")
    axes.bar(ranks, relative, color=_WORK, label="work")
    axes.axhline(relative.max(), color=_LIMIT, linewidth=1.2)
    axes.set_title(f"{walk.strategy}\nthe step takes {relative.max():.2f}", fontsize=11)
    axes.set_ylim(0, highest * 1.12)
    axes.set_xticks(ranks if len(ranks) <= 8 else ranks[:: len(ranks) // 4])
    axes.set_xlabel("rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def _typical_step(metrics: Sequence[StepMetrics]) -> int:
    """Return the step whose imbalance before is the median, so that the picture neither flatters nor frightens."""
    return int(np.argsort([step.ratio_before for step in metrics], kind="stable")[len(metrics) // 2])
