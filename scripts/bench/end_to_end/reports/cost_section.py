"""The report on fitted costs: what they are, how well they predict times, and what balancing by them buys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from end_to_end.cost_fit import Fit, configuration, is_balanced, trained_segments
from end_to_end.experiments import slug
from end_to_end.reports.columns import strategy_of
from end_to_end.results import EVEN, LIVE, Floats, RunResult, compute_ms, job_ms, ratio, segments_of
from evenrank.cli.reports import svg
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import HSTUCost, MeasuredCost
from rendering import figures, markdown_tables
from rendering.figures import STYLE, WIDTH

FITTED, BALANCED, OTHER_LENGTHS = "fitted to", "balanced", "other lengths"
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


def compare(fit: Fit, run: RunResult) -> Comparison:
    """Predict the time of each rank and step of a run."""
    assert run.balanced is not None
    segments = trained_segments(run)
    by_fit, by_hstu = (1e3 * seconds for seconds in fit.predict(run.balanced.sample_tokens))
    kind = OTHER_LENGTHS
    if run.lengths == fit.run.lengths:
        kind = BALANCED if is_balanced(run) else FITTED
    return Comparison(
        name=run.name,
        lengths=run.lengths,
        kind=kind,
        measured=np.concatenate([compute_ms(segment).ravel() for segment in segments]),
        by_fit=np.concatenate([by_fit[:, segment.batch].ravel() for segment in segments]),
        by_hstu=np.concatenate([by_hstu[:, segment.batch].ravel() for segment in segments]),
    )


def fitted_runs(results: Sequence[RunResult]) -> Iterator[tuple[RunResult, list[RunResult]]]:
    """Yield each run that a cost is fitted to, and those that it is compared with, itself first.

    For each distribution of lengths and configuration that is the unbalanced run on most GPUs; it is compared with the
    balanced runs, and with unbalanced ones of other lengths, on as many GPUs.
    """
    measured = [result for result in results if result.balanced is not None and trained_segments(result)]
    groups: dict[tuple[str, str], RunResult] = {}
    for result in measured:
        key = result.lengths, configuration(result)
        if not is_balanced(result) and (key not in groups or groups[key].gpus < result.gpus):
            groups[key] = result
    for (lengths, settings), run in groups.items():
        alike = [one for one in measured if configuration(one) == settings and one.gpus == run.gpus]
        others = [one for one in alike if one is not run and (is_balanced(one) == (one.lengths == lengths))]
        yield run, [run, *others]


def write_section(out: Path, results: Sequence[RunResult]) -> str:
    """Fit costs, write them and their plots below `out`, and return a section of Markdown; "" without unbalanced runs.

    Costs are written to out/<lengths>/measured_cost-<run>.json.
    """
    costs, errors, notes = [], [], []
    for run, compared in fitted_runs(results):
        try:
            fit = Fit.of(run)
        except ConfigError as error:
            notes.append(f"No cost was fitted to {run.name} ({run.lengths}): {error}.")
            continue
        plot = f"plots/cost-{slug(run.lengths)}-{slug(run.name)}.png"
        (out / run.lengths).mkdir(parents=True, exist_ok=True)
        fit.measured.save(out / run.lengths / f"measured_cost-{slug(run.name)}.json")
        comparisons = [compare(fit, one) for one in compared]
        title = f"costs fitted to {run.name}, {run.lengths}"
        figures.save(draw(comparisons, title=title), out / plot)
        notes.append(f"![Predicted and measured compute times]({plot})")
        costs.append(_cost_row(fit))
        errors += [_error_row(run, comparison) for comparison in comparisons]
    if not notes:
        return ""
    parts = ["## Costs fitted to the machine", _EXPLANATION]
    if costs:
        parts += [markdown_tables.table(_COST_COLUMNS, costs, left=2)]
        parts += [_ERROR_EXPLANATION, markdown_tables.table(_ERROR_COLUMNS, errors, left=2)]
    parts += notes
    if pairs := _step_rows(results):
        parts += ["The same settings, balanced by either cost (median step with live balancing):"]
        parts += [markdown_tables.table(_STEP_COLUMNS, pairs, left=2)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


_EXPLANATION = """\
A rank takes a + b Σt + c Σt² for samples of t tokens, fitted to the medians of each rank and batch of a run without
balancing. b t = c t² at b / c tokens: the smaller, the more a long sample costs."""
_COST_COLUMNS = ("lengths", "fitted to", "a (ms)", "b (µs)", "c (ns)", "b / c (tokens)", "b / c of HSTUCost", "R²")
_ERROR_EXPLANATION = """\
Absolute errors of the predicted time of each rank and step. HSTUCost is scaled by one factor, fitted to the same
times. Only the run that a cost is fitted to is not new to it. R² says little of balanced runs, whose times hardly
differ."""
_ERROR_COLUMNS = (
    "fitted to",
    "predicted",
    "times",
    "R²",
    "median error",
    "p95 error",
    "HSTUCost: R²",
    "median error",
    "p95 error",
)
_STEP_COLUMNS = (
    "lengths",
    "run",
    "GPUs",
    "strategy",
    "HSTUCost (ms)",
    "fitted cost (ms)",
    "change",
    "ratio to even, HSTUCost",
    "ratio to even, fitted cost",
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


def _cost_row(fit: Fit) -> list[str]:
    cost = fit.measured
    linear, quadratic = np.ldexp([float(cost.linear), float(cost.quadratic)], -cost.fraction_bits)
    return [
        fit.run.lengths,
        fit.run.name,
        f"{cost.seconds_per_step * 1e3:.2f}",
        f"{linear * 1e6:.3f}",
        f"{quadratic * 1e9:.4f}",
        f"{linear / quadratic:,.0f}" if quadratic else "-",
        f"{fit.hstu_break_even:,.0f}",
        f"{cost.r2:.4f}",
    ]


def _error_row(run: RunResult, comparison: Comparison) -> list[str]:
    cells = [f"{run.name}, {run.lengths}", f"{comparison.name}, {comparison.lengths}", f"{len(comparison.measured):,}"]
    for predicted in (comparison.by_fit, comparison.by_hstu):
        errors = Errors.of(predicted, comparison.measured)
        cells += [f"{errors.r2:.3f}", f"{errors.median:.1%}", f"{errors.p95:.1%}"]
    return cells


def _step_rows(results: Sequence[RunResult]) -> list[list[str]]:
    """Return a row for each two runs that differ in their cost alone."""
    runs: dict[tuple[str, str, int, str], dict[str, RunResult]] = {}
    for result in results:
        if result.cost is not None and is_balanced(result) and segments_of(result, LIVE):
            key = result.lengths, configuration(result), result.gpus, strategy_of(result)
            runs.setdefault(key, {})[result.cost["name"]] = result
    rows = []
    for (lengths, _, gpus, strategy), by_cost in runs.items():
        if {HSTUCost.__name__, MeasuredCost.__name__} <= by_cost.keys():
            pair = by_cost[HSTUCost.__name__], by_cost[MeasuredCost.__name__]
            before, after = (_median_step_ms(run) for run in pair)
            to_even = [ratio(run, (LIVE, EVEN)) for run in pair]
            cells = [f"{one.value:.3f}" if one else "-" for one in to_even]
            times = [f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}", *cells]
            rows.append([lengths, pair[1].name, f"{gpus}", strategy, *times])
    return rows


def _median_step_ms(run: RunResult) -> float:
    return float(np.median(np.concatenate([job_ms(segment) for segment in segments_of(run, LIVE)])))


"""What a run is to the cost that predicts it: the one it was fitted to; one with the same samples, balanced; an
unbalanced one of another distribution of lengths."""
