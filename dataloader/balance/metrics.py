"""What balancing did in a step: load before and after, and what it took."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.message import StepSizes
from evenrank.dataloader.balance.partition import Assignment, lower_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One step, the same on every rank but for the times."""

    epoch: int
    step: int
    before: NDArray[np.int64]  # [W]: cost of each rank's samples as they were dealt
    after: NDArray[np.int64]  # [W]: of those that it trains
    lower_bound: int  # a load that the heaviest rank cannot be below
    samples: int  # of all ranks
    moved_samples: int  # those that are trained on another rank
    gather_seconds: float  # on this rank, in the background
    plan_seconds: float  # likewise

    @property
    def ratio_before(self) -> float:
        """The heaviest rank's load to the lower bound, without balancing; 1 if nothing costs anything."""
        return self._ratio(self.before)

    @property
    def ratio_after(self) -> float:
        """The heaviest rank's load to the lower bound, balanced."""
        return self._ratio(self.after)

    def _ratio(self, loads: NDArray[np.int64]) -> float:
        return int(loads.max()) / self.lower_bound if self.lower_bound else 1.0


def measure_step(
    sizes: StepSizes, assignment: Assignment, *, gather_seconds: float, plan_seconds: float
) -> StepMetrics:
    """Compare a step as it was dealt with what was assigned."""
    first = next(header for header in sizes.headers if not header.ended)
    return StepMetrics(
        epoch=first.epoch,
        step=first.step,
        before=sizes.costs.sum(axis=1),
        after=assignment.loads(sizes.costs),
        lower_bound=lower_bound(sizes.costs, len(sizes.headers)),
        samples=int(sizes.num_real.sum()),
        moved_samples=assignment.count_moved(),
        gather_seconds=gather_seconds,
        plan_seconds=plan_seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSummary:
    """Many steps in a few numbers. A synchronous step lasts as long as its heaviest rank."""

    steps: int
    ratio_before: float  # mean over steps, of the heaviest rank's load to the lower bound
    ratio_after: float  # likewise, balanced
    worst_after: float
    speedup: float  # sum over steps of the heaviest load before, to the same after: the cost model's expectation
    moved: float  # part of the samples that are trained on another rank


def summarize(steps: list[StepMetrics]) -> EpochSummary:
    """Sum up steps; without any, nothing is out of balance."""
    if not steps:
        return EpochSummary(steps=0, ratio_before=1.0, ratio_after=1.0, worst_after=1.0, speedup=1.0, moved=0.0)
    heaviest_before = sum(int(step.before.max()) for step in steps)
    heaviest_after = sum(int(step.after.max()) for step in steps)
    samples = sum(step.samples for step in steps)
    return EpochSummary(
        steps=len(steps),
        ratio_before=float(np.mean([step.ratio_before for step in steps])),
        ratio_after=float(np.mean([step.ratio_after for step in steps])),
        worst_after=max(step.ratio_after for step in steps),
        speedup=heaviest_before / heaviest_after if heaviest_after else 1.0,
        moved=sum(step.moved_samples for step in steps) / samples if samples else 0.0,
    )
