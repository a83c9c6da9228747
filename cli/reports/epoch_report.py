"""The effect of balancing on one epoch, as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenrank.cli import console
from evenrank.cli.balance_walk import Walk
from evenrank.dataloader.balance.metrics import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_WORK, _IDLE, _LIMIT = "#3b6ea8", "#e8e3d9", "#c0392b"

EXPLANATION = """\
load      load of the heaviest rank over the lower bound, mean over steps; 1 is perfect
idle      share of the ranks' time spent waiting for the heaviest rank of each step
speed-up  expected by the cost model: heaviest loads before balancing / after
moved     share of samples trained on another rank than the one that loaded them
plan      median time to plan a step, in the background
"""


def load_table(walks: Sequence[Walk]) -> "Table":
    """Return a table with one row per strategy: loads before and after balancing, and how many samples move."""
    headers = ("strategy", "load\nbefore", "load\nafter", "worst\nafter", "idle\nbefore", "idle\nafter")
    table = console.new_table(*headers, "expected\nspeed-up", "moved", "plan\n(ms)", left=["strategy"], narrow=True)
    for walk in walks:
        summary = summarize(walk.metrics)
        table.add_row(
            walk.label,
            f"{summary.ratio_before:.3f}",
            f"{summary.ratio_after:.3f}",
            f"{summary.worst_after:.3f}",
            f"{_idle_share([step.before for step in walk.metrics]):.1%}",
            f"{_idle_share([step.after for step in walk.metrics]):.1%}",
            f"{summary.speedup:.2f}x",
            f"{summary.moved_samples if walk.has_exchange else 0:.0%}",
            f"{np.median([step.plan_seconds for step in walk.metrics] or [0.0]) * 1e3:.2f}",
        )
    return table


def _idle_share(loads: Sequence[NDArray[np.int64]]) -> float:
    """Return the share of all ranks' time that is spent waiting for the heaviest rank of each step."""
    elapsed = sum(int(step_loads.max()) * len(step_loads) for step_loads in loads)
    return 1 - sum(int(step_loads.sum()) for step_loads in loads) / elapsed if elapsed else 0.0


def draw_loads(walks: Sequence[Walk], path: Path, *, title: str) -> None:
    """Draw the load of each rank in a typical step per strategy, and the heaviest rank of every step; write a PNG."""
    from matplotlib.figure import Figure  # which training hosts need not have: they show tables only

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
        _draw_ranks(axes, walk.strategy, loads, highest)
        if column == 0:
            axes.set_ylabel(f"load of each rank in step {typical_step}\n(mean of the ranks = 1)")
    axes = figure.add_subplot(grid[1, :])
    for walk in walks:
        axes.plot([step.ratio_after for step in walk.metrics], label=walk.strategy, linewidth=1.3)
    axes.set_xlabel("step")
    axes.set_ylabel("heaviest rank / lower bound")
    axes.legend(frameon=False, ncols=len(walks), loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_ranks(axes: "Axes", strategy: str, loads: NDArray[np.float64], highest: float) -> None:
    ranks = np.arange(len(loads))
    axes.bar(ranks, np.full(len(ranks), loads.max()), color=_IDLE, label="waiting")
    axes.bar(ranks, loads, color=_WORK, label="work")
    axes.axhline(loads.max(), color=_LIMIT, linewidth=1.2)
    axes.set_title(f"{strategy}\nthe step takes {loads.max():.2f}", fontsize=11)
    axes.set_ylim(0, highest * 1.12)
    axes.set_xticks(ranks if len(ranks) <= 8 else ranks[:: len(ranks) // 4])
    axes.set_xlabel("rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
