"""Metrics of balancing, of one step, of many, or of a line of the log: loads, moved samples, and times.

The log, TensorBoard and the table of `evenrank metrics` derive from the declaration of `MetricsSummary`.
"""

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.strategies import Assignment, lower_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One step, the same on every rank except for the times. W is the number of ranks."""

    epoch: int
    step: int
    """Number of the step within the iteration."""
    before: NDArray[np.int64]
    """[W]: load of each rank before balancing: the cost of the samples that it loaded."""
    after: NDArray[np.int64]
    """[W]: load of each rank after balancing: the cost of the samples that it trains."""
    lower_bound: int
    """A load that the heaviest rank has at least, whatever the assignment."""
    samples: int
    """Samples of all ranks, as are the next five."""
    moved_samples: int
    """Samples that are trained on another rank than the one that loaded them."""
    tokens: int
    """See `cost.count_tokens`."""
    moved_tokens: int
    sample_bytes: int
    """Bytes of the samples in every field, without padding and alignment."""
    moved_bytes: int
    gather_seconds: float = 0.0
    """Time of the metadata all-gather, on this rank, in the background."""
    plan_seconds: float = 0.0
    """Time to plan the step, on this rank, in the background."""
    exchange_seconds: float = 0.0
    """Time to pack, wait for the collective and unpack, on this rank's training thread; on a GPU, to enqueue these."""
    waited_seconds: float = 0.0
    """Time that this rank's training thread waited for a plan that was not ready."""

    @property
    def ratio_before(self) -> float:
        """Heaviest load over the lower bound, before balancing; 1 if no sample costs anything."""
        return int(self.before.max()) / self.lower_bound if self.lower_bound else 1.0

    @property
    def ratio_after(self) -> float:
        """See `ratio_before`."""
        return int(self.after.max()) / self.lower_bound if self.lower_bound else 1.0


def measure_step(
    assignment: Assignment,
    *,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    sample_bytes: NDArray[np.int64],
    epoch: int = 0,
    step: int = 0,
    gather_seconds: float = 0.0,
    plan_seconds: float = 0.0,
) -> StepMetrics:
    """Compare a step before and after balancing, given int64 [W, B] with 0 for padding; the other times remain 0."""
    moved = assignment.moved
    return StepMetrics(
        epoch=epoch,
        step=step,
        before=costs.sum(axis=1),
        after=assignment.loads(costs),
        lower_bound=lower_bound(costs, len(costs)),
        samples=int(np.count_nonzero(assignment.rank_of >= 0)),
        moved_samples=int(np.count_nonzero(moved)),
        tokens=int(tokens.sum()),
        moved_tokens=int(tokens[moved].sum()),
        sample_bytes=int(sample_bytes.sum()),
        moved_bytes=int(sample_bytes[moved].sum()),
        gather_seconds=gather_seconds,
        plan_seconds=plan_seconds,
    )


class Unit(enum.Enum):
    """The unit of a field of `MetricsSummary`, which decides how it is shown."""

    RATIO = enum.auto()
    SPEEDUP = enum.auto()
    FRACTION = enum.auto()
    BYTES = enum.auto()
    SECONDS = enum.auto()


_FIRST = ("epoch", "step", "seen")  # in a line of the log
_LARGEST = 1 << 63  # loads are int64, and no other number is larger; sums of these do not overflow float64
_AS_IN_A_STEP = (
    *("ratio_before", "ratio_after", "moved_bytes", "samples", "tokens", "sample_bytes"),
    *("gather_seconds", "plan_seconds", "exchange_seconds", "waited_seconds"),
)

_Combine = Callable[[str, Sequence["MetricsSummary"]], Any]


def _values(name: str, summaries: Sequence["MetricsSummary"]) -> NDArray[np.float64]:
    return np.array([getattr(summary, name) for summary in summaries], dtype=np.float64)


def _sum(name: str, summaries: Sequence["MetricsSummary"]) -> int:
    return int(_values(name, summaries).sum())


def _mean(name: str, summaries: Sequence["MetricsSummary"]) -> float:
    return float(np.average(_values(name, summaries), weights=_values("steps", summaries)))


def _max(name: str, summaries: Sequence["MetricsSummary"]) -> float:
    return float(_values(name, summaries).max())


def _fraction(total: str, name: str, summaries: Sequence["MetricsSummary"]) -> float:
    weights = _values("steps", summaries) * _values(total, summaries)
    return float(np.average(_values(name, summaries), weights=weights)) if weights.any() else 0.0


_of_samples, _of_tokens = functools.partial(_fraction, "samples"), functools.partial(_fraction, "tokens")


def _speedup(name: str, summaries: Sequence["MetricsSummary"]) -> float:
    after = _mean("heaviest_after", summaries)
    return _mean("heaviest_before", summaries) / after if after else 1.0


