"""Step times on more GPUs than were measured: simulated steps, with the costs and the noise of measured times.

Simulated steps are drawn and planned as `evenrank simulate` does, and take as long as a `Calibration` says. Their
overhead is assumed not to grow with the number of ranks: lookups of embeddings, the all-reduce of gradients, the
optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from end_to_end.cost_fit import Calibration, configuration, is_balanced, predict, sample_seconds, trained_segments
from end_to_end.reports.columns import UNBALANCED
from end_to_end.results import EVEN, LIVE, Floats, RunResult, job_ms, ratio, segments_of
from evenrank.cli.reports.simulation import LengthSource, simulated_steps
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import BalanceConfig, MeasuredCost
from evenrank.datasets.distributions import parse_distribution

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STRATEGIES = (UNBALANCED, "karmarkar-karp", "lpt-swap", "min-move", EVEN)
"""EVEN: every rank has the mean cost of the step; the others are what `_strategy_of` returns."""

_SAMPLED_RANKS = 1 << 11  # ranks times steps to simulate: few ranks need more steps for a mean as exact
_MIN_STEPS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Steps of a run."""

    run: str
    """Its name."""
    seconds: float
    """Of a step, mean."""
    tokens_per_second: float
    """Of each GPU."""
    to_even: float | None
    """Time of a step over that of even steps of the same run, see `step_times.ratio`. None: it has none."""
    predicted: float
    """Seconds that the steps were to take by the point's calibration, given the batches of the run: as `Point.seconds`,
    without the difference between these batches and others of the same distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Simulated steps with a number of ranks and a strategy, and measured ones if there are."""

    ranks: int
    strategy: str
    seconds: float
    """Of a step, mean."""
    tokens_per_second: float
    """Of each GPU."""
    calibration: Calibration
    measured: Measured | None

    @property
    def errors(self) -> tuple[float, float] | None:
        """Relative errors of `seconds` and of `measured.predicted`; None if the calibration is by the run itself."""
        if self.measured is None or self.measured.run == self.calibration.run:
            return None
        return self.seconds / self.measured.seconds - 1, self.measured.predicted / self.measured.seconds - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Points of a distribution of lengths."""

    lengths: str
    points: tuple[Point, ...]
    refused: tuple[str, ...] = ()
    """Why some runs do not predict others, a sentence each."""

    def find(self, ranks: int, strategy: str) -> Point:
        """Return the point of a number of ranks; all strategies are the same on one rank."""
        wanted = ranks, (UNBALANCED if ranks == 1 else strategy)
        return next(point for point in self.points if (point.ranks, point.strategy) == wanted)

    def speedup(self, point: Point, *, measured: bool = False) -> float | None:
        """Return the time of an unbalanced step over that of a point, predicted or measured."""
        unbalanced = self.find(point.ranks, UNBALANCED)
        if not measured:
            return unbalanced.seconds / point.seconds
        if unbalanced.measured is None or point.measured is None:
            return None
        return unbalanced.measured.seconds / point.measured.seconds

    def to_even(self, point: Point, *, measured: bool = False) -> float | None:
        """Return the time of a step over that of one whose ranks have equal costs, predicted or measured."""
        if measured:
            return None if point.measured is None else point.measured.to_even
        return point.seconds / self.find(point.ranks, EVEN).seconds

    def efficiency(self, point: Point, *, measured: bool = False) -> float | None:
        """Return the tokens per second of each GPU relative to those of one GPU, measured if it was."""
        one, side = self.find(1, UNBALANCED), point.measured if measured else point
        base = one.measured or one
        return None if side is None else side.tokens_per_second / base.tokens_per_second


def simulated_compute(
    cost: MeasuredCost, source: LengthSource, ranks: int, *, batch_size: int, strategy: str, steps: int
) -> tuple[Floats, float]:
    """Return the seconds that each rank computes in simulated steps, [steps, W], and their mean tokens per rank."""
    even, planned = strategy == EVEN, "none" if strategy in (UNBALANCED, EVEN) else strategy
    compute, tokens = [], 0
    balance = BalanceConfig(cost=cost, strategy=planned)
    for step in simulated_steps(source, balance, ranks, batch_size=batch_size, steps=steps):
        # In float64: the costs of a whole rank may not add up in int64.
        seconds = sample_seconds(cost, step.tokens).ravel()
        of_ranks = np.bincount(step.assignment.rank_of.ravel(), weights=seconds, minlength=ranks)
        compute.append(np.full(ranks, of_ranks.mean()) if even else of_ranks)
        tokens += int(step.tokens.sum())
    return np.stack(compute) + cost.seconds_per_step, tokens / (steps * ranks)


def scale(runs: Sequence[RunResult], on_point: Callable[[], None] = lambda: None) -> Scaling:
    """Simulate all `RANKS` and `STRATEGIES`.

    A number of ranks is predicted by the unbalanced run on the largest other number of GPUs, as though it had not been
    measured itself; if there is no other, by that on the same number.

    Args:
        runs: of the same lengths and configuration.
        on_point: called after each point.

    Raises:
        ConfigError: no cost can be fitted to any of the unbalanced runs; a sentence for each.
    """
    calibrations, refused = _calibrate(runs)
    points = []
    for ranks in RANKS:
        calibration = calibrations[max(calibrations.keys() - {ranks} or calibrations)]
        for strategy in STRATEGIES if ranks > 1 else STRATEGIES[:1]:
            points.append(_simulate(runs, calibration, ranks, strategy))
            on_point()
    return Scaling(lengths=runs[0].lengths, points=tuple(points), refused=tuple(refused))


def _calibrate(runs: Sequence[RunResult]) -> tuple[dict[int, Calibration], list[str]]:
    """Return a calibration for each number of GPUs, and why runs could not give one."""
    calibrations: dict[int, Calibration] = {}
    refused = []
    for run in runs:
        if not is_balanced(run) and run.gpus not in calibrations:
            try:
                calibrations[run.gpus] = Calibration.of(run)
            except ConfigError as error:
                refused.append(f"No cost was fitted to {run.name} ({run.lengths}): {error}.")
    if not calibrations:
        raise ConfigError(" ".join(refused))
    return calibrations, refused


def _simulate(runs: Sequence[RunResult], calibration: Calibration, ranks: int, strategy: str) -> Point:
    first = runs[0]
    source = LengthSource(
        distribution=parse_distribution(first.workload["lengths"][first.lengths]),
        max_length=first.settings["max_history_length"],
    )
    compute, tokens = simulated_compute(
        calibration.cost,
        source,
        ranks,
        batch_size=first.settings["batch_size"],
        strategy=strategy,
        steps=max(_SAMPLED_RANKS // ranks, _MIN_STEPS),
    )
    seconds = calibration.step_seconds(compute)
    return Point(
        ranks=ranks,
        strategy=strategy,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        calibration=calibration,
        measured=_measure(runs, calibration, ranks, strategy),
    )


def _measure(runs: Sequence[RunResult], calibration: Calibration, ranks: int, strategy: str) -> Measured | None:
    """Return the steps of the run that was measured, if one was: rather one that was balanced by a MeasuredCost."""
    kind, name = (EVEN, UNBALANCED) if strategy == EVEN else (LIVE, strategy)
    alike = [run for run in runs if run.gpus == ranks and _strategy_of(run) == name and segments_of(run, kind)]
    if not alike:
        return None
    run = max(alike, key=lambda one: (one.cost or {}).get("name") == MeasuredCost.__name__)
    assert run.balanced is not None
    work = (run.even or run.balanced) if kind == EVEN else run.balanced
    segments = segments_of(run, kind)
    batches = np.concatenate([segment.batch for segment in segments])
    seconds = float(np.concatenate([job_ms(segment) for segment in segments]).mean()) / 1e3
    to_even = ratio(run, (kind, EVEN))
    return Measured(
        run=run.name,
        seconds=seconds,
        # Even batches have other numbers of tokens, but stand for these.
        tokens_per_second=float(run.balanced.tokens[:, batches].mean()) / seconds,
        to_even=None if to_even is None else to_even.value,
        predicted=calibration.step_seconds(predict(calibration.cost, work.sample_tokens)[:, batches].T),
    )


def _strategy_of(run: RunResult) -> str:
    """Return the strategy by which samples were distributed, with or without an exchange. A single rank has none."""
    return str(run.settings["strategy"]) if is_balanced(run) else UNBALANCED


def scaled_runs(results: Sequence[RunResult]) -> Iterator[list[RunResult]]:
    """Yield, for each distribution of lengths, the runs of the configuration that was measured in most ways.

    Ways are numbers of GPUs and strategies; of configurations with equally many, the one whose unbalanced steps are the
    fastest on most GPUs. Runs whose ranks divide heads are left out. Runs with tables of other sizes are apart.
    """
    groups: dict[str, dict[tuple[str, ...], list[RunResult]]] = {}
    for result in results:
        if result.balanced is not None and trained_segments(result) and result.data_ranks == result.gpus:
            rows = (f"{result.workload[name]}" for name in ("item_rows", "user_rows"))
            groups.setdefault(result.lengths, {}).setdefault((configuration(result), *rows), []).append(result)
    for by_configuration in groups.values():
        calibrated = [runs for runs in by_configuration.values() if not all(is_balanced(run) for run in runs)]
        if calibrated:
            yield max(
                calibrated,
                key=lambda runs: (len({(run.gpus, _strategy_of(run)) for run in runs}), -_unbalanced_ms(runs)),
            )


def _unbalanced_ms(runs: Sequence[RunResult]) -> float:
    run = max((run for run in runs if not is_balanced(run)), key=lambda run: run.gpus)
    return float(np.concatenate([job_ms(segment) for segment in trained_segments(run)]).mean())
