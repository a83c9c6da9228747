"""`Comparison`: times that costs predict and measured ones, the errors, and a plot of both."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from end_to_end.results import Floats
from evenrank.cli.reports import svg
from rendering.figures import STYLE, WIDTH

FITTED, BALANCED, OTHER_LENGTHS = "fitted to", "balanced", "other lengths"
"""What a run is to the cost that predicts it: the one it was fitted to; one with the same samples, balanced; an
unbalanced one of another distribution of lengths."""

_COLORS = {FITTED: svg.BLUE, BALANCED: svg.ORANGE, OTHER_LENGTHS: svg.GREEN}
_MAX_POINTS = 2000  # of a run in a plot


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Predicted and measured times of the ranks and steps of a run, in milliseconds."""

    name: str
    """Of the run."""
    lengths: str
    """Its distribution of lengths."""
    kind: str
    """FITTED, BALANCED or OTHER_LENGTHS."""
    measured: Floats
    """[n]."""
    by_fit: Floats
    """[n]: predicted by MeasuredCost."""
    by_hstu: Floats
    """[n]: predicted by HSTUCost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """How far predicted times are from measured ones."""

    r2: float
    """Fraction of the variance of the measured times that is predicted; below 0 where their mean predicts better."""
    median: float
    """Median absolute error, as a fraction of the measured time."""
    p95: float
    """95th percentile of the same."""

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> "Errors":
        """Compare times, [n] each."""
        relative = np.abs(predicted / measured - 1)
        variance = float(np.var(measured))
        return cls(
            r2=1 - float(np.mean((measured - predicted) ** 2)) / variance if variance else float("nan"),
            median=float(np.median(relative)),
            p95=float(np.percentile(relative, 95)),
        )


@mpl.rc_context(STYLE)
def draw(comparisons: Sequence[Comparison], *, title: str) -> Figure:
    """Draw predicted over measured times, by MeasuredCost and by HSTUCost."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    figure.suptitle(f"Compute time of each rank and step: {title}")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    _draw_points(left, comparisons, [comparison.by_fit for comparison in comparisons])
    _draw_points(right, comparisons, [comparison.by_hstu for comparison in comparisons])
    times = np.concatenate([comparison.measured for comparison in comparisons])
    left.set_xlim(times.min() / 1.2, times.max() * 1.2)
    left.set_ylim(times.min() / 1.2, times.max() * 1.2)
    for axes in (left, right):
        svg.log_ticks(axes, "x")
        svg.log_ticks(axes, "y")
    left.set_title("MeasuredCost")
    right.set_title("HSTUCost times one factor")
    left.set_ylabel("predicted (ms)")
    legend = figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, markerscale=2.5)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)  # points are pale because there are many
    return figure


def _draw_points(axes: Axes, comparisons: Sequence[Comparison], predictions: Sequence[Floats]) -> None:
    for kind, color in _COLORS.items():
        pairs = [
            (comparison.measured[:: _stride(comparison)], predicted[:: _stride(comparison)])
            for comparison, predicted in zip(comparisons, predictions, strict=True)
            if comparison.kind == kind
        ]
        if pairs:
            measured, predicted = (np.concatenate(times) for times in zip(*pairs, strict=True))
            axes.scatter(measured, predicted, s=7, alpha=0.35, color=color, linewidths=0, label=kind)
    axes.axline((1, 1), (10, 10), color=svg.INK, linewidth=0.8, label="exact")
    axes.set_xlabel("measured (ms)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_aspect("equal")


def _stride(comparison: Comparison) -> int:
    return -(-len(comparison.measured) // _MAX_POINTS)
