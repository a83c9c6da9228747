"""The cost of a sample, fitted to the compute times of a run without balancing, and how well it predicts times.

Times are those of a rank's GPU from the encoder's forward to the end of its backward, which no other rank delays.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from end_to_end import cost_errors
from end_to_end.cost_errors import BALANCED, FITTED, OTHER_LENGTHS, Comparison, Errors
from end_to_end.experiments import slug
from end_to_end.results import EVEN, LIVE, Floats, Ints, RunResult, Segment
from end_to_end.step_times import compute_ms, job_ms, ratio, segments_of
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import HSTUCost, MeasuredCost
from evenrank.dataloader.balance.model_cost import TokenCost
from evenrank.datasets.schema import USER_ID
from rendering import figures, markdown

# Settings that do not change what a rank computes for the samples that it trains.
_NOT_OF_COMPUTE = ("data", "out", "balance", "strategy")


def fit_cost(result: RunResult) -> MeasuredCost:
    """Fit a cost to the times of a run without balancing.

    Each rank and batch counts once, with the median of its repeats. Ranks that fit the same file have the same cost,
    which a Balancer demands, even if their CPUs differ in the last bits of what they compute.

    Raises:
        ConfigError: the run failed or is balanced, or `MeasuredCost.fit` refuses its times.

    """
    if result.balanced is None:
        raise ConfigError(f"no cost can be fitted to {result.name!r}, which failed: {result.failure}; run it again")
    if is_balanced(result):
        raise ConfigError(
            f"no cost can be fitted to {result.name!r}, whose ranks are balanced: all take about as long; name a run "
            'with balance = "none"'
        )
    batches, milliseconds = _median_of_repeats(result)
    tokens = result.balanced.sample_tokens[:, batches]
    cost = MeasuredCost.fit(
        tokens.reshape(-1, tokens.shape[-1]),
        milliseconds.reshape(-1) / 1e3,
        interleave_actions=True,
        contextual=_contextual(result),
        max_tokens=_max_tokens(result),
    )
    return dataclasses.replace(
        cost,
        linear=int(_rounded(cost.linear)),
        quadratic=int(_rounded(cost.quadratic)),
        seconds_per_step=_rounded(cost.seconds_per_step),
        r2=_rounded(cost.r2),
    )


def is_balanced(result: RunResult) -> bool:
    """Return whether the run's samples were distributed by their cost."""
    settings = result.settings
    return result.data_ranks > 1 and settings["balance"] != "none" and settings["strategy"] != "identity"


def configuration(result: RunResult) -> str:
    """Return what decides how long a rank computes for given samples, equal for runs that differ in balancing alone."""
    return repr(sorted((name, value) for name, value in result.settings.items() if name not in _NOT_OF_COMPUTE))


def trained_segments(result: RunResult) -> list[Segment]:
    """Return the segments that train the batches of `result.balanced`."""
    return [segment for segment in result.segments if segment.kind != EVEN and len(segment.batch)]


def predict(cost: MeasuredCost, tokens: Ints) -> Floats:
    """Return the seconds that ranks compute, [...], given the tokens of their samples, [..., rows], 0 for padding."""
    seconds: Floats = sample_seconds(cost, tokens).sum(axis=-1) + cost.seconds_per_step
    return seconds


