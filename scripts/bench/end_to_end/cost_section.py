"""The report on fitted costs: what they are, how well they predict times, and what balancing by them buys."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from end_to_end import cost_errors
from end_to_end.cost_errors import BALANCED, FITTED, OTHER_LENGTHS, Comparison, Errors
from end_to_end.cost_fit import Fit, configuration, is_balanced, trained_segments
from end_to_end.experiments import slug
from end_to_end.results import EVEN, LIVE, RunResult
from end_to_end.step_times import compute_ms, job_ms, ratio, segments_of
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import HSTUCost, MeasuredCost
from rendering import figures, markdown_tables


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
        figures.save(cost_errors.draw(comparisons, title=title), out / plot)
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
            key = result.lengths, configuration(result), result.gpus, f"{result.settings['strategy']}"
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
