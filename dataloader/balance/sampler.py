"""`Sampler`: balance with no exchange, where every rank can read every sample.

A step is planned from the lengths of its samples, which the store knows without reading them, by the same partition as
a Balancer's. So each rank comes to the same assignment alone, and reads just the samples that it trains.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

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
from evenrank.dataloader.balance.warmup import warm_up
from evenrank.dataloader.batch import name_keys
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
    """[n]: its samples, as indices into all that were planned together, ascending."""
    costs: NDArray[np.int64]
    """[n]: of each of its samples, scaled as the loads in `metrics`, so that they add up to them."""
    tokens: NDArray[np.int64]
    """[n]: of each of its samples; see `cost.count_tokens`."""
    num_rows: int
    """Rows of its batch, padding included."""
    world_loss_tokens: int
    """Loss tokens of all ranks."""
    metrics: StepMetrics | None
    """What balancing did; None if it was not measured."""


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
        warm_up()
        self._cost = config.cost
        self._settings = config.settings
        self._schema = schema
        self._rank = rank
        self._world_size = world_size
        find_strategy(config.strategy, equal_counts=config.equal_counts)
        if config.topology is not None:
            check_topology(config.topology, world_size)

    def plan(
        self, samples: Iterable[SampleLengths], steps: range, *, epoch: int, is_measured: bool
    ) -> list[SampledStep]:
        """Plan consecutive steps.

        Args:
            samples: in blocks of any size, those of all ranks in all these steps, in the order of their positions: in
                each step, the first B would be loaded by rank 0, and so on. Only the last step may have fewer than
                W * B.
            steps: their numbers.
            epoch: of the steps.
            is_measured: return metrics, too.

        Raises:
            ConfigError: the cost or the strategy returns what it must not, or `max_tokens_per_rank` cannot be kept.

        """
        started = time.perf_counter()
        num_slots = self._world_size * self._schema.batch_size
        blocks = [self._cost_of(block, with_lengths=is_measured) for block in samples]
        of_all = [_joined(values) for values in zip(*blocks, strict=True)]
        seconds = (time.perf_counter() - started) / len(steps)
        planned = []
        for index, step in enumerate(steps):
            first = index * num_slots
            of_step = _Samples(*(values[..., first : first + num_slots] for values in of_all))
            planned.append(
                self._plan_step(of_step, first, seconds=seconds, epoch=epoch, step=step, is_measured=is_measured)
            )
        return planned

    def _cost_of(self, samples: SampleLengths, *, with_lengths: bool) -> "_Samples":
        num_samples, of_keys = len(samples.num_candidates), samples.of_keys
        by_key = dict(zip(name_keys(tuple(of_keys)), of_keys.values(), strict=True))
        num_slots = self._world_size * self._schema.batch_size
        candidates = samples.num_candidates
        return _Samples(
            costs=scaled_costs(self._cost, by_key, candidates, num_real=num_samples, samples_per_step=num_slots),
            tokens=count_tokens(self._cost, by_key, num_samples),
            loss_tokens=loss_tokens(self._schema.loss_key, of_keys, np.ones(num_samples, dtype=np.bool_)),
            lengths=np.array([*of_keys.values()] if with_lengths else np.empty((0, num_samples)), dtype=np.int64),
        )

    def _plan_step(
        self, samples: "_Samples", first: int, *, seconds: float, epoch: int, step: int, is_measured: bool
    ) -> SampledStep:
        """Plan a step, given its samples, the index of the first, and how long their costs took."""
        started = time.perf_counter()
        num_samples, shape = len(samples.costs), (self._world_size, self._schema.batch_size)
        num_slots = math.prod(shape)
        num_real = None if num_samples == num_slots else _filled(num_samples, shape)
        costs, tokens = _padded(samples.costs, shape), _padded(samples.tokens, shape)
        assignment = assign_step(self._settings, costs=costs, tokens=tokens, num_real=num_real)
        indices = np.flatnonzero(assignment.rank_of.reshape(-1) == self._rank)
        plan_seconds = seconds + time.perf_counter() - started
        metrics = None
        if is_measured:
            metrics = measure_assignment(
                assignment,
                self._settings,
                self._schema,
                costs=costs,
                tokens=tokens,
                lengths=np.pad(samples.lengths, ((0, 0), (0, num_slots - num_samples))),
                num_real=num_real,
                epoch=epoch,
                step=step,
            )
            metrics = replace(metrics, plan_seconds=plan_seconds)
        return SampledStep(
            indices=first + indices,
            costs=samples.costs[indices],
            tokens=samples.tokens[indices],
            num_rows=self._schema.batch_size if assignment.equal_counts else len(indices),
            world_loss_tokens=int(samples.loss_tokens.sum()),
            metrics=metrics,
        )


class _Samples(NamedTuple):
    """What is needed of n samples to plan them."""

    costs: NDArray[np.int64]
    """[n]."""
    tokens: NDArray[np.int64]
    """[n]."""
    loss_tokens: NDArray[np.int64]
    """[n]."""
    lengths: NDArray[np.int64]
    """[K, n], or [0, n] if nothing is measured, which alone needs them."""


def _joined(blocks: tuple[NDArray[np.int64], ...]) -> NDArray[np.int64]:
    """Return blocks [..., m] one after the other: int64 [..., n]."""
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=-1)


def _filled(num_samples: int, shape: tuple[int, int]) -> NDArray[np.int64]:
    """Return the numbers of samples of W ranks that are filled one after the other, with at most B: int64 [W]."""
    world_size, batch_size = shape
    counts: NDArray[np.int64] = num_samples - batch_size * np.arange(world_size)
    return np.maximum(np.minimum(counts, batch_size), 0)


def _padded(values: NDArray[np.int64], shape: tuple[int, int]) -> NDArray[np.int64]:
    """Return values [n], n <= W * B, as int64 [W, B], with zeros after the last; without a copy if there are none."""
    if len(values) == math.prod(shape):
        return values.reshape(shape)
    padded = np.zeros(math.prod(shape), dtype=np.int64)
    padded[: len(values)] = values
    return padded.reshape(shape)