def _metric(
    combine: _Combine,
    label: str | None = None,
    unit: Unit | None = None,
    *,
    default: float = 0.0,
    log_key: str | None = None,
) -> Any:
    """Declare a field: how summaries combine, its label and unit if tables show it, and its value without any steps."""
    return field(default=default, metadata={"combine": combine, "label": label, "unit": unit, "log_key": log_key})


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSummary:
    """One or more steps in a few numbers. A synchronous step lasts as long as its heaviest rank.

    A number that is not described here is the mean over the steps of that of `StepMetrics`. Where all steps together
    have no samples, no tokens or no cost, a fraction is 0 and a ratio 1.
    """

    steps: int = _metric(_sum, default=0)
    ratio_before: float = _metric(_mean, "load before balancing (heaviest rank / lower bound)", Unit.RATIO, default=1.0)
    ratio_after: float = _metric(_mean, "load after balancing", Unit.RATIO, default=1.0)
    worst_after: float = _metric(_max, "worst load after balancing", Unit.RATIO, default=1.0)
    """Heaviest load over the lower bound after balancing, maximum over steps."""
    speedup: float = _metric(_speedup, "expected speed-up", Unit.SPEEDUP, default=1.0)
    """Sum over steps of the heaviest load before balancing, divided by the sum after: expected by the cost model."""
    moved_samples: float = _metric(_of_samples, "samples moved to another rank", Unit.FRACTION)
    """Fraction of the samples that moved; `moved_tokens` is that of the tokens."""
    moved_tokens: float = _metric(_of_tokens, "tokens moved", Unit.FRACTION)
    moved_bytes: float = _metric(_mean, "bytes moved per step", Unit.BYTES)
    gather_seconds: float = _metric(_mean, "in the background: metadata all-gather", Unit.SECONDS)
    plan_seconds: float = _metric(_mean, "in the background: plan", Unit.SECONDS)
    exchange_seconds: float = _metric(_mean, "exposed: exchange", Unit.SECONDS)
    waited_seconds: float = _metric(_mean, "exposed: wait for plans", Unit.SECONDS)
    heaviest_before: float = _metric(_mean)
    """Heaviest load of the step, mean per step, as is the next one."""
    heaviest_after: float = _metric(_mean)
    samples: float = _metric(_mean)
    tokens: float = _metric(_mean)
    sample_bytes: float = _metric(_mean, log_key="bytes")


def shown_fields() -> tuple["dataclasses.Field[Any]", ...]:
    """Return the fields of `MetricsSummary` that people look at; their metadata has a `label` and a `unit`."""
    return tuple(entry for entry in dataclasses.fields(MetricsSummary) if entry.metadata["label"] is not None)


def summarize(steps: Sequence[StepMetrics]) -> MetricsSummary:
    """Summarize steps; no steps give a summary of perfect balance."""
    return combine([_summarize_step(step) for step in steps])


def combine(summaries: Sequence[MetricsSummary]) -> MetricsSummary:
    """Combine summaries into one, as if all their steps had been summarized together."""
    fields = dataclasses.fields(MetricsSummary) if summaries else ()
    return MetricsSummary(**{entry.name: entry.metadata["combine"](entry.name, summaries) for entry in fields})


def _summarize_step(step: StepMetrics) -> MetricsSummary:
    before, after = int(step.before.max()), int(step.after.max())
    return MetricsSummary(
        steps=1,
        worst_after=step.ratio_after,
        speedup=before / after if after else 1.0,
        moved_samples=step.moved_samples / step.samples if step.samples else 0.0,
        moved_tokens=step.moved_tokens / step.tokens if step.tokens else 0.0,
        heaviest_before=before,
        heaviest_after=after,
        **{name: getattr(step, name) for name in _AS_IN_A_STEP},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord(MetricsSummary):
    """A line of the log that `writers.JsonLines` writes: the last few steps summarized, and the loads of the last.

    {"epoch": 0, "step": 99, "seen": 100, "steps": 10, "ratio_before": 1.4, ..., "before": [9, 2], "after": [6, 5], ...}

    Readers ignore unknown fields, and skip lines that are not records, such as the incomplete last line of a job that
    was killed. W is the number of ranks.
    """

    epoch: int
    step: int
    """Number of the last step, which restarts at 0 with each epoch and after each resume."""
    seen: int
    """Steps that the writer had seen, the last one included."""
    before: NDArray[np.int64]
    """[W]: load of each rank before balancing."""
    after: NDArray[np.int64]
    """[W]: load of each rank after balancing."""
    lower_bound: int
    """Lower bound of the heaviest load."""

    @classmethod
    def of(cls, steps: Sequence[StepMetrics], *, seen: int) -> Self:
        """Return the record of at least one step."""
        last = steps[-1]
        return cls(
            **dataclasses.asdict(summarize(steps)),
            epoch=int(last.epoch),
            step=int(last.step),
            seen=seen,
            before=last.before,
            after=last.after,
            lower_bound=int(last.lower_bound),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as an object of JSON: numbers and lists of integers."""
        values = {log_key(entry): getattr(self, entry.name) for entry in dataclasses.fields(self)}
        values |= {"before": self.before.tolist(), "after": self.after.tolist()}
        return {key: values[key] for key in sorted(values, key=lambda key: key not in _FIRST)}


def log_key(entry: "dataclasses.Field[Any]") -> str:
    """Return the key in the log of a field of `LogRecord`."""
    return entry.metadata.get("log_key") or entry.name


def parse_record(line: bytes) -> LogRecord:
    """Parse a line of a log; a ValueError says why it is not a record."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # json would call every line "line 1"
        raise ValueError("it is not JSON") from error
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    values = {field.name: _value(entry, log_key(field), field.type) for field in dataclasses.fields(LogRecord)}
    if values["steps"] < 1:
        raise ValueError("'steps' is below 1")
    if len(values["before"]) != len(values["after"]):
        raise ValueError("'before' and 'after' differ in length")
    return LogRecord(**values)


def _value(entry: dict[str, Any], key: str, kind: Any) -> Any:
    """Return the value of a field of the type `kind`: int, float, or an array of int64."""
    if key not in entry:
        raise ValueError(f"{key!r} is missing")
    value = entry[key]
    if kind is int and _is_count(value):
        return value
    if kind is float and type(value) in (int, float) and 0 <= value <= _LARGEST:
        return float(value)
    if kind not in (int, float) and isinstance(value, list) and value and all(_is_count(load) for load in value):
        return np.array(value, dtype=np.int64)
    raise ValueError(f"{key!r} is {json.dumps(value)[:40]}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST
