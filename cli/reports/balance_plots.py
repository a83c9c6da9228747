"""The pictures of a log of balancing metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from evenrank.cli.reports import svg
from evenrank.cli.reports.balance_log import LogRecord, column, places

MOST_POINTS = 300  # of a curve; the pictures are about as many dots wide
MOST_BARS = 64  # ranks
_MILLISECONDS = 1e3
_FAR = 5  # so many times what nearly all times are below would flatten the picture
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Values of a log, thinned: each point stands for neighbouring records. All arrays are float64 [points]."""

    at: NDArray[np.float64]  # steps that the log had seen at the last of them
    mean: NDArray[np.float64]
    least: NDArray[np.float64]
    greatest: NDArray[np.float64]


def per_point(records: int) -> int:
    """Return how many neighbouring records are one point of a curve."""
    return -(-records // MOST_POINTS)


def thinned(at: NDArray[np.int64], values: NDArray[np.float64]) -> Curve:
    """Make one point of every `per_point` records; the last may stand for fewer."""
    begins = np.arange(0, len(values), per_point(len(values)))
    counts = np.diff([*begins, len(values)])
    return Curve(
        at=at[begins + counts - 1].astype(np.float64),
        mean=np.add.reduceat(values, begins) / counts,
        least=np.minimum.reduceat(values, begins),
        greatest=np.maximum.reduceat(values, begins),
    )


@mpl.rc_context(svg.STYLE)
def ratio_svg(records: Sequence[LogRecord]) -> str:
    """Draw the heaviest rank's load to the lower bound over the steps, before and after."""
    figure, axes = svg.start()
    axes.axhline(1, color=svg.INK, linewidth=0.8, linestyle="--")
    _draw(axes, records, "ratio_before", colour=svg.GREY, label="as dealt")
    _draw(axes, records, "ratio_after", colour=svg.BLUE, label="balanced")
    axes.set_ylabel("heaviest rank / lower bound")
    svg.legend_above(axes)
    return svg.finish(figure)


@mpl.rc_context(svg.STYLE)
def loads_svg(record: LogRecord) -> str:
    """Draw each rank's load in the last step of a record, before and after; as sorted lines where ranks are many."""
    figure, axes = svg.start()
    bound = max(record.lower_bound, 1)
    before, after = record.before / bound, record.after / bound
    ranks = np.arange(len(before))
    if len(ranks) > MOST_BARS:
        for loads, colour, label in ((before, svg.GREY, "as dealt"), (after, svg.BLUE, "balanced")):
            axes.plot(ranks, np.sort(loads)[::-1], color=colour, linewidth=1.8, label=label)
        axes.set_xlabel("ranks, heaviest first")
    else:
        axes.bar(ranks, before, 0.86, color=svg.GREY, alpha=0.6, label="as dealt")
        axes.bar(ranks, after, 0.46, color=svg.BLUE, label="balanced")
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("rank")
    axes.axhline(1, color=svg.INK, linewidth=0.8, linestyle="--")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("load (lower bound = 1)")
    svg.legend_above(axes)
    return svg.finish(figure)


@mpl.rc_context(svg.STYLE)
def moved_svg(records: Sequence[LogRecord]) -> str:
    """Draw the bytes that go to another rank in a step."""
    figure, axes = svg.start()
    unit, size = _unit(float(column(records, "moved_bytes").max()))
    _draw(axes, records, "moved_bytes", colour=svg.GREEN, scale=1 / size)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"moved a step ({unit})")
    return svg.finish(figure)


@mpl.rc_context(svg.STYLE)
def times_svg(records: Sequence[LogRecord], fields: Sequence[str]) -> str:
    """Draw two times of a step in milliseconds; `fields` are `gather_seconds` and the like.

    A few far longer times, as of a first step that compiles, are cut off, and the picture says so.
    """
    figure, axes = svg.start()
    for field, colour in zip(fields, (svg.ORANGE, svg.BLUE), strict=True):
        _draw(axes, records, field, colour=colour, scale=_MILLISECONDS, label=field.removesuffix("_seconds"))
    axes.set_ylim(bottom=0)
    times = np.concatenate([column(records, field) for field in fields]) * _MILLISECONDS
    highest, usual = float(times.max()), float(np.percentile(times, 98))
    if highest > _FAR * usual > 0:
        axes.set_ylim(top=2 * usual)
        axes.text(1, 1.03, f"cut off: up to {highest:,.3g} ms", transform=axes.transAxes, ha="right", fontsize=8)
    axes.set_ylabel("ms a step")
    svg.legend_above(axes)
    return svg.finish(figure)


def as_bytes(number: float) -> str:
    """Return 1,500,000 as 1.5 MB."""
    unit, size = _unit(number)
    return f"{number / size:,.1f} {unit}" if size > 1 else f"{number:.0f} bytes"


def _unit(number: float) -> tuple[str, float]:
    return next((unit for unit in _UNITS if number >= unit[1]), _UNITS[-1])


def _draw(
    axes: Axes, records: Sequence[LogRecord], field: str, *, colour: str, scale: float = 1.0, label: str | None = None
) -> None:
    """Draw a field over the steps: the mean of each point's records, and a band from the least to the greatest."""
    curve = thinned(places(records), column(records, field) * scale)
    marker = "o" if len(curve.at) == 1 else None  # a line through one point is invisible
    if per_point(len(records)) > 1:
        axes.fill_between(curve.at, curve.least, curve.greatest, color=colour, alpha=0.22, linewidth=0)
    axes.plot(curve.at, curve.mean, color=colour, linewidth=1.5, marker=marker, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(svg.compact))
    axes.set_xlabel("steps")
