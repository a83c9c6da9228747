"""Plots of the rows of the training benchmark: what each run adds, and how close balancing comes to even batches."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from end_to_end.reports.columns import NO_EXCHANGE, UNBALANCED, Row, comparison, strategy_of
from end_to_end.results import LIVE, Floats, RunResult, compute_ms, job_ms, segments_of
from evenrank.cli.reports import svg
from rendering.figures import STYLE, WIDTH

STRATEGIES = (UNBALANCED, "karmarkar-karp", "lpt-swap", f"lpt-swap{NO_EXCHANGE}", "min-move")
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


SHOWN_STEPS = 40
_COLOURS = "PuOr_r"  # from below the mean to above it; also told apart by those who confuse red and green
_PARTS = (
    ("exchange, embeddings", "#c9ced6"),
    ("forward", "#8db6e3"),
    ("backward", svg.BLUE),
    ("waiting for gradients, optimizer", svg.ORANGE),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TypicalStep:
    """A step of a run."""

    batch: int
    """Index of its batch."""
    milliseconds: float
    """Its time, the mean over ranks."""
    marks: Floats
    """[W, 5]: as in `Segment`, from when the first rank began it."""


@mpl.rc_context(STYLE)
def ranks(unbalanced: RunResult, balanced: RunResult) -> Figure:
    """Draw load and compute time of each rank in consecutive steps, over the mean of the step's ranks.

    All on one scale. Titles have the mean of the heaviest rank over the steps drawn.
    """
    figure = Figure(figsize=(WIDTH, 1.5 + 0.34 * unbalanced.gpus), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    columns = [_relative(result) for result in (unbalanced, balanced)]
    reach = max(0.01, *(float(np.abs(values - 1).max()) for column in columns for values in column.values()))
    image = None
    for row, (result, column) in enumerate(zip((unbalanced, balanced), columns, strict=True)):
        for place, (quantity, values) in enumerate(column.items()):
            axes = panels[row, place]
            image = axes.imshow(
                values, aspect="auto", interpolation="nearest", cmap=_COLOURS, vmin=1 - reach, vmax=1 + reach
            )
            heaviest = values.max(axis=0).mean()
            axes.set_title(f"{quantity}, {strategy_of(result)}: heaviest {heaviest:.2f}", fontsize=10)
            axes.grid(visible=False)
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        panels[row, 0].set_ylabel("rank")
    for axes in panels[1]:
        axes.set_xlabel("step")
    assert image is not None
    figure.colorbar(image, ax=panels, label="over the mean\nof the ranks", aspect=12)
    return figure


@mpl.rc_context(STYLE)
def timeline(unbalanced: RunResult, balanced: RunResult) -> Figure:
    """Draw what each rank did during a step: one whose time is the median, and the same samples balanced."""
    before = typical_step(unbalanced)
    runs = ((unbalanced, before), (balanced, typical_step(balanced, batch=before.batch)))
    figure = Figure(figsize=(WIDTH, 1.8 + 0.46 * unbalanced.gpus), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, (result, step) in zip(panels, runs, strict=True):
        for (label, colour), start, end in zip(_PARTS, step.marks.T, step.marks.T[1:], strict=False):
            axes.barh(np.arange(len(start)), end - start, 0.72, left=start, color=colour, label=label)
        axes.set_title(f"{strategy_of(result)}: {step.milliseconds:.1f} ms", fontsize=10, fontweight="bold")
        axes.grid(visible=False, axis="y")
        axes.set_ylabel("rank")
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    panels[0].invert_yaxis()
    panels[1].set_xlabel("ms since the step began")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(_PARTS), columnspacing=1.2, handlelength=1.2)
    return figure


def typical_step(result: RunResult, *, batch: int | None = None) -> TypicalStep:
    """Return the live step whose time is closest to the median, of those with a batch if one is given.

    A batch that the run has not trained in its live steps is as if none were given.
    """
    live = segments_of(result, LIVE)
    times = np.concatenate([job_ms(segment) for segment in live])
    batches = np.concatenate([segment.batch for segment in live])
    marks = np.concatenate([segment.marks for segment in live], axis=1)
    places = np.arange(len(times))
    if batch is not None and batch in batches:
        places = places[batches == batch]
    place = places[np.abs(times[places] - np.median(times[places])).argmin()]
    chosen = marks[:, place]
    return TypicalStep(batch=int(batches[place]), milliseconds=float(times[place]), marks=chosen - chosen[:, 0].min())


def _relative(result: RunResult) -> dict[str, Floats]:
    """Return load and compute time of the first live steps over the mean of the ranks: each [W, steps]."""
    segment = segments_of(result, LIVE)[0]
    assert result.balanced is not None
    quantities = {
        "load": result.balanced.loads[:, segment.batch[:SHOWN_STEPS]].astype(np.float64),
        "compute time": compute_ms(segment)[:, :SHOWN_STEPS],
    }
    return {name: values / values.mean(axis=0) for name, values in quantities.items()}
