"""Heat maps of a sweep: batch sizes by lengths, coloured by MFU, with the TFLOP/s in each cell."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

from attention_bench.sweep import BACKWARD, BOTH, FORWARD, Sweep
from evenrank.cli.reports import svg

STYLE: Any = {**svg.STYLE, "axes.grid": False, "figure.facecolor": "white", "figure.dpi": 150, "hatch.linewidth": 0.6}
_TITLES = {FORWARD: "forward", BACKWARD: "backward", BOTH: "forward and backward"}
_DARK = 0.55  # of the colour scale, below which white text is readable


@mpl.rc_context(STYLE)
def heat_map(sweep: Sweep, direction: str) -> Figure:
    """Draw one direction; cells that do not fit into memory are hatched."""
    speeds = [[sweep.speed(batch, length, direction) for length in sweep.lengths] for batch in sweep.batch_sizes]
    mfu = np.array([[speed.mfu if speed else np.nan for speed in row] for row in speeds])
    highest = float(np.nanmax(mfu)) if np.isfinite(mfu).any() else 1.0
    figure = Figure(figsize=(8.2, 1.8 + 0.42 * len(speeds)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(mfu, cmap="viridis", vmin=0, vmax=highest, aspect="auto")
    figure.colorbar(image, label="MFU", format=PercentFormatter(1))
    for place, row in enumerate(speeds):
        for column, speed in enumerate(row):
            if speed is None:
                corner = (column - 0.5, place - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor=svg.GREY, hatch="///", linewidth=0))
                continue
            colour = "white" if speed.mfu < _DARK * highest else svg.INK
            digits = 0 if speed.tflops >= 100 else 1 if speed.tflops >= 10 else 2
            axes.text(column, place, f"{speed.tflops:.{digits}f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(sweep.lengths)), [f"{length:,}" for length in sweep.lengths])
    axes.set_yticks(range(len(sweep.batch_sizes)), [f"{batch:,}" for batch in sweep.batch_sizes])
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")
    axes.set_title(
        f"TFLOP/s of attention {sweep.attention!r}, {_TITLES[direction]}\n"
        f"{sweep.heads} heads of {sweep.head_dim}, {sweep.dtype}, {sweep.device}",
        loc="left",
        fontsize="medium",
    )
    if np.isnan(mfu).any():
        handle = Patch(facecolor="white", edgecolor=svg.GREY, hatch="///", label="out of memory")
        figure.legend(handles=[handle], loc="outside lower right")
    return figure
