"""Plot of simulated and measured scaling."""

import math
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from end_to_end.scaling import Scaling
from evenrank.cli.reports import svg
from rendering.figures import STYLE, WIDTH

# By strategy, the best last: lines that coincide are seen below one another.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": svg.GREY, "linewidth": 1.4},
    {"color": svg.RED, "linewidth": 1.4},
    {"color": svg.BLUE, "linewidth": 3.0},
    {"color": svg.INK, "linewidth": 1.4, "linestyle": "--", "zorder": 3},
    {"color": svg.ORANGE, "linewidth": 6.0, "alpha": 0.35, "zorder": 1},
)


@mpl.rc_context(STYLE)
def draw(scaling: Scaling) -> Figure:
    """Draw speed-up and efficiency over ranks, predicted as lines and measured as circles."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    figure.suptitle(f"Predicted (lines) and measured (circles): {scaling.lengths}")
    speedups, efficiencies = figure.subplots(1, 2)
    ranks = sorted({point.ranks for point in scaling.points})
    strategies = dict.fromkeys(point.strategy for point in scaling.points)
    for strategy, style in zip(strategies, _STYLES, strict=True):
        points = [scaling.find(number, strategy) for number in ranks]
        for axes, quantity in ((speedups, scaling.speedup), (efficiencies, scaling.efficiency)):
            axes.plot(ranks, [quantity(point) for point in points], label=strategy, **style)
            measured = [quantity(point, measured=True) for point in points]
            shown = [math.nan if value is None else value for value in measured]
            axes.plot(ranks, shown, "o", color=style["color"], markersize=6, fillstyle="none")
    speedups.set_ylabel("speed-up over unbalanced steps")
    efficiencies.set_ylabel("tokens/s of each GPU, relative to one GPU")
    efficiencies.yaxis.set_major_formatter(PercentFormatter(1.0))
    efficiencies.set_ylim(bottom=0)
    for axes in (speedups, efficiencies):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ranks[:: 1 + len(ranks) // 8]))  # for labels to stay apart
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("ranks")
    figure.legend(*speedups.get_legend_handles_labels(), loc="outside lower center", ncols=len(strategies))
    return figure
