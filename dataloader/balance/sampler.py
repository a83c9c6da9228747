"""`Sampler`: balance with no exchange, where every rank can read every sample.

A step is planned from the lengths of its samples, which the store knows without reading them, by the same partition as
a Balancer's. So each rank comes to the same assignment alone, and reads just the samples that it trains.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.code import code_hash
from evenrank.dataloader.balance.assigning import assign_step, measure_assignment
from evenrank.dataloader.balance.control.consistency import describe_cost
from evenrank.dataloader.balance.control.process_group import Group
from evenrank.dataloader.balance.cost import Cost, count_tokens, scaled_costs
from evenrank.dataloader.balance.metrics import StepMetrics
from evenrank.dataloader.balance.partition.registry import find_strategy
from evenrank.dataloader.balance.settings import (
    DEFAULTS,
    BalancerSettings,
    OnOverflow,
    PartitionSettings,
    check_topology,
)
from evenrank.dataloader.batch_schema import BatchSchema
from evenrank.dataloader.collate.lengths import SampleLengths
from evenrank.dataloader.loss_key import loss_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """How a loader balances its steps over the ranks; the same on all ranks, except for `on_step`."""

    cost: Cost
    """What a sample costs; see `evenrank.dataloader.balance.cost`."""
    strategy: str = DEFAULTS.partition.strategy
    """See `Balancer`; so are all options but the last three."""
    tolerance: float = DEFAULTS.partition.tolerance
    max_tokens_per_rank: int | None = DEFAULTS.partition.max_tokens_per_rank
    on_overflow: OnOverflow = DEFAULTS.partition.on_overflow
    equal_counts: bool = DEFAULTS.partition.equal_counts
    topology: tuple[int, int] | None = DEFAULTS.topology
    group: Group | None = field(default=None, compare=False)
    """The data-parallel ranks, which compare their loaders when these are created. None: the default process group or,
    without one, nothing is compared."""
    timeout: timedelta = DEFAULTS.timeout
    """How long the comparison waits for other ranks."""
    on_step: Callable[[StepMetrics], None] | None = field(default=None, compare=False)
    """Called by the consumer's thread with the metrics of each step, before its batch is handed out. What would have
    moved between ranks counts as moved; nothing is gathered or exchanged, so these times are 0."""

    @property
    def settings(self) -> BalancerSettings:
        """The same as settings of a Balancer.

        Raises:
            ConfigError: one is out of range.

        """
        return BalancerSettings(
            partition=PartitionSettings(
                strategy=self.strategy,
                tolerance=self.tolerance,
                max_tokens_per_rank=self.max_tokens_per_rank,
                on_overflow=self.on_overflow,
                equal_counts=self.equal_counts,
            ),
            topology=self.topology,
            timeout=self.timeout,
        )

    def identity(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        names = ("strategy", "tolerance", "max_tokens_per_rank", "on_overflow", "equal_counts", "topology")
        options = {name: getattr(self, name) for name in names}
        return options | {"cost": describe_cost(self.cost), "the code of evenrank": code_hash()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep:
    """What a rank trains in a step."""

    indices: NDArray[np.int64]
    """[n]: its samples, as indices into those of all ranks, ascending."""
    costs: NDArray[np.int64]
    """[n]: of each of its samples, scaled as the loads in `metrics`, so that they add up to them."""
    tokens: NDArray[np.int64]
    """[n]: of each of its samples; see `cost.count_tokens`."""
    num_rows: int
    """Rows of its batch, padding included."""
    world_loss_tokens: int
    """Loss tokens of all ranks."""
    metrics: StepMetrics
    """What balancing did."""


class Sampler:
    """Plans the steps of one rank. It keeps nothing between steps, so any thread may plan any step.

    Args:
        config: how steps are balanced.
        schema: of the batches.
        rank: of this process.
        world_size: the number of ranks.

    Raises:
        ConfigError: an option is out of range, or the strategy is unknown.

    """

    def __init__(self, config: BalanceConfig, schema: BatchSchema, *, rank: int, world_size: int) -> None:
        self._cost = config.cost
        self._settings = config.settings
        self._schema = schema
        self._rank = rank
        self._world_size = world_size
        find_strategy(config.strategy, equal_counts=config.equal_counts)
        if config.topology is not None:
            check_topology(config.topology, world_size)

    def plan(self, samples: SampleLengths, *, epoch: int, step: int) -> SampledStep:
        """Plan a step.

        Args:
            samples: of all ranks, in the order of their positions: the first B would be loaded by rank 0, and so on.
            epoch: of the step.
            step: its number.

        Raises:
            ConfigError: the cost or the strategy returns what it must not, or `max_tokens_per_rank` cannot be kept.

        """
        started = time.perf_counter()
        world_size, batch_size = self._world_size, self._schema.batch_size
        num_samples = len(samples.num_candidates)
        num_real = np.clip(num_samples - batch_size * np.arange(world_size), 0, batch_size)
        shape = (world_size, batch_size)
        lengths = np.zeros((len(samples.of_keys), world_size * batch_size), dtype=np.int64)
        for row, of_key in zip(lengths, samples.of_keys.values(), strict=True):
            row[:num_samples] = of_key
        candidates = np.zeros(world_size * batch_size, dtype=np.int64)
        candidates[:num_samples] = samples.num_candidates
        by_key = self._schema.lengths_by_key(lengths)
        costs = scaled_costs(self._cost, by_key, candidates, num_real=num_samples, world_size=1).reshape(shape)
        tokens = count_tokens(self._cost, by_key, world_size * batch_size)
        tokens[num_samples:] = 0
        tokens = tokens.reshape(shape)
        assignment = assign_step(self._settings, costs=costs, tokens=tokens, num_real=num_real)
        indices = np.flatnonzero(assignment.rank_of.reshape(-1) == self._rank)
        plan_seconds = time.perf_counter() - started
        metrics = measure_assignment(
            assignment,
            self._settings,
            self._schema,
            costs=costs,
            tokens=tokens,
            lengths=lengths,
            num_real=num_real,
            epoch=epoch,
            step=step,
        )
        are_real = np.ones(num_samples, dtype=np.bool_)
        return SampledStep(
            indices=indices,
            costs=costs.reshape(-1)[indices],
            tokens=tokens.reshape(-1)[indices],
            num_rows=batch_size if assignment.equal_counts else len(indices),
            world_loss_tokens=int(loss_tokens(self._schema.loss_key, samples.of_keys, are_real).sum()),
            metrics=replace(metrics, plan_seconds=plan_seconds),
        )
