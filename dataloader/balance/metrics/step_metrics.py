"""Metrics of balancing, of one step or of many: idle time, loads, moved samples, and times.

A synchronous step lasts as long as its heaviest rank, and the others are idle meanwhile. Of many steps, the idle share
is their idle rank time over their whole rank time, and the speed-up is the ratio of their total times. The log,
TensorBoard and all tables derive from the declaration of `MetricsSummary`.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.strategies import Assignment, lower_bound, unbalanced

_EVEN: Final = 0.001  # a lower bound this close to the mean load leaves nobody waiting


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of one step, equal on every rank except for times. W is the number of ranks, B the rows of each."""

    epoch: int
    step: int
    """Number of the step within the iteration."""
    is_balanced: bool = True
    """False in steps that `BalanceConfig.compare_every` leaves unbalanced for comparison."""
    before: NDArray[np.int64]
    """[W]: load of each rank before balancing: the cost of the samples that it loaded."""
    after: NDArray[np.int64]
    """[W]: load of each rank after balancing: the cost of the samples that it trains on."""
    lower_bound: int
    """A load that the heaviest rank has at least, whatever the assignment."""
    rank_tokens: NDArray[np.int64]
    """[W]: tokens that each rank trains on; see `cost.count_tokens`. With a PaddedCost, padding included."""
    rank_squares: NDArray[np.float64]
    """[W]: sum of the squared tokens of the samples that each rank trains on."""
    loaded_tokens: NDArray[np.int64]
    """[B]: tokens of the samples that rank 0 loaded, as a sample of the data; 0 for padding."""
    longest: int
    """Tokens of the most expensive sample."""
    samples: int
    """Samples of all ranks; the next five fields also count all ranks."""
    moved_samples: int
    """Samples that another rank trains on than loaded them."""
    tokens: int
    moved_tokens: int
    sample_bytes: int
    """Bytes of the samples in every field, without padding and alignment."""
    moved_bytes: int
    gather_seconds: float = 0.0
    """Time of the metadata all-gather, on this rank, in the background."""
    plan_seconds: float = 0.0
    """Time to plan the step, on this rank, in the background."""
    exchange_seconds: float = 0.0
    """Time to pack, wait for the collective and unpack on this rank's training thread; on a GPU, to enqueue that."""
    waited_seconds: float = 0.0
    """Time that this rank's training thread waited for a plan that was not ready."""
    compute_seconds: NDArray[np.float64] | None = None
    """[W]: measured time that each rank computes before it waits for others; None without a `training.StepTimer`."""
    wait_seconds: NDArray[np.float64] | None = None
    """[W]: measured time that each rank waits for others."""

    @property
    def ratio_before(self) -> float:
        """Heaviest load over the lower bound, before balancing; 1 if no sample costs anything."""
        return int(self.before.max()) / self.lower_bound if self.lower_bound else 1.0

    @property
    def ratio_after(self) -> float:
        """See `ratio_before`."""
        return int(self.after.max()) / self.lower_bound if self.lower_bound else 1.0

    @property
    def lasts_one_sample(self) -> bool:
        """Whether the step lasts as long as its longest sample, which costs more than an equal share."""
        mean = float(self.after.sum(dtype=np.float64)) / len(self.after)
        return self.lower_bound > max(math.ceil(mean), (1 + _EVEN) * mean)


def measure_step(
    assignment: Assignment,
    *,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    sample_bytes: NDArray[np.int64],
    moved: NDArray[np.bool_] | None = None,
    **others: Any,
) -> StepMetrics:
    """Compare a step before and after balancing, given int64 [W, B] with 0 for padding, and further fields by name.

    `moved` None: rows are of the ranks that have loaded them.
    """
    moved = assignment.moved if moved is None else moved
    return StepMetrics(
        before=unbalanced(assignment.rank_of >= 0, padded=assignment.padded).loads(costs),
        after=assignment.loads(costs),
        lower_bound=lower_bound(costs, len(costs), padded=assignment.padded),
        rank_tokens=assignment.loads(tokens),
        rank_squares=assignment.loads(np.square(tokens, dtype=np.float64)),
        loaded_tokens=tokens[0],
        longest=int(tokens.flat[np.argmax(costs)]),
        samples=int(np.count_nonzero(assignment.rank_of >= 0)),
        moved_samples=int(np.count_nonzero(moved)),
        tokens=int(tokens.sum()),
        moved_tokens=int(tokens[moved].sum()),
        sample_bytes=int(sample_bytes.sum()),
        moved_bytes=int(sample_bytes[moved].sum()),
        **{"epoch": 0, "step": 0, **others},
    )


