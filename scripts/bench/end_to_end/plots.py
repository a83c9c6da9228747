"""Plots of the rows of the training benchmark: what each run adds, and how close balancing comes to even batches."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from end_to_end.columns import UNBALANCED, Row, comparison
from evenrank.cli.reports import svg
from rendering.figures import STYLE, WIDTH

STRATEGIES = (UNBALANCED, "karmarkar-karp", "lpt-swap", "min-move")
_BAR = 0.66
_NAME = 28  # letters of a run's name in a line
_LETTER = 0.085  # inches of one on average, to leave room for text beside bars


@mpl.rc_context(STYLE)
def throughput(rows: Sequence[Row]) -> Figure:
    """Draw the TFLOP/s of each run, with MFU on the other axis, and by how much it is faster than the one before.

    Runs that failed have no bar, but the reason.
    """
    figure = Figure(figsize=(WIDTH, 1.4 + 0.36 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    highest = max((row.speed.tflops for row in rows if row.speed), default=1.0)
    texts = [_what_it_adds(row, rows[place - 1] if place else None) for place, row in enumerate(rows)]
    letters = (WIDTH - 0.6) / _LETTER - min(_NAME, max(len(row.name) for row in rows))  # as wide as the axes
    room = [1 - min(0.8, (len(text) + 1) / letters) for text in texts]
    ends = [row.speed.tflops / share for row, share in zip(rows, room, strict=True) if row.speed]
    axes.set_xlim(0, max(ends, default=1.0))
    for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if row.speed is None:
            axes.text(highest * 0.01, place, text, va="center", color=svg.RED)
            continue
        colour = svg.GREY if row.strategy == UNBALANCED else svg.BLUE
        axes.barh(place, row.speed.tflops, _BAR, color=colour)
        axes.text(row.speed.tflops + highest * 0.01, place, text, va="center")
    _name_rows(axes, [row.name for row in rows])
    axes.set_xlabel("model TFLOP/s of a GPU")
    peaks = {row.speed.peak_tflops for row in rows if row.speed}
    if len(peaks) == 1 and (peak := peaks.pop()):  # the same bars can show both only if all GPUs are alike
        percent = 100 / peak
        other = axes.secondary_xaxis("top", functions=(_times(percent), _times(1 / percent)))
        other.set_xlabel("MFU (%)")
        other.spines["top"].set_visible(True)
    handles = [Patch(color=svg.GREY, label=UNBALANCED), Patch(color=svg.BLUE, label="balanced")]
    figure.legend(handles=handles, loc="outside lower right", ncols=2)
    return figure


@mpl.rc_context(STYLE)
def headline(tables: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw the step time of each strategy over that of perfectly even batches, for each distribution of lengths.

    What is above 1 is in another colour: time that even work would not have taken.
    """
    compared = {lengths: comparison(rows) for lengths, rows in tables.items()}
    known = [strategy for strategy in STRATEGIES if any(strategy in found for found in compared.values())]
    figure = Figure(figsize=(WIDTH, 1.1 + 0.36 * len(known)), layout="constrained")
    panels = figure.subplots(1, len(compared), sharex=True, sharey=True, squeeze=False)[0]
    longest = 1.0
    for axes, (lengths, found) in zip(panels, compared.items(), strict=True):
        for place, strategy in enumerate(known):
            row = found.get(strategy)
            ratio = row.evenness.to_even if row and row.evenness else None
            if row is None or ratio is None:
                axes.text(0.02, place, "not measured", va="center", color=svg.GREY)
                continue
            longest = max(longest, ratio.value)
            axes.barh(place, min(ratio.value, 1), _BAR, color=svg.BLUE)
            axes.barh(place, max(ratio.value - 1, 0), _BAR, left=1, color=svg.ORANGE)
            axes.text(max(ratio.value, 1) + 0.02, place, f"{ratio.value:.3f}", va="center")
            axes.text(0.02, place, _how_fast(row, found.get(UNBALANCED)), va="center", color="white", fontsize=9)
        axes.axvline(1, color=svg.INK, linewidth=0.9, linestyle="--")
        axes.set_title(lengths, fontsize=10, fontweight="bold")
        axes.set_xlabel("step time / perfectly even batch")
        _name_rows(axes, known)
    panels[0].xaxis.set_major_locator(MultipleLocator(0.5))
    panels[0].set_xlim(0, longest + 0.25)
    return figure


def _how_fast(row: Row, unbalanced: Row | None) -> str:
    if row is unbalanced or not (row.speed and unbalanced and unbalanced.speed):
        return ""
    return f"{row.speed.tokens_per_second.over(unbalanced.speed.tokens_per_second).value:.2f}x as fast"


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [textwrap.fill(name, _NAME) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda values: values * factor


def _what_it_adds(row: Row, row_before: Row | None) -> str:
    """Return what is written next to a bar: TFLOP/s, and tokens/s compared with the run that it adds to."""
    if row.speed is None:
        return textwrap.shorten(f"failed: {row.failure}", 2 * _NAME, placeholder="…")
    text = f"{row.speed.tflops:.{'0f' if row.speed.tflops >= 10 else '2g'}}"
    if row.speed.added is None:
        return text
    text += f"  {row.speed.added.value - 1:+.1%}"
    if row_before is not None and row_before.name == row.adds_to:
        return text
    return f"{text} over {textwrap.shorten(str(row.adds_to).removeprefix('+ '), _NAME, placeholder='…')}"
