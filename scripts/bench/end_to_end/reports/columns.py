"""`Row`: what a run of the training benchmark amounts to, in numbers that can be compared with those of other runs.

Pure functions of results. T[s] is the time of step s of the live segments, the mean over ranks; see `job_ms`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from end_to_end.results import (
    EVEN,
    LIVE,
    PREPARED,
    Balance,
    Floats,
    Ints,
    RunResult,
    Segment,
    Spread,
    by_round,
    compute_ms,
    job_ms,
    ratio,
    segments_of,
    step_ms,
)

UNBALANCED = "unbalanced"
NO_EXCHANGE = ", no exchange"  # after the name of a strategy
_GIB = 2**30
_NOT_COMPARED = ("balance", "strategy", "data", "out")  # settings in which runs that balance differently may differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast a run was, over the steps of its live segments."""

    steps: int
    """Steps measured."""
    step_ms: float
    """Median of T, in milliseconds."""
    step_p95_ms: float
    """95th percentile of T."""
    slowest_ms: float
    """Median over steps of the maximum over ranks of a step's time."""
    slowest_p95_ms: float
    """95th percentile of the same."""
    tokens_per_second: Spread
    """Tokens of all data-parallel ranks over the sum of T: ranks that divide the heads of one batch count it once."""
    tflops: float
    """TFLOP/s of a GPU: model FLOPs of all GPUs over the sum of T, over the number of GPUs."""
    peak_tflops: float | None
    """Peak of a GPU. None where it is not known."""
    speedup: Spread | None
    """`tokens_per_second` over that of the row's baseline. The range is that of all pairs of a round of either."""
    added: Spread | None
    """The same, over that of the run that this one adds to. None if it failed, is missing, or there is none."""
    peak_gib: tuple[float, ...]
    """[W]: GiB of device memory allocated at most. Empty if there is none, on a CPU."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: `tflops` over the peak."""
        return self.tflops / self.peak_tflops if self.peak_tflops else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evenness:
    """How even the work of the ranks was, and what it cost to make it so."""

    to_even: Spread | None
    """Step time over that with perfectly even batches: medians of each batch, means over batches, medians over rounds;
    see `by_round`."""
    prepared_to_even: Spread | None
    """The same for batches that were balanced before the clock started."""
    exposed: Spread | None
    """Time that balancing adds to a step: likewise the step time over that with prepared batches, - 1."""
    exposed_ms: Spread | None
    """The same in milliseconds."""
    exposed_mean: Spread | None
    """As `exposed`, of means of batches and rounds instead of medians: rare stalls count too."""
    load_before: float | None
    """Load of the heaviest rank over the mean of the ranks before balancing, mean over batches."""
    load_after: float
    """The same for the batches that were trained."""
    moved_samples: float | None
    """Samples that another rank trained than had loaded them, as a fraction."""
    moved_tokens: float | None
    """Tokens of those samples, as a fraction."""
    compute_ms: tuple[float, ...]
    """[W]: mean over steps of a rank's compute time; see `compute_ms` of `step_times`."""
    heaviest_ms: float
    """Mean over steps of the compute time of the step's heaviest rank."""
    wait_ms: float
    """Mean over steps and ranks of the step's time without compute time: waiting, embeddings, and the optimizer."""
    slowest_rank: int
    """The rank with the largest `compute_ms`: far above the others, its GPU is slow or its samples are longer."""

    @property
    def mean_compute_ms(self) -> float:
        """Mean over steps and ranks of compute time."""
        return float(np.mean(self.compute_ms))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A run. One that failed has neither `speed` nor `evenness`."""

    name: str
    """Of the run."""
    lengths: str
    """Name of the distribution of lengths."""
    gpus: int
    """Processes."""
    failure: str | None
    """Why nothing was measured."""
    adds_to: str | None
    """The run that it adds settings to."""
    baseline: str | None
    """The first run of its chain that was measured, maybe the run itself. None: there is no result of a run before."""
    strategy: str
    """How samples are distributed; see `strategy_of`."""
    setup: str
    """All other settings, workload and number of GPUs: rows with the same setup differ in balancing alone."""
    cost: str | None
    """Class of the cost by which samples are balanced."""
    speed: Speed | None = None
    """None if it failed."""
    evenness: Evenness | None = None
    """None if it failed."""


def make_rows(results: Sequence[RunResult]) -> tuple[Row, ...]:
    """Return the rows of a table: results of one distribution of lengths, in the order given.

    A baseline that failed, such as for lack of memory, is replaced by the next run of the chain.
    """
    by_name = {result.name: result for result in results}
    return tuple(_make_row(result, by_name) for result in results)


def strategy_of(result: RunResult) -> str:
    """Return how samples were distributed: UNBALANCED, or the name of a strategy, with no exchange or with one."""
    balance, strategy = result.settings["balance"], str(result.settings["strategy"])
    return {"none": UNBALANCED, "no-exchange": f"{strategy}{NO_EXCHANGE}"}.get(balance, strategy)


def comparison(rows: Sequence[Row]) -> dict[str, Row]:
    """Return rows that differ in balancing alone, by strategy: of the setup with most strategies, then the fastest.

    Rows that failed are left out. Of several with the same strategy it is one balanced by `HSTUCost`, else the first.
    """
    setups: dict[str, dict[str, Row]] = {}
    for row in sorted((row for row in rows if row.speed), key=lambda row: row.cost != "HSTUCost"):
        setups.setdefault(row.setup, {}).setdefault(row.strategy, row)
    return max(setups.values(), key=lambda found: (len(found), max(map(_throughput, found.values()))), default={})


def heaviest_over_mean(loads: Ints) -> Floats:
    """Return the largest load over the mean of the ranks: [N], for loads [N, D]."""
    ratios: Floats = loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1)
    return ratios


def _make_row(result: RunResult, by_name: Mapping[str, RunResult]) -> Row:
    baseline = _baseline(result, by_name)
    parent = by_name.get(result.adds_to or "")
    return Row(
        name=result.name,
        lengths=result.lengths,
        gpus=result.gpus,
        failure=result.failure,
        adds_to=result.adds_to,
        baseline=None if baseline is None else baseline.name,
        strategy=strategy_of(result),
        setup=_setup(result),
        cost=None if result.cost is None else result.cost["name"],
        speed=_speed(result, baseline, parent) if _is_measured(result) else None,
        evenness=_evenness(result) if _is_measured(result) else None,
    )


def _setup(result: RunResult) -> str:
    settings = {key: value for key, value in result.settings.items() if key not in _NOT_COMPARED}
    return json.dumps([result.gpus, result.workload, settings], sort_keys=True)


def _baseline(result: RunResult, by_name: Mapping[str, RunResult]) -> RunResult | None:
    """Return the first run of a run's chain that was measured; None where the chain is broken."""
    chain = [result]
    while (name := chain[-1].adds_to) is not None:
        if name not in by_name:
            return None
        chain.append(by_name[name])
    return next((run for run in reversed(chain) if _is_measured(run)), None)


