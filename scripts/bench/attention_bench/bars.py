"""Bars of the time of each rank before and after balancing, with a line for equal lengths."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from attention_bench.balanced import Draw
from evenrank.cli.reports import html_page
from rendering.figures import STYLE, WIDTH

BEFORE, AFTER = "none", "lpt-swap"


@mpl.rc_context(STYLE)
def rank_bars(draws: Sequence[Draw]) -> Figure:
    """Draw the first step of each distribution (rows) and attention (columns), each on its own scale."""
    lengths = list(dict.fromkeys(draw.lengths for draw in draws))
    attentions = list(dict.fromkeys(draw.attention for draw in draws))
    first = {(draw.lengths, draw.attention, draw.strategy): draw for draw in reversed(draws)}
    figure = Figure(figsize=(WIDTH, 0.9 + 2.2 * len(lengths)), layout="constrained")
    panels = figure.subplots(len(lengths), len(attentions), sharex=True, squeeze=False)
    for row, distribution in enumerate(lengths):
        for column, attention in enumerate(attentions):
            before, after = (first[distribution, attention, strategy] for strategy in (BEFORE, AFTER))
            axes = panels[row, column]
            places = np.arange(len(before.rank_ms))
            axes.bar(places - 0.2, before.rank_ms, 0.38, color=html_page.GREY, label="before balancing")
            axes.bar(places + 0.2, after.rank_ms, 0.38, color=html_page.BLUE, label=f"after ({AFTER})")
            axes.axhline(before.equal_ms, color=html_page.ORANGE, linestyle="--", label="equal lengths")
            axes.set_title(f"{attention}, {distribution}", fontsize="medium")
            axes.set_xticks(places)
            axes.grid(axis="x", visible=False)
            if row == len(lengths) - 1:
                axes.set_xlabel("rank")
            if column == 0:
                axes.set_ylabel("forward and backward (ms)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure
