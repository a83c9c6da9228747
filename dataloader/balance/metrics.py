"""What balancing did in a step, or in many: loads before and after, what moved, and what it took."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.strategies import Assignment, lower_bound


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
    tokens: int  # of all ranks' samples; see `cost.tokens_of`
    moved_tokens: int
    bytes: int  # of all ranks' samples, in every field, without padding and alignment
    moved_bytes: int
    bytes_between_hosts: int = 0  # of those that move, the ones that go to another host, where the hosts are known
    gather_seconds: float = 0.0  # on this rank, in the background
    plan_seconds: float = 0.0  # likewise
    # On this rank's consumer thread: to pack, to wait for the collective, to unpack; on a GPU to enqueue all that.
    exchange_seconds: float = 0.0
    waited_seconds: float = 0.0  # on this rank's consumer thread: for a plan that was not ready

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
    assignment: Assignment,
    *,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    sizes: NDArray[np.int64],
    ranks_per_host: int | None = None,
    epoch: int = 0,
    step: int = 0,
) -> StepMetrics:
    """Compare a step as it was dealt with what was assigned; times are left at 0.

    Args:
        assignment: who trains what.
        costs: int64 [W, B], as are the others; padding is 0 in all of them.
        tokens: of each sample.
        sizes: of each sample, in bytes.
        ranks_per_host: if it is known.
        epoch: that the step is of.
        step: its number.

    """
    moved = assignment.moved
    far = np.zeros_like(moved)
    if ranks_per_host is not None:
        home = np.arange(len(costs))[:, np.newaxis]
        far = moved & (assignment.rank_of // ranks_per_host != home // ranks_per_host)
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
        bytes=int(sizes.sum()),
        moved_bytes=int(sizes[moved].sum()),
        bytes_between_hosts=int(sizes[far].sum()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSummary:
    """Many steps in a few numbers. A synchronous step lasts as long as its heaviest rank."""

    steps: int
    ratio_before: float  # mean over steps, of the heaviest rank's load to the lower bound
    ratio_after: float  # likewise, balanced
    worst_after: float
    speedup: float  # sum over steps of the heaviest load before, to the same after: the cost model's expectation
    moved_samples: float  # part of the samples that are trained on another rank
    moved_tokens: float  # likewise of the tokens
    moved_bytes: float  # bytes a step that go to another rank, over all ranks, mean
    bytes_between_hosts: float  # of those, the ones that go to another host; 0 where hosts are not known
    gather_seconds: float  # mean a step, as are the others
    plan_seconds: float
    exchange_seconds: float
    waited_seconds: float


def summarize(steps: Sequence[StepMetrics]) -> MetricsSummary:
    """Sum up steps; without any, nothing is out of balance."""
    before = sum(int(step.before.max()) for step in steps)
    after = sum(int(step.after.max()) for step in steps)
    return MetricsSummary(
        steps=len(steps),
        ratio_before=_mean([step.ratio_before for step in steps], 1.0),
        ratio_after=_mean([step.ratio_after for step in steps], 1.0),
        worst_after=max((step.ratio_after for step in steps), default=1.0),
        speedup=before / after if after else 1.0,
        moved_samples=_part([step.moved_samples for step in steps], [step.samples for step in steps]),
        moved_tokens=_part([step.moved_tokens for step in steps], [step.tokens for step in steps]),
        moved_bytes=_mean([step.moved_bytes for step in steps], 0.0),
        bytes_between_hosts=_mean([step.bytes_between_hosts for step in steps], 0.0),
        gather_seconds=_mean([step.gather_seconds for step in steps], 0.0),
        plan_seconds=_mean([step.plan_seconds for step in steps], 0.0),
        exchange_seconds=_mean([step.exchange_seconds for step in steps], 0.0),
        waited_seconds=_mean([step.waited_seconds for step in steps], 0.0),
    )


def _mean(values: Sequence[float], without_any: float) -> float:
    return float(np.mean(values)) if values else without_any


def _part(some: Sequence[int], of: Sequence[int]) -> float:
    return sum(some) / sum(of) if sum(of) else 0.0
