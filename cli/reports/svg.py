"""SVG plots inside HTML pages: their style, and functions that they share.

Text stays text, and whatever is drawn in `INK` takes the text colour of the page, so that one plot suits light and dark
pages. Plots are small, because they are scaled to the width of the page: on a phone their text stays readable.
"""

import functools
import io
import re
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

INK = "#1f2328"
# Each is readable on white and on near-black pages.
BLUE, ORANGE, GREEN, RED, GREY = "#3d7cc9", "#d9822b", "#3f9b63", "#cf4c45", "#8c939c"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "evenrank",  # ids that are the same in every run
    "text.parse_math": False,  # a dollar sign in a name is one
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "legend.frameon": False,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
Arguments = ParamSpec("Arguments")


def plot(
    *, height: float = 3.0
) -> Callable[[Callable[Concatenate[Axes, Arguments], None]], Callable[Arguments, Markup]]:
    """Return a decorator of functions that draw on axes, which then return an `<svg>` element with the page's ink.

    `height` is in inches, for a width of 4.6. The result is Markup: matplotlib escapes the names that users chose.
    """

    def decorate(draw: Callable[Concatenate[Axes, Arguments], None]) -> Callable[Arguments, Markup]:
        @functools.wraps(draw)
        @mpl.rc_context(STYLE)
        def to_svg(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Markup:
            figure = Figure(figsize=(4.6, height), layout="constrained")
            draw(figure.add_subplot(), *args, **kwargs)
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
            text = file.getvalue()
            text = text[text.index("<svg") :]  # HTML allows no XML declaration or document type inside
            text = re.sub(r'<g id="[^"]*">', "<g>", text)  # ids that every plot of the page would repeat
            return Markup(text.replace(INK, "currentColor"))

        return to_svg

    return decorate


def log_ticks(axes: Axes, which: Literal["x", "y"]) -> None:
    """Put readable ticks on the logarithmic axis `x` or `y`."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    # Within three decades, powers of ten alone are too few ticks.
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(compact))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def compact(value: float, _position: int | None = None) -> str:
    """Return 1500 as 1.5k; usable as a tick formatter."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def legend_above(axes: Axes, *, columns: int = 3) -> None:
    """Put the legend above the plot, where it hides no data; none if nothing was drawn."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=columns, borderaxespad=0.2, columnspacing=1.2)
