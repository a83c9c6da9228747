"""The pictures of a dataset's report, as SVG that stands inside an HTML page.

Text stays text, and whatever is drawn in `_INK` takes the colour of the page's text, so that one picture suits light
and dark pages. Pictures are small, because they are scaled to the page's width: on a phone their text stays readable.
"""

import io
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from evenrank.cli.report_data import Gain, LengthHistogram, Popularity, Timeline

_INK = "#1f2328"
# Each is readable on white and on near-black.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#3d7cc9", "#d9822b", "#3f9b63", "#cf4c45", "#8c939c"
_COLOURS = (_BLUE, _ORANGE, _GREEN, _RED)
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "evenrank",  # the same bytes for the same data
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "legend.frameon": False,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# The years 2 to 9998: calendars of Python and matplotlib end a year further out.
_FIRST_DATE_MS, _LAST_DATE_MS = -62_104_060_800_000, 253_370_764_800_000


@mpl.rc_context(_STYLE)
def lengths_svg(histogram: LengthHistogram) -> str:
    """Draw the distribution of lengths of each split, on a logarithmic axis."""
    figure, axes = _start()
    filled = np.flatnonzero(sum(histogram.density.values()))
    for (name, density), colour in zip(histogram.density.items(), _repeated(len(histogram.density)), strict=True):
        if density.any():
            axes.stairs(density, histogram.edges, color=colour, linewidth=1.6, label=name)
            axes.stairs(density, histogram.edges, color=colour, fill=True, alpha=0.12)
    axes.set_xscale("log")
    axes.set_xlim(histogram.edges[filled[0]], histogram.edges[filled[-1] + 1])
    _log_ticks(axes, "x")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("events of a row")
    axes.set_ylabel("rows per doubling of length")
    _legend_above(axes)
    return _finish(figure)


@mpl.rc_context(_STYLE)
def popularity_svg(popularity: Popularity) -> str:
    """Draw how often the item of each rank occurs; both axes are logarithmic."""
    figure, axes = _start()
    ranks = np.unique(np.geomspace(1, len(popularity.counts), 400).astype(np.int64))
    marker = "o" if len(ranks) == 1 else None  # a line through one point is invisible
    axes.plot(ranks, popularity.counts[ranks - 1], color=_BLUE, linewidth=2, marker=marker)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _log_ticks(axes, "x")
    _log_ticks(axes, "y")
    axes.set_xlabel("rank of the item")
    axes.set_ylabel("its events")
    return _finish(figure)


@mpl.rc_context(_STYLE)
def timeline_svg(timeline: Timeline) -> str:
    """Draw the number of events over time."""
    figure, axes = _start()
    edges = timeline.start_ms + timeline.width_ms * np.arange(len(timeline.counts) + 1, dtype=np.float64)
    if timeline.start_ms > _FIRST_DATE_MS and edges[-1] < _LAST_DATE_MS:
        axes.stairs(timeline.counts, edges / 86_400_000, fill=True, color=_BLUE)  # matplotlib counts days from 1970
        locator = AutoDateLocator(minticks=3, maxticks=6, tz=UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    else:
        axes.stairs(timeline.counts, edges, fill=True, color=_BLUE)
        axes.set_xlabel("ms since 1970")
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_compact))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"events per {timeline.unit}")
    return _finish(figure)


@mpl.rc_context(_STYLE)
def gain_svg(gains: Sequence[Gain]) -> str:
    """Draw the heaviest rank's load to the lower bound, per number of ranks and strategy."""
    figure, axes = _start(height=3.3)
    strategies = list(gains[0].ratios)
    width = 0.84 / len(strategies)
    places = np.arange(len(gains))
    for index, (strategy, colour) in enumerate(zip(strategies, (_GREY, _ORANGE, _BLUE), strict=True)):
        offset = (index - (len(strategies) - 1) / 2) * width
        ratios = [gain.ratios[strategy] for gain in gains]
        bars = axes.bar(places + offset, ratios, width * 0.94, color=colour, label=strategy)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    axes.margins(y=0.12)  # for the numbers on the bars
    axes.axhline(1, color=_INK, linewidth=0.8, linestyle="--")
    axes.set_xticks(places, [f"{gain.ranks:,}" for gain in gains])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("ranks")
    axes.set_ylabel("heaviest rank (lower bound = 1)")
    _legend_above(axes)
    return _finish(figure)


def as_time(milliseconds: int, *, precise: bool) -> str:
    """Return a time as a date in UTC, `precise` with the clock, or as milliseconds where calendars end."""
    if not _FIRST_DATE_MS < milliseconds < _LAST_DATE_MS:
        return f"{milliseconds:,} ms"
    return f"{datetime.fromtimestamp(milliseconds / 1000, tz=UTC):{'%Y-%m-%d %H:%M:%S' if precise else '%Y-%m-%d'}}"


def _start(*, height: float = 3.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration and document type, which HTML does not know
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # names that would be the same in every picture of the page
    return svg.replace(_INK, "currentColor")


def _log_ticks(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    # Powers of ten alone are too few ticks for less than three of them.
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(_compact))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _compact(value: float, _position: int | None = None) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _repeated(number: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(number)]


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, borderaxespad=0.2, columnspacing=1.2)
