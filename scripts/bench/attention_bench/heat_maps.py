"""Heat maps of a sweep: batch sizes by lengths, coloured by MFU, with TFLOP/s and milliseconds in each cell."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

from attention_bench.sweep import BACKWARD, BOTH, FORWARD, Sweep
from evenrank.cli.reports import html_page
from rendering.figures import STYLE, WIDTH

_STYLE: Any = {**STYLE, "axes.grid": False, "hatch.linewidth": 0.6}
_TITLES = {FORWARD: "forward", BACKWARD: "backward", BOTH: "forward and backward"}
_DARK = 0.55  # of the colour scale, below which white text is readable


@mpl.rc_context(_STYLE)
def heat_map(sweep: Sweep, direction: str) -> Figure:
    """Draw one direction; cells that do not fit into memory are hatched."""
    speeds = [[sweep.speed(batch, length, direction) for length in sweep.lengths] for batch in sweep.batch_sizes]
    mfu = np.array([[speed.mfu if speed else np.nan for speed in row] for row in speeds])
    highest = float(np.nanmax(mfu)) if np.isfinite(mfu).any() else 1.0
    figure = Figure(figsize=(WIDTH, 1.8 + 0.42 * len(speeds)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(mfu, cmap="viridis", vmin=0, vmax=highest, aspect="auto")
    figure.colorbar(image, label="MFU", format=PercentFormatter(1))
    for place, row in enumerate(speeds):
        for column, speed in enumerate(row):
            if speed is None:
                corner = (column - 0.5, place - 0.5)
                axes.add_patch(
                    Rectangle(corner, 1, 1, facecolor="white", edgecolor=html_page.GREY, hatch="///", linewidth=0)
                )
                continue
            colour = "white" if speed.mfu < _DARK * highest else html_page.INK
            style: Any = {"ha": "center", "color": colour}
            axes.text(column, place, _digits(speed.tflops), va="bottom", **style)
            axes.text(column, place + 0.06, f"{_digits(speed.ms)} ms", va="top", fontsize=8, **style)
    axes.set_xticks(range(len(sweep.lengths)), [f"{length:,}" for length in sweep.lengths])
    axes.set_yticks(range(len(sweep.batch_sizes)), [f"{batch:,}" for batch in sweep.batch_sizes])
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")
    axes.set_title(
        f"TFLOP/s and time of attention {sweep.attention!r}, {_TITLES[direction]}\n"
        f"{sweep.heads} heads of {sweep.head_dim}, {sweep.dtype}, {sweep.device}",
        fontsize="medium",
    )
    if np.isnan(mfu).any():
        handle = Patch(facecolor="white", edgecolor=html_page.GREY, hatch="///", label="out of memory")
        figure.legend(handles=[handle], loc="outside lower right")
    return figure


def _digits(value: float) -> str:
    """Return a number with three digits, or all of those before the point."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
