"""Times of steps from the marks of a run: of whole steps, of computing, and their ratios between kinds of batches.

All times are in milliseconds. W is the number of processes of the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from end_to_end.results import Floats, RunResult, Segment

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
