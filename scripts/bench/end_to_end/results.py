"""`RunResult`: what a run of the training benchmark has measured, as a JSON file.

W is the number of data-parallel ranks times those that divide heads: all processes of the run. N is the number of
batches that it cycles through.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import json_records

_KIND = ("evenrank training benchmark", 1)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LIVE, PREPARED, EVEN = "live", "prepared", "even"
"""Kinds of a segment: batches that are balanced while training, by a Balancer or the loader that reads them; the same
batches, balanced before the clock starts; batches that give every rank the same lengths, of the same cost as the
step's mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the batches give each rank to do, and what is in them."""

    tokens: Ints
    """[W, N]."""
    pairs: Ints
    """[W, N]: pairs of tokens of which the first sees the second."""
    predictions: Ints
    """[W, N]: loss tokens."""
    loads: Ints
    """[W, N]: cost of the samples, by the run's cost."""
    sample_tokens: Ints
    """[W, N, rows]: tokens of each sample, 0 for padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What balancing did to each of the N batches; see `evenrank.dataloader.balance.StepMetrics`."""

    before: Ints
    """[N, D]: load of each data-parallel rank before balancing."""
    after: Ints
    """[N, D]."""
    lower_bound: Ints
    """[N]."""
    samples: Ints
    """[N]."""
    moved_samples: Ints
    """[N]."""
    tokens: Ints
    """[N]."""
    moved_tokens: Ints
    """[N]."""
    moved_bytes: Ints
    """[N]."""
    plan_seconds: Floats
    """[N]: on rank 0, in the background."""
    gather_seconds: Floats
    """[N]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive steps; those that warm up are left out."""

    kind: str
    """LIVE, PREPARED or EVEN."""
    round: int
    """From 0; kinds take turns within a round."""
    batch: Ints
    """[steps]: index of each step's batch, 0..N-1."""
    marks: Floats
    """[W, steps, 5]: when a rank's GPU reached a point of the step, in milliseconds since a moment that is the same for
    all ranks: the end of the step before; the begin of the encoder's forward, after its embeddings have come; the end
    of the forward; the end of the encoder's backward; the end of the step, its optimizer included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A run. Results of runs that failed have neither work nor segments."""

    name: str
    """Of the run."""
    adds_to: str | None
    """The run whose settings it has, but for those of its own."""
    lengths: str
    """Name of the distribution of lengths."""
    gpus: int
    """Processes, each with a GPU."""
    data_ranks: int
    """Ranks over which samples are balanced: fewer than `gpus` if some divide heads."""
    settings: dict[str, Any]
    """All settings of `TrainConfig`."""
    workload: dict[str, Any]
    """All fields of `Workload`."""
    environment: dict[str, Any]
    """gpu, host_cpus, torch, cuda, nccl, triton, torchrec, evenrank (a commit), date."""
    failure: str | None = None
    """Why there are no measurements, such as "out of memory", in one line."""
    peak_flops: float | None = None
    """FLOP/s of one GPU."""
    flops: dict[str, int] | None = None
    """Of the model on one GPU, forward and backward: per_token, per_pair, per_prediction."""
    cost: dict[str, Any] | None = None
    """Fields of the cost, and its class as `name`."""
    balanced: Work | None = None
    """Of the batches that are trained, after balancing."""
    even: Work | None = None
    """Of the even batches."""
    balance: Balance | None = None
    segments: tuple[Segment, ...] = ()
    peak_allocated: Ints | None = None
    """[W]: bytes of device memory, at most, while training."""
    peak_reserved: Ints | None = None
    """[W]: bytes that the caching allocator held."""

    def save(self, path: Path) -> None:
        """Write it to a file, atomically."""
        json_records.save(path, _KIND, _to_json(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing, damaged, or of another version.
        """
        return json_records.load(path, _KIND, cls._parse, remedy="delete it and run it again")

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Self:
        for name, kind in (("balanced", Work), ("even", Work), ("balance", Balance)):
            content[name] = content[name] and _from_json(kind, content[name])
        content["segments"] = tuple(_from_json(Segment, segment) for segment in content["segments"])
        result: Self = _from_json(cls, content)
        return result


def _to_json(record: Any) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return _to_json(value)
        if isinstance(value, np.ndarray):
            return np.round(value, 4).tolist() if value.dtype.kind == "f" else value.tolist()
        if isinstance(value, tuple):
            return [convert(one) for one in value]
        return value

    return {field.name: convert(getattr(record, field.name)) for field in dataclasses.fields(record)}


def _from_json(kind: Any, content: dict[str, Any]) -> Any:
    dtypes: dict[Any, Any] = {Ints: np.int64, Floats: np.float64, Ints | None: np.int64}
    values = {}
    for field in dataclasses.fields(kind):
        value, dtype = content[field.name], dtypes.get(field.type)
        values[field.name] = value if dtype is None or value is None else np.asarray(value, dtype=dtype)
    return kind(**values)


Statistic = Callable[[Floats], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A number, and between which values it was in single rounds."""

    value: float
    """Of all rounds."""
    low: float
    """Smallest of a round."""
    high: float
    """Largest of a round."""

    @classmethod
    def of_rounds(cls, values: Sequence[float], statistic: Statistic = np.median) -> Self | None:
        """Return a statistic of the rounds and their range; None without rounds.

        By default the median, because the mean would follow a single round in which something else keeps a host busy.
        """
        if not values:
            return None
        return cls(value=float(statistic(np.array(values))), low=min(values), high=max(values))

    def over(self, other: Self) -> "Spread":
        """Return the ratio to another number, of other rounds: its range is that of all pairs of rounds."""
        return Spread(value=self.value / other.value, low=self.low / other.high, high=self.high / other.low)

    @property
    def noise(self) -> float:
        """Half the range of the rounds; 0 for a single round, which says nothing about noise."""
        return (self.high - self.low) / 2


def step_ms(segment: Segment) -> Floats:
    """Return what each step took on each rank: [W, steps], from the end of the step before to its own end."""
    times: Floats = segment.marks[..., 4] - segment.marks[..., 0]
    return times


def compute_ms(segment: Segment) -> Floats:
    """Return how long each rank computed: [W, steps], from the encoder's forward to the end of its backward.

    Embeddings are there when it begins, and gradients of other ranks and the optimizer come after it, so that waiting
    for other ranks is not included.
    """
    times: Floats = segment.marks[..., 3] - segment.marks[..., 1]
    return times


def job_ms(segment: Segment) -> Floats:
    """Return what each step took: [steps], the mean over ranks.

    Not the maximum: ranks do not end a step at the same moment, and one that ends a step late begins the next one late,
    so that maxima would add up to more than the segment took.
    """
    times: Floats = step_ms(segment).mean(axis=0)
    return times


def segments_of(result: RunResult, kind: str) -> tuple[Segment, ...]:
    """Return the segments of a kind that have steps."""
    return tuple(segment for segment in result.segments if segment.kind == kind and len(segment.batch))


def by_round(result: RunResult, kinds: tuple[str, str], statistic: Statistic) -> list[tuple[float, float]]:
    """Return the mean over batches of a step's time with two kinds of batches, for each round that has both: [rounds].

    The time of a batch is the statistic of the round's steps with it; that of a batch which only one of the kinds has
    trained does not count. So steps are compared with those of the same samples: batches differ far more than kinds do,
    and the noise of a median over all steps would hide half a percent.
    """
    first, second = ({segment.round: segment for segment in segments_of(result, kind)} for kind in kinds)
    pairs = []
    for number in sorted(first.keys() & second.keys()):
        one, other = (_by_batch(segments[number], statistic) for segments in (first, second))
        if common := one.keys() & other.keys():
            pairs.append(
                (sum(one[key] for key in common) / len(common), sum(other[key] for key in common) / len(common))
            )
    return pairs


def _by_batch(segment: Segment, statistic: Statistic) -> dict[int, float]:
    times = job_ms(segment)
    return {int(batch): float(statistic(times[segment.batch == batch])) for batch in np.unique(segment.batch)}


def ratio(result: RunResult, kinds: tuple[str, str], statistic: Statistic = np.median) -> Spread | None:
    """Return the statistic over rounds of `by_round` with the first kind of batches over that with the second."""
    return Spread.of_rounds([one / other for one, other in by_round(result, kinds, statistic)], statistic)