def _is_measured(result: RunResult) -> bool:
    return result.failure is None and bool(segments_of(result, LIVE))


def _speed(result: RunResult, baseline: RunResult | None, parent: RunResult | None) -> Speed:
    live = segments_of(result, LIVE)
    steps = np.concatenate([job_ms(segment) for segment in live])
    slowest = np.concatenate([step_ms(segment).max(axis=0) for segment in live])
    tflops = _flops(result, live) / result.gpus / steps.sum() / 1e9  # of a millisecond, to 1e12 of a second
    peaks = () if result.peak_allocated is None or not result.peak_allocated.any() else result.peak_allocated
    return Speed(
        steps=len(steps),
        step_ms=float(np.median(steps)),
        step_p95_ms=float(np.percentile(steps, 95)),
        slowest_ms=float(np.median(slowest)),
        slowest_p95_ms=float(np.percentile(slowest, 95)),
        tokens_per_second=_tokens_per_second(result),
        tflops=tflops,
        peak_tflops=result.peak_flops and result.peak_flops / 1e12,
        speedup=_speedup(result, baseline),
        added=_speedup(result, parent),
        peak_gib=tuple(float(peak) / _GIB for peak in peaks),
    )


def _flops(result: RunResult, segments: Sequence[Segment]) -> float:
    """Return the model FLOPs of all GPUs in the steps of the segments."""
    work, flops = result.balanced, result.flops
    assert work is not None
    assert flops is not None
    per_batch = (
        flops["per_token"] * work.tokens.astype(np.float64)
        + flops["per_pair"] * work.pairs.astype(np.float64)
        + flops["per_prediction"] * work.predictions.astype(np.float64)
    ).sum(axis=0)
    return float(sum(per_batch[segment.batch].sum() for segment in segments))


def _tokens_per_second(result: RunResult) -> Spread:
    assert result.balanced is not None
    per_batch = result.balanced.tokens.sum(axis=0) / (result.gpus // result.data_ranks)
    live = segments_of(result, LIVE)
    tokens = [float(per_batch[segment.batch].sum()) for segment in live]
    seconds = [float(job_ms(segment).sum()) / 1e3 for segment in live]
    rounds = [one / other for one, other in zip(tokens, seconds, strict=True)]
    return Spread(value=sum(tokens) / sum(seconds), low=min(rounds), high=max(rounds))


def _speedup(result: RunResult, other: RunResult | None) -> Spread | None:
    if other is None or not _is_measured(other):
        return None
    if other is result:
        return Spread(value=1.0, low=1.0, high=1.0)
    return _tokens_per_second(result).over(_tokens_per_second(other))


def _evenness(result: RunResult) -> Evenness:
    live = segments_of(result, LIVE)
    compute = np.concatenate([compute_ms(segment) for segment in live], axis=1)
    steps = np.concatenate([step_ms(segment) for segment in live], axis=1)
    exposed = by_round(result, (LIVE, PREPARED), np.median)
    balance = result.balance
    assert result.balanced is not None
    return Evenness(
        to_even=ratio(result, (LIVE, EVEN)),
        prepared_to_even=ratio(result, (PREPARED, EVEN)),
        exposed=_minus_one(ratio(result, (LIVE, PREPARED))),
        exposed_ms=Spread.of_rounds([one - other for one, other in exposed]),
        exposed_mean=_minus_one(ratio(result, (LIVE, PREPARED), np.mean)),
        load_before=None if balance is None else float(heaviest_over_mean(balance.before).mean()),
        load_after=float(heaviest_over_mean(result.balanced.loads.T).mean()),
        **_moved(balance),
        compute_ms=tuple(float(mean) for mean in compute.mean(axis=1)),
        heaviest_ms=float(compute.max(axis=0).mean()),
        wait_ms=float((steps - compute).mean()),
        slowest_rank=int(compute.mean(axis=1).argmax()),
    )


def _minus_one(spread: Spread | None) -> Spread | None:
    return spread and Spread(value=spread.value - 1, low=spread.low - 1, high=spread.high - 1)


def _moved(balance: Balance | None) -> dict[str, float | None]:
    if balance is None:
        return {"moved_samples": None, "moved_tokens": None}
    return {
        "moved_samples": float(balance.moved_samples.sum() / balance.samples.sum()),
        "moved_tokens": float(balance.moved_tokens.sum() / balance.tokens.sum()),
    }


def _throughput(row: Row) -> float:
    return row.speed.tokens_per_second.value if row.speed else 0.0
