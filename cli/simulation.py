"""Simulation of steps on many ranks: draw the samples' lengths and run the planner, without GPUs or processes."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.cost import TokenCost, count_tokens, scaled_costs
from evenrank.dataloader.balance.metrics import MetricsSummary, measure_step, summarize
from evenrank.dataloader.balance.partition.strategies import Assignment, partition
from evenrank.dataloader.balance.warmup import warm_up
from evenrank.datasets.distributions import Distribution
from evenrank.datasets.schema import ACTION, ITEM_ID

# In a SequenceBatch an event is an item and an action; a sample has a label, its number of candidates and its id.
_BYTES_PER_EVENT = 16
_BYTES_PER_SAMPLE = 24


@dataclass(frozen=True, kw_only=True)
class LengthSource:
    """A source of history lengths, cut to `max_length`: those of a dataset, [rows], or a distribution."""

    lengths: NDArray[np.int64] | None = None
    distribution: Distribution | None = None
    max_length: int | None = None

    def draw(self, rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
        """Draw lengths, int64 [num_samples]; rows of a dataset without replacement, unless it has too few."""
        if self.lengths is not None:
            drawn = rng.choice(self.lengths, num_samples, replace=self.repeats_rows(num_samples))
        else:
            assert self.distribution is not None
            drawn = self.distribution.sample(rng, num_samples)
        return drawn if self.max_length is None else np.minimum(drawn, self.max_length)

    def repeats_rows(self, num_samples: int) -> bool:
        """Return whether a step of `num_samples` samples needs more rows than the dataset has."""
        return self.lengths is not None and num_samples > len(self.lengths)


class SimulatedStep(NamedTuple):
    """A step of W ranks with B samples each; arrays are [W, B]."""

    lengths: NDArray[np.int64]  # events of each sample
    costs: NDArray[np.int64]  # scaled as a Balancer does, so that those of a step can be summed
    tokens: NDArray[np.int64]
    assignment: Assignment
    plan_seconds: float


def simulated_steps(
    source: LengthSource, balance: BalanceConfig, world_size: int, *, batch_size: int, steps: int, seed: int = 0
) -> Iterator[SimulatedStep]:
    """Draw steps and plan each; the arguments are those of `simulate`."""
    warm_up(balance.strategy, limits_tokens=balance.max_tokens_per_rank is not None)
    rng = np.random.default_rng((seed, world_size))
    num_samples, shape = world_size * batch_size, (world_size, batch_size)
    contextual = balance.cost.contextual if isinstance(balance.cost, TokenCost) else ()
    for _ in range(steps):
        lengths = source.draw(rng, num_samples)
        by_key = {ITEM_ID: lengths, ACTION: lengths, **dict.fromkeys(contextual, np.ones_like(lengths))}
        costs = scaled_costs(
            balance.cost, by_key, np.zeros_like(lengths), num_real=num_samples, samples_per_step=num_samples
        )
        tokens = count_tokens(balance.cost, by_key, num_samples)
        start = time.perf_counter()
        assignment = partition(costs, world_size, tokens=tokens, **balance.partition_options)
        seconds = time.perf_counter() - start
        yield SimulatedStep(lengths.reshape(shape), costs.reshape(shape), tokens.reshape(shape), assignment, seconds)


def simulate(
    source: LengthSource,
    balance: BalanceConfig,
    world_size: int,
    *,
    batch_size: int,
    steps: int,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> MetricsSummary:
    """Draw steps, the same for every strategy, balance them, and summarize their metrics.

    The cost gets the lengths of `item_id` and `action`, and one value for each `contextual` key of a `TokenCost`. Of
    the times, `plan_seconds` is the median over steps; the others are 0.
    """
    metrics, plan_seconds = [], []
    for step in simulated_steps(source, balance, world_size, batch_size=batch_size, steps=steps, seed=seed):
        sample_bytes = step.lengths * _BYTES_PER_EVENT + _BYTES_PER_SAMPLE
        metrics.append(measure_step(step.assignment, costs=step.costs, tokens=step.tokens, sample_bytes=sample_bytes))
        plan_seconds.append(step.plan_seconds)
        on_step()
    return dataclasses.replace(summarize(metrics), plan_seconds=float(np.median(plan_seconds)))
