"""Plots of what each rank did, without and with balancing: in many steps, and in one of them from its events."""

from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from end_to_end.columns import strategy_of
from end_to_end.results import LIVE, Floats, RunResult
from end_to_end.step_times import compute_ms, job_ms, segments_of
from evenrank.cli.reports import svg
from rendering.figures import STYLE, WIDTH

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