class RankTimes(NamedTuple):
    """What each of W ranks had to train in n measured steps, and how long it computed: float64 [n, W] each."""

    loads: NDArray[np.float64]
    """By the cost that has planned the step."""
    tokens: NDArray[np.float64]
    squares: NDArray[np.float64]
    seconds: NDArray[np.float64]


class Unit(enum.Enum):
    """The unit of a number of a summary, which decides how it is shown."""

    RATIO = "{:.3f}"
    SPEEDUP = "{:.2f}x"
    SHARE = "{:.1%}"
    COUNT = "{:,.0f}"
    SECONDS = "{:,.2f} ms"

    def show(self, value: float) -> str:
        """Return a value as text."""
        return self.value.format(1e3 * value if self is Unit.SECONDS else value)


def _mean(*weights: str, default: float = 0.0) -> Any:
    """Declare a mean over steps, weighted by other fields, and its value where these are all 0."""
    return field(default=default, metadata={"weights": weights or ("steps",)})


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSummary:
    """One or more steps in a few numbers: means over the steps unless a field says otherwise.

    Steps that were left unbalanced for comparison count only as `compared_steps`. Without samples, tokens or cost, a
    share is 0 and a ratio 1.
    """

    steps: int = 0
    """Number of balanced steps."""
    heaviest_before: float = _mean()
    """Load of the heaviest rank before balancing; `heaviest_after`: after balancing."""
    heaviest_after: float = _mean()
    mean_before: float = _mean()
    """Mean load of the ranks before balancing; `mean_after` differs only if samples are padded."""
    mean_after: float = _mean()
    ratio_before: float = _mean(default=1.0)
    ratio_after: float = _mean(default=1.0)
    worst_after: float = 1.0
    """Heaviest load over the lower bound after balancing, maximum over steps."""
    one_sample: float = _mean()
    """Share of steps that last as long as their longest sample; see `StepMetrics.lasts_one_sample`."""
    longest: float = _mean()
    moved_samples: float = _mean("steps", "samples")
    """Share of the samples that moved; `moved_tokens`: share of the tokens."""
    moved_tokens: float = _mean("steps", "tokens")
    moved_bytes: float = _mean()
    samples: float = _mean()
    tokens: float = _mean()
    sample_bytes: float = _mean()
    gather_seconds: float = _mean()
    plan_seconds: float = _mean()
    exchange_seconds: float = _mean()
    waited_seconds: float = _mean()
    measured_steps: int = 0
    """Balanced steps with measured times."""
    step_seconds: float = _mean("measured_steps")
    """Measured time of a step."""
    idle_seconds: float = _mean("measured_steps")
    """Measured time that a rank waits for the slowest rank of a step, mean over ranks."""
    compared_steps: int = 0
    """Unbalanced steps with measured times, for `compared_step_seconds` and `compared_idle_seconds`."""
    compared_step_seconds: float = _mean("compared_steps")
    compared_idle_seconds: float = _mean("compared_steps")

    @property
    def idle_before(self) -> float:
        """Predicted share of rank time spent waiting for the heaviest rank of each step, before balancing."""
        return 1 - self.mean_before / self.heaviest_before if self.heaviest_before else 0.0

    @property
    def idle_after(self) -> float:
        """See `idle_before`."""
        return 1 - self.mean_after / self.heaviest_after if self.heaviest_after else 0.0

    @property
    def speedup(self) -> float:
        """Predicted speed-up: the sum of the heaviest loads before balancing over their sum after it."""
        return self.heaviest_before / self.heaviest_after if self.heaviest_after else 1.0

    @property
    def measured_idle_before(self) -> float:
        """Share of rank time spent waiting for the slowest rank, measured in the unbalanced steps."""
        return self.compared_idle_seconds / self.compared_step_seconds if self.compared_step_seconds else 0.0

    @property
    def measured_idle_after(self) -> float:
        """Share of rank time spent waiting for the slowest rank, measured in the balanced steps."""
        return self.idle_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def measured_speedup(self) -> float:
        """Time of an unbalanced step over that of a balanced one, measured; 0 if one of them was not."""
        return self.compared_step_seconds / self.step_seconds if self.step_seconds else 0.0


class Shown(NamedTuple):
    """A number of a summary that people look at."""

    name: str
    label: str
    unit: Unit
    counted_by: str = "steps"  # the number is not known where this one is 0


