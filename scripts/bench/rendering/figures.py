"""How plots of benchmarks look, and how they are written as files."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from evenrank.cli.reports import svg

STYLE: Any = {**svg.STYLE, "figure.facecolor": "white", "savefig.dpi": 150, "axes.titlelocation": "left"}
"""Functions that draw are decorated with `@mpl.rc_context(STYLE)`."""
WIDTH = 8.2
"""Inches: at 150 dpi, twice the width of a page, so that text stays readable on it."""


@mpl.rc_context(STYLE)
def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
