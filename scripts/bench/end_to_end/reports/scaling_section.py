"""The section of the report on more GPUs than were measured: its plots, tables and text."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from end_to_end.experiments import slug
from end_to_end.reports.scaling import RANKS, STRATEGIES, Point, Scaling, scale, scaled_runs
from end_to_end.results import RunResult
from evenrank.cli import console
from evenrank.cli.reports import svg
from evenrank.core.errors import ConfigError
from rendering import figures, markdown_tables
from rendering.figures import STYLE, WIDTH


def write_section(out: Path, results: Sequence[RunResult]) -> str:
    """Simulate, write plots below `out`, and return a section of Markdown; "" without unbalanced runs.

    Lengths that were measured on one number of GPUs alone are named and not simulated, which takes some seconds.
    """
    groups = list(scaled_runs(results))
    if not groups:
        return ""
    scalable = [runs for runs in groups if len({run.gpus for run in runs}) > 1]
    parts = ["## Scaling", *([_EXPLANATION] if scalable else [])]
    parts += [_alone(runs) for runs in groups if runs not in scalable]
    points_of_all = len(scalable) * (1 + (len(RANKS) - 1) * len(STRATEGIES))
    with console.steps("simulating more ranks", points_of_all) as on_point:
        for runs in scalable:
            try:
                scaling = scale(runs, on_point)
            except ConfigError as error:
                parts.append(f"{error}")
                continue
            plot = f"plots/scaling-{slug(scaling.lengths)}.png"
            figures.save(draw(scaling), out / plot)
            parts += render(scaling)
            parts.append(f"![Speed-up and efficiency by ranks]({plot})")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _alone(runs: Sequence[RunResult]) -> str:
    gpus = count_gpus(runs[0].gpus)
    return (
        f"{runs[0].lengths}: measured on {gpus} alone. More ranks are predicted from runs with the same settings on at "
        "least two numbers of GPUs, so that each prediction can be tried on another measurement; see "
        "scripts/bench/experiments/scaling.toml."
    )


_EXPLANATION = """\
Steps on more GPUs than were measured: their samples are drawn from the distribution of lengths and assigned by the
planner, with the fitted cost. A step takes the overhead and the time of its slowest rank; a rank takes the fitted time
of its samples, times a factor drawn from those of the measured GPUs, times a residual drawn from those of their steps,
as if nothing delayed several ranks at once. Factors and residuals are those of perfectly even steps, because ranks that
wait compute more slowly; so is the overhead, which is what a step takes beyond its slowest rank's computing. It is
assumed not to grow with the number of ranks, as if collectives took no longer on more GPUs. Times are means over steps;
measured ratios to even are those of the tables above."""


# By strategy, the best last: lines that coincide are seen below one another.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": svg.GREY, "linewidth": 1.4},
    {"color": svg.RED, "linewidth": 1.4},
    {"color": svg.BLUE, "linewidth": 3.0},
    {"color": svg.INK, "linewidth": 1.4, "linestyle": "--", "zorder": 3},
    {"color": svg.ORANGE, "linewidth": 6.0, "alpha": 0.35, "zorder": 1},
)


@mpl.rc_context(STYLE)
def draw(scaling: Scaling) -> Figure:
    """Draw speed-up and efficiency over ranks, predicted as lines and measured as circles."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    figure.suptitle(f"Predicted (lines) and measured (circles): {scaling.lengths}")
    speedups, efficiencies = figure.subplots(1, 2)
    ranks = sorted({point.ranks for point in scaling.points})
    strategies = dict.fromkeys(point.strategy for point in scaling.points)
    for strategy, style in zip(strategies, _STYLES, strict=True):
        points = [scaling.find(number, strategy) for number in ranks]
        for axes, quantity in ((speedups, scaling.speedup), (efficiencies, scaling.efficiency)):
            axes.plot(ranks, [quantity(point) for point in points], label=strategy, **style)
            measured = [quantity(point, measured=True) for point in points]
            shown = [math.nan if value is None else value for value in measured]
            axes.plot(ranks, shown, "o", color=style["color"], markersize=6, fillstyle="none")
    speedups.set_ylabel("speed-up over unbalanced steps")
    efficiencies.set_ylabel("tokens/s of each GPU, relative to one GPU")
    efficiencies.yaxis.set_major_formatter(PercentFormatter(1.0))
    efficiencies.set_ylim(bottom=0)
    for axes in (speedups, efficiencies):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ranks[:: 1 + len(ranks) // 8]))  # for labels to stay apart
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("ranks")
    figure.legend(*speedups.get_legend_handles_labels(), loc="outside lower center", ncols=len(strategies))
    return figure


_MEASURED_COLUMNS = (
    "GPUs",
    "strategy",
    "run",
    "predicted by",
    "measured (ms)",
    "predicted (ms)",
    "error",
    "error on its batches",
    "speed-up, measured",
    "speed-up, predicted",
    "ratio to even, measured",
    "ratio to even, predicted",
    "efficiency, measured",
    "efficiency, predicted",
)


def render(scaling: Scaling) -> list[str]:
    """Return paragraphs and tables: the calibration, predictions with measurements, and all predictions."""
    measured = [point for point in scaling.points if point.measured is not None]
    strategies = list(dict.fromkeys(point.strategy for point in scaling.points))
    rows = [
        [f"{ranks:,}", *(_cell(scaling, scaling.find(ranks, strategy)) for strategy in strategies)]
        for ranks in dict.fromkeys(point.ranks for point in scaling.points)
    ]
    return [
        f"### {scaling.lengths}",
        _calibration(scaling.points[-1]),
        " ".join([_error_statement(measured), *scaling.refused]),
        markdown_tables.table(_MEASURED_COLUMNS, [_measured_row(scaling, point) for point in measured], left=4),
        "Predicted, by ranks and strategy: step time in ms, speed-up over unbalanced steps, ratio to even steps, and "
        f"scaling efficiency, which is tokens per second of each GPU relative to those of one GPU ({_base(scaling)}).",
        markdown_tables.table(("ranks", *strategies), rows),
    ]


def count_gpus(gpus: int) -> str:
    """Return a number of GPUs in words: `1 GPU`, `2 GPUs`."""
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def _calibration(point: Point) -> str:
    calibration = point.calibration
    factors, noise = calibration.factors, calibration.noise
    return (
        f"More ranks than measured are predicted by the run {calibration.run!r} on {count_gpus(calibration.gpus)}: "
        f"factors of its ranks {factors.min():.3f} to {factors.max():.3f}, residuals with a standard deviation of "
        f"{noise.std():.2%} and a maximum of {noise.max():.2f}, overhead {calibration.overhead * 1e3:.2f} ms."
    )


def _error_statement(measured: list[Point]) -> str:
    errors = [errors for point in measured if (errors := point.errors) is not None]
    if not errors:
        return "No run was measured on which the prediction could be tried."
    worst, worst_on_batches = (max((error[one] for error in errors), key=abs) for one in (0, 1))
    return (
        f"Tried on {len(errors)} measured points, each predicted by a run on another number of GPUs where there is one "
        f"and never by itself, the step time is at most {abs(worst):.1%} off; given the very batches of the measured "
        f"run instead of others of the same distribution, at most {abs(worst_on_batches):.1%}."
    )


def _base(scaling: Scaling) -> str:
    return "as measured" if scaling.find(1, "").measured is not None else "as predicted"


def _measured_row(scaling: Scaling, point: Point) -> list[str]:
    assert point.measured is not None
    errors = ["-", "-"] if point.errors is None else [f"{error:+.1%}" for error in point.errors]
    ratios = [
        text
        for of, form in ((scaling.speedup, ".2f"), (scaling.to_even, ".3f"), (scaling.efficiency, ".1%"))
        for text in (_number(of(point, measured=True), form), _number(of(point), form))
    ]
    return [
        f"{point.ranks:,}",
        point.strategy,
        point.measured.run,
        count_gpus(point.calibration.gpus),
        f"{point.measured.seconds * 1e3:.2f}",
        f"{point.seconds * 1e3:.2f}",
        *errors,
        *ratios,
    ]


def _cell(scaling: Scaling, point: Point) -> str:
    ratios = ((scaling.speedup(point), ".2f"), (scaling.to_even(point), ".3f"), (scaling.efficiency(point), ".0%"))
    return f"{point.seconds * 1e3:.1f}, " + ", ".join(_number(value, form) for value, form in ratios)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
