"""Steps of many ranks, dealt and balanced on this machine alone: no GPUs, no processes, only the planner."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance import Cost, MetricsSummary, partition, summarize
from evenrank.dataloader.balance.metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.warmup import compile_ahead
from evenrank.datasets.distributions import Distribution
from evenrank.datasets.schema import ACTION, ITEM_ID

# Of a SequenceBatch: an event is an item and an action, a sample has a label, its number of candidates and its number.
_BYTES_OF_AN_EVENT = 16
_BYTES_OF_A_SAMPLE = 24


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the lengths of histories come from: those of a dataset, or a distribution."""

    lengths: NDArray[np.int64] | None = None  # of all rows
    distribution: Distribution | None = None
    most_events: int | None = None  # longer histories are cut to their newest

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw the lengths of a step's samples: int64 [size]. No row comes twice in it unless there are too few."""
        if self.lengths is not None:
            drawn = self.lengths[rng.choice(len(self.lengths), size, replace=self.is_repeated(size))]
        else:
            assert self.distribution is not None
            drawn = self.distribution.sample(rng, size)
        return drawn if self.most_events is None else np.minimum(drawn, self.most_events)

    def is_repeated(self, size: int) -> bool:
        """Whether there are fewer rows than a step of `size` samples needs."""
        return self.lengths is not None and size > len(self.lengths)


def simulate(
    source: Source,
    cost: Cost,
    world_size: int,
    *,
    batch_size: int,
    strategy: str,
    steps: int,
    tolerance: float = 0.001,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> MetricsSummary:
    """Deal steps to ranks as a loader would, balance them, and sum up.

    Args:
        source: of the lengths; the same steps are drawn for every strategy.
        cost: what a sample costs, given the lengths of `item_id` and `action`.
        world_size: the number of ranks.
        batch_size: samples of a rank in a step.
        strategy: see `partition`.
        steps: how many steps are drawn.
        tolerance: see `partition`.
        seed: of the draws.
        on_step: called after each step.

    Returns:
        The summary; `plan_seconds` is the median over steps, the other times are 0.

    """
    compile_ahead()
    rng = np.random.default_rng((seed, world_size))
    metrics: list[StepMetrics] = []
    seconds = []
    for step in range(steps):
        lengths = source.draw(rng, world_size * batch_size)
        costs = cost({ITEM_ID: lengths, ACTION: lengths}, np.zeros_like(lengths))
        begun = time.perf_counter()
        assignment = partition(costs, world_size, strategy=strategy, sizes=lengths, tolerance=tolerance)
        seconds.append(time.perf_counter() - begun)
        shape = (world_size, batch_size)
        metrics.append(
            measure_step(
                assignment,
                costs=costs.reshape(shape),
                tokens=lengths.reshape(shape),
                sizes=lengths.reshape(shape) * _BYTES_OF_AN_EVENT + _BYTES_OF_A_SAMPLE,
                step=step,
            )
        )
        on_step()
    return dataclasses.replace(summarize(metrics), plan_seconds=float(np.median(seconds)))