SHOWN: Final = (
    Shown("idle_before", "idle before balancing, predicted", Unit.SHARE),
    Shown("measured_idle_before", "idle before balancing, measured", Unit.SHARE, "compared_steps"),
    Shown("idle_after", "idle after balancing, predicted", Unit.SHARE),
    Shown("measured_idle_after", "idle after balancing, measured", Unit.SHARE, "measured_steps"),
    Shown("speedup", "speed-up, predicted", Unit.SPEEDUP),
    Shown("measured_speedup", "speed-up, measured", Unit.SPEEDUP, "measured_speedup"),
    Shown("step_seconds", "step time", Unit.SECONDS, "measured_steps"),
    Shown("compared_step_seconds", "step time without balancing", Unit.SECONDS, "compared_steps"),
    Shown("one_sample", "steps as long as their longest sample", Unit.SHARE),
    Shown("longest", "tokens of the most expensive sample", Unit.COUNT),
    Shown("ratio_before", "heaviest load / lower bound, before", Unit.RATIO),
    Shown("ratio_after", "heaviest load / lower bound, after", Unit.RATIO),
    Shown("worst_after", "heaviest load / lower bound, worst step", Unit.RATIO),
    Shown("samples", "samples per step, all ranks together", Unit.COUNT),
    Shown("tokens", "tokens per step", Unit.COUNT),
    Shown("sample_bytes", "bytes per step", Unit.COUNT),
    Shown("moved_samples", "samples moved to another rank", Unit.SHARE),
    Shown("moved_tokens", "tokens moved", Unit.SHARE),
    Shown("moved_bytes", "bytes moved per step", Unit.COUNT),
    Shown("gather_seconds", "in the background: metadata all-gather", Unit.SECONDS),
    Shown("plan_seconds", "in the background: plan", Unit.SECONDS),
    Shown("exchange_seconds", "exposed: exchange", Unit.SECONDS),
    Shown("waited_seconds", "exposed: wait for plans", Unit.SECONDS),
)


def shown_numbers(summary: MetricsSummary) -> dict[str, float]:
    """Return the numbers of a summary that people look at and that are known, by name, in the order of `SHOWN`."""
    return {shown.name: getattr(summary, shown.name) for shown in SHOWN if getattr(summary, shown.counted_by)}


def shown_texts(summary: MetricsSummary) -> dict[str, str]:
    """Return the same numbers as texts, by their labels."""
    known = shown_numbers(summary)
    return {shown.label: shown.unit.show(known[shown.name]) for shown in SHOWN if shown.name in known}


def summarize(steps: Sequence[StepMetrics]) -> MetricsSummary:
    """Summarize steps; no steps give a summary of perfect balance."""
    return combine([_summarize_step(step) for step in steps])


def combine(summaries: Sequence[MetricsSummary]) -> MetricsSummary:
    """Combine summaries into one, as if all their steps had been summarized together."""
    fields = dataclasses.fields(MetricsSummary)
    values = {
        entry.name: np.array([getattr(one, entry.name) for one in summaries], dtype=np.float64) for entry in fields
    }
    combined: dict[str, Any] = {}
    for entry in fields:
        if (names := entry.metadata.get("weights")) is None:
            continue
        weights = np.prod([values[name] for name in names], axis=0)
        if weights.any():
            combined[entry.name] = float(np.average(values[entry.name], weights=weights))
    for name in ("steps", "measured_steps", "compared_steps"):
        combined[name] = int(values[name].sum())
    return MetricsSummary(**combined, worst_after=float(values["worst_after"].max(initial=1.0)))


_AS_IN_A_STEP = (
    *("ratio_before", "ratio_after", "longest", "moved_bytes", "samples", "tokens", "sample_bytes"),
    *("gather_seconds", "plan_seconds", "exchange_seconds", "waited_seconds"),
)


def _summarize_step(step: StepMetrics) -> MetricsSummary:
    timed, seconds, idle = 0, 0.0, 0.0
    if step.compute_seconds is not None and step.wait_seconds is not None:
        compute = step.compute_seconds
        timed, seconds, idle = 1, float((compute + step.wait_seconds).mean()), float(compute.max() - compute.mean())
    if not step.is_balanced:
        return MetricsSummary(compared_steps=timed, compared_step_seconds=seconds, compared_idle_seconds=idle)
    return MetricsSummary(
        steps=1,
        heaviest_before=int(step.before.max()),
        heaviest_after=int(step.after.max()),
        mean_before=float(step.before.mean()),
        mean_after=float(step.after.mean()),
        worst_after=step.ratio_after,
        one_sample=float(step.lasts_one_sample),
        moved_samples=step.moved_samples / step.samples if step.samples else 0.0,
        moved_tokens=step.moved_tokens / step.tokens if step.tokens else 0.0,
        measured_steps=timed,
        step_seconds=seconds,
        idle_seconds=idle,
        **{name: getattr(step, name) for name in _AS_IN_A_STEP},
    )
