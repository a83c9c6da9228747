"""The plots of a dataset's report."""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import cycle
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from evenrank.cli.reports import svg
from evenrank.cli.reports.dataset_data import Gain, LengthHistogram, Timeline
from evenrank.cli.reports.routing_loads import RoutingLoads

_COLOURS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.RED)
# The years 2 to 9998: the calendars of Python and matplotlib end one year further out.
_FIRST_DATE_MS, _LAST_DATE_MS = -62_104_060_800_000, 253_370_764_800_000


@mpl.rc_context(svg.STYLE)
def lengths_svg(histogram: LengthHistogram) -> str:
    """Draw the distribution of lengths of each split, on a logarithmic axis."""
    figure, axes = svg.new_figure()
    filled_bins = np.flatnonzero(sum(histogram.density.values()))
    for (name, density), colour in zip(histogram.density.items(), cycle(_COLOURS), strict=False):
        if density.any():
            axes.stairs(density, histogram.edges, color=colour, linewidth=1.6, label=name)
            axes.stairs(density, histogram.edges, color=colour, fill=True, alpha=0.12)
    axes.set_xscale("log")
    axes.set_xlim(histogram.edges[filled_bins[0]], histogram.edges[filled_bins[-1] + 1])
    svg.log_ticks(axes, "x")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("events per row")
    axes.set_ylabel("rows per doubling of length")
    svg.legend_above(axes)
    return svg.to_svg(figure)


@mpl.rc_context(svg.STYLE)
def popularity_svg(counts: NDArray[np.int64]) -> str:
    """Draw the events of each item, most frequent first; both axes are logarithmic."""
    figure, axes = svg.new_figure()
    ranks = np.unique(np.geomspace(1, len(counts), 400).astype(np.int64))
    marker = "o" if len(ranks) == 1 else None  # a line through one point is invisible
    axes.plot(ranks, counts[ranks - 1], color=svg.BLUE, linewidth=2, marker=marker)
    axes.set_xscale("log")
    axes.set_yscale("log")
    svg.log_ticks(axes, "x")
    svg.log_ticks(axes, "y")
    axes.set_xlabel("popularity rank of the item")
    axes.set_ylabel("events of the item")
    return svg.to_svg(figure)


@mpl.rc_context(svg.STYLE)
def timeline_svg(timeline: Timeline) -> str:
    """Draw the number of events over time."""
    figure, axes = svg.new_figure()
    edges = timeline.start_ms + timeline.width_ms * np.arange(len(timeline.counts) + 1, dtype=np.float64)
    if timeline.start_ms > _FIRST_DATE_MS and edges[-1] < _LAST_DATE_MS:
        days = edges / 86_400_000  # matplotlib counts days from 1970
        axes.stairs(timeline.counts, days, fill=True, color=svg.BLUE)
        locator = AutoDateLocator(minticks=3, maxticks=6, tz=UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    else:
        axes.stairs(timeline.counts, edges, fill=True, color=svg.BLUE)
        axes.set_xlabel("ms since 1970")
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(svg.compact))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"events per {timeline.unit}")
    return svg.to_svg(figure)


@mpl.rc_context(svg.STYLE)
def gains_svg(gains: Sequence[Gain]) -> str:
    """Draw the load of the heaviest rank over the lower bound, per number of ranks and strategy."""
    figure, axes = svg.new_figure(height=3.3)
    strategies = list(gains[0].ratios)
    width = 0.84 / len(strategies)
    group_centres = np.arange(len(gains))
    colours = (svg.GREY, svg.ORANGE, svg.BLUE, svg.GREEN, svg.RED)[: len(strategies)]
    for index, (strategy, colour) in enumerate(zip(strategies, colours, strict=True)):
        offset = (index - (len(strategies) - 1) / 2) * width
        ratios = [gain.ratios[strategy] for gain in gains]
        bars = axes.bar(group_centres + offset, ratios, width * 0.94, color=colour, label=strategy)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2, rotation=90)  # horizontal ones would touch
    axes.margins(y=0.18)  # room for the numbers above the bars
    axes.axhline(1, color=svg.INK, linewidth=0.8, linestyle="--")
    axes.set_xticks(group_centres, [f"{gain.ranks:,}" for gain in gains])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("ranks")
    axes.set_ylabel("heaviest rank / lower bound")
    svg.legend_above(axes)
    return svg.to_svg(figure)


@mpl.rc_context(svg.STYLE)
def routing_svg(loads: RoutingLoads, load: Literal["distinct ids", "lookups"]) -> str:
    """Draw the busiest rank's load over the mean, per number of ranks and mode; both axes are logarithmic."""
    figure, axes = svg.new_figure(height=3.3)
    # Modes can be equal: each is drawn with smaller markers than the one below it.
    styles = zip((svg.GREY, svg.ORANGE, svg.BLUE), "os^", (7, 5.5, 4), strict=True)
    ratios = loads.ids if load == "distinct ids" else loads.lookups
    for (mode, values), (colour, marker, size) in zip(ratios.items(), styles, strict=True):
        axes.plot(loads.ranks, values, color=colour, marker=marker, markersize=size, linewidth=1.6, label=mode)
    if load == "lookups":
        axes.plot(loads.ranks, loads.most_frequent, color=svg.RED, linestyle=":", label="most frequent id")
    axes.axhline(1, color=svg.INK, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.9, 1.2 * max(2, *(value for values in ratios.values() for value in values)))
    axes.set_xticks(loads.ranks, [f"{ranks:,}" for ranks in loads.ranks])
    svg.log_ticks(axes, "y")
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"{load}, busiest rank / mean")
    svg.legend_above(axes, columns=2)
    return svg.to_svg(figure)


def format_time(milliseconds: int, *, precise: bool) -> str:
    """Return a time as a date in UTC, with the time of day if `precise`; as milliseconds where calendars end."""
    if not _FIRST_DATE_MS < milliseconds < _LAST_DATE_MS:
        return f"{milliseconds:,} ms"
    return f"{datetime.fromtimestamp(milliseconds / 1000, tz=UTC):{'%Y-%m-%d %H:%M:%S' if precise else '%Y-%m-%d'}}"