def sample_seconds(cost: MeasuredCost, tokens: Ints) -> Floats:
    """Return the seconds of samples with so many tokens, of the same shape; without those of the step itself."""
    seconds: Floats = np.ldexp(_of_tokens(cost, tokens), -cost.fraction_bits)
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The costs fitted to a run: a MeasuredCost, and HSTUCost in seconds."""

    run: RunResult
    """Without balancing."""
    measured: MeasuredCost
    hstu: HSTUCost
    seconds_per_operation: float
    """Of HSTUCost, by least squares."""

    @classmethod
    def of(cls, run: RunResult) -> "Fit":
        """Fit both costs.

        Raises:
            ConfigError: see `fit_cost`.

        """
        measured = fit_cost(run)
        assert run.balanced is not None
        hstu = _hstu_cost(run)
        batches, milliseconds = _median_of_repeats(run)
        operations = _of_tokens(hstu, run.balanced.sample_tokens[:, batches]).sum(axis=-1)
        scale = float((operations * milliseconds).sum() / (operations**2).sum()) / 1e3
        return cls(run=run, measured=measured, hstu=hstu, seconds_per_operation=scale)

    def predict(self, tokens: Ints) -> tuple[Floats, Floats]:
        """Return the seconds that `measured` and `hstu` predict for ranks, as `predict` does."""
        return predict(self.measured, tokens), _of_tokens(self.hstu, tokens).sum(axis=-1) * self.seconds_per_operation


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
        parts += [markdown.table(_COST_COLUMNS, costs, left=2)]
        parts += [_ERROR_EXPLANATION, markdown.table(_ERROR_COLUMNS, errors, left=2)]
    parts += notes
    if pairs := _step_rows(results):
        parts += ["The same settings, balanced by either cost (median step with live balancing):"]
        parts += [markdown.table(_STEP_COLUMNS, pairs, left=2)]
    return "\n\n".join(parts) + "\n"


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
_STEP_COLUMNS = ("lengths", "run", "GPUs", "strategy", "HSTUCost (ms)", "fitted cost (ms)", "change", "ratio to even")


def _cost_row(fit: Fit) -> list[str]:
    cost = fit.measured
    linear, quadratic = np.ldexp([float(cost.linear), float(cost.quadratic)], -cost.fraction_bits)
    of_one, of_two = (float(_of_tokens(fit.hstu, np.array([tokens]))[0]) for tokens in (1, 2))
    hstu_quadratic = (of_two - 2 * of_one) / 2
    return [
        fit.run.lengths,
        fit.run.name,
        f"{cost.seconds_per_step * 1e3:.2f}",
        f"{linear * 1e6:.3f}",
        f"{quadratic * 1e9:.4f}",
        f"{linear / quadratic:,.0f}" if quadratic else "-",
        f"{(of_one - hstu_quadratic) / hstu_quadratic:,.0f}",
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
            times = [f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}", f"{cells[0]}, {cells[1]}"]
            rows.append([lengths, pair[1].name, f"{gpus}", strategy, *times])
    return rows


def _median_step_ms(run: RunResult) -> float:
    return float(np.median(np.concatenate([job_ms(segment) for segment in segments_of(run, LIVE)])))


def _median_of_repeats(result: RunResult) -> tuple[Ints, Floats]:
    """Return which batches were trained, [n], and how long each rank computed for each in milliseconds, [W, n]."""
    segments = trained_segments(result)
    steps = np.concatenate([segment.batch for segment in segments])
    times = np.concatenate([compute_ms(segment) for segment in segments], axis=1)
    batches = np.unique(steps)
    return batches, np.stack([np.median(times[:, steps == batch], axis=1) for batch in batches], axis=1)


def _of_tokens(cost: TokenCost, tokens: Ints) -> Floats:
    """Return the costs of samples without candidates as float64, which does not overflow where they are summed."""
    return cost.of_tokens(tokens, np.zeros_like(tokens)).astype(np.float64)


def _hstu_cost(result: RunResult) -> HSTUCost:
    settings = result.settings
    return HSTUCost(
        hidden=settings["hidden"],
        heads=settings["heads"],
        head_dim=settings["hidden"] // settings["heads"],
        layers=settings["layers"],
        interleave_actions=True,
        contextual=_contextual(result),
        max_tokens=_max_tokens(result),
    )


def _contextual(result: RunResult) -> tuple[str, ...]:
    return (USER_ID,) if result.settings["user_id"] else ()


def _rounded(value: float) -> float:
    return float(f"{value:.8e}")


def _max_tokens(result: RunResult) -> int:
    return len(_contextual(result)) + 2 * int(result.settings["max_history_length"])
