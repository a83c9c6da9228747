"""`Sampler`: balance with no exchange, where every rank can read every sample.

A step is planned from the lengths of its samples, which the store knows without reading them, by the same partition as
a Balancer's. So each rank comes to the same assignment alone, and reads just the samples that it trains.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.hashing import mix64
from evenrank.dataloader.balance.config import DEFAULTS, BalancerSettings, OnOverflow, PartitionSettings, check_topology
from evenrank.dataloader.balance.cost import Cost, count_tokens, scaled_costs
from evenrank.dataloader.balance.metrics import StepMetrics
from evenrank.dataloader.balance.partition.registry import find_strategy
from evenrank.dataloader.balance.partition.strategies import real_rows
from evenrank.dataloader.balance.ranks.consistency import describe_cost
from evenrank.dataloader.balance.ranks.process_group import Group
from evenrank.dataloader.balance.step_windows import assign_step, assign_to_steps, measure_assignment
from evenrank.dataloader.balance.warmup import warm_up
from evenrank.dataloader.batches.batch import loss_tokens, name_keys
from evenrank.dataloader.batches.schema import BatchSchema
from evenrank.dataloader.collate.gather import SampleLengths


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """How a loader balances its steps over the ranks; the same on all ranks, except for `on_step`."""

    cost: Cost
    """What a sample costs; see `evenrank.dataloader.balance.cost`."""
    strategy: str = DEFAULTS.partition.strategy
    """See `Balancer`, which explains this and the next five options."""
    tolerance: float = DEFAULTS.partition.tolerance
    max_tokens_per_rank: int | None = DEFAULTS.partition.max_tokens_per_rank
    on_overflow: OnOverflow = DEFAULTS.partition.on_overflow
    equal_counts: bool = DEFAULTS.partition.equal_counts
    topology: tuple[int, int] | None = DEFAULTS.topology
    pack: bool = False
    """Each step has as many samples as fit `max_tokens_per_rank`, at most `batch_size` per rank, so the number of
    samples varies and the rest of the rows are padding. See `packing.py`. A sample that is longer than the limit raises
    or, with `on_overflow="warn"`, has a rank to itself, apart from samples without tokens. `drop_last` leaves out a
    last step that has room for more samples."""
    window: int = 1
    """Steps whose samples may change steps among themselves, so that fewer of them wait for samples that make their
    ranks uneven. 1: samples stay in their steps. See `window.py`."""
    group: Group | None = field(default=None, compare=False)
    """The data-parallel ranks, which compare their loaders when these are created. None: the default process group or,
    without one, nothing is compared."""
    timeout: timedelta = DEFAULTS.timeout
    """How long comparisons wait for other ranks: when loaders are created, and at the end of an epoch."""
    on_step: Callable[[StepMetrics], None] | None = field(default=None, compare=False)
    """Called by the consumer's thread with the metrics of each step, before its batch is handed out. What would have
    moved between ranks counts as moved; nothing is gathered or exchanged, so these times are 0."""

    def __post_init__(self) -> None:
        if type(self.window) is not int or self.window < 1:
            raise ConfigError(f"window must be an integer of at least 1, got {self.window!r}")
        if self.window > 1 and self.strategy == "none":
            raise ConfigError(
                f"window={self.window} needs a strategy that assigns samples to ranks, got 'none'; choose another "
                "one, or leave out window"
            )
        if self.pack:
            self._check_packing()

    def _check_packing(self) -> None:
        if self.window > 1:
            raise ConfigError(f"pack=True decides which samples a step has; leave out window={self.window}")
        if self.max_tokens_per_rank is None:
            raise ConfigError("pack=True needs max_tokens_per_rank, the tokens that fit a rank, got None; pass it")
        if not self.equal_counts:
            raise ConfigError("pack=True pads batches to batch_size rows, so it needs equal_counts=True, got False")
        if self.topology is not None:
            raise ConfigError(f"pack=True assigns samples to ranks of any host; leave out topology={self.topology}")
        if self.strategy == "none":
            raise ConfigError("pack=True needs a strategy that assigns samples to ranks, got 'none'")

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

    def rank_invariants(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        names = ("strategy", "tolerance", "max_tokens_per_rank", "on_overflow", "equal_counts", "topology")
        options = {name: getattr(self, name) for name in (*names, "pack", "window")}
        return options | {"cost": describe_cost(self.cost)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlan:
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
    plan_hash: int
    """Hash of which rank trains which sample."""
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
        slots = np.arange(world_size * schema.batch_size, dtype=np.uint64)
        self._multipliers = mix64(slots) | np.uint64(1)  # of `_hash`
        self._max_tokens = config.max_tokens_per_rank if config.pack else None  # a longer sample counts as this many
        find_strategy(config.strategy, equal_counts=config.equal_counts)
        if config.window > 1:
            find_strategy(config.strategy, equal_counts=True)
        if config.topology is not None:
            check_topology(config.topology, world_size)

    def count_tokens(self, samples: SampleLengths) -> NDArray[np.int64]:
        """Return the tokens of n samples: int64 [n]; see `cost.count_tokens`."""
        num_samples = len(samples.num_candidates)
        return count_tokens(self._cost, _by_name(samples), num_samples)

    def plan(
        self,
        samples: Iterable[SampleLengths],
        steps: range,
        num_loaded: NDArray[np.int64],
        *,
        sample_ids: NDArray[np.int64],
        epoch: int,
        is_measured: bool,
    ) -> list[LocalPlan]:
        """Plan consecutive steps.

        Args:
            samples: in blocks of any size, those of all ranks in all these steps, in the order of their positions.
            steps: their numbers.
            num_loaded: int64 [steps, W], how many of these each rank would load without balancing, rank by rank.
            sample_ids: int64 [n], of all these samples.
            epoch: of the steps.
            is_measured: return metrics, too.

        Raises:
            ConfigError: the cost or the strategy returns what it must not, or `max_tokens_per_rank` cannot be kept.

        """
        started = time.perf_counter()
        blocks = [self._cost_of(block, with_lengths=is_measured) for block in samples]
        of_all = [_joined(values) for values in zip(*blocks, strict=True)]
        seconds = (time.perf_counter() - started) / len(steps)
        planned, first = [], 0
        for step, loaded in zip(steps, num_loaded, strict=True):
            end = first + int(loaded.sum())
            of_step = _Samples(*(values[..., first:end] for values in of_all))
            planned.append(
                self._plan_step(
                    of_step,
                    loaded,
                    first,
                    sample_ids=sample_ids[first:end],
                    seconds=seconds,
                    epoch=epoch,
                    step=step,
                    is_measured=is_measured,
                )
            )
            first = end
        return planned

    def assign_to_steps(
        self, samples: Iterable[SampleLengths], num_samples: int, *, seed: int, epoch: int
    ) -> NDArray[np.int64]:
        """Assign the samples of a window to its steps; see `window.assign_to_steps`.

        Args:
            samples: in blocks of any size, those of full steps, in the order of their positions.
            num_samples: how many they are.
            seed: of what is left to chance.
            epoch: of the window.

        Returns:
            The indices of the samples, step by step: int64 [num_samples].

        Raises:
            ConfigError: see `plan`.

        """
        blocks = [self._cost_of(block, with_lengths=False, num_summed=num_samples) for block in samples]
        of_all = _Samples(*(_joined(values) for values in zip(*blocks, strict=True)))
        return assign_to_steps(
            of_all.costs,
            of_all.tokens,
            num_steps=num_samples // (self._world_size * self._schema.batch_size),
            world_size=self._world_size,
            settings=self._settings.partition,
            seed=seed,
            epoch=epoch,
        )

    def fingerprint(self, samples: SampleLengths, num_loaded: NDArray[np.int64]) -> str:
        """Return a hash of the costs of a step's samples and, without a limit to tokens, of who trains them.

        Ranks compare it, because costs and strategies that are functions have nothing else but names.

        Args:
            samples: of all ranks, in the order of their positions.
            num_loaded: int64 [W], how many of these each rank would load.

        Raises:
            ConfigError: see `plan`.

        """
        of_step = self._cost_of(samples, with_lengths=False)
        digest = hashlib.sha256(of_step.costs.tobytes() + of_step.tokens.tobytes())
        if self._settings.partition.max_tokens_per_rank is None:
            is_real = real_rows(self._schema.batch_size, self._world_size, num_loaded)
            costs, tokens = (_in_rows(values, is_real, is_full=False) for values in (of_step.costs, of_step.tokens))
            digest.update(
                assign_step(self._settings, costs=costs, tokens=tokens, num_real=num_loaded).rank_of.tobytes()
            )
        return digest.hexdigest()[:16]

    def _cost_of(self, samples: SampleLengths, *, with_lengths: bool, num_summed: int | None = None) -> "_Samples":
        """Return what is needed of samples, with costs that can be summed over `num_summed` or, if None, a step."""
        num_samples, of_keys, by_key = len(samples.num_candidates), samples.of_keys, _by_name(samples)
        num_slots = num_summed or self._world_size * self._schema.batch_size
        candidates = samples.num_candidates
        return _Samples(
            costs=scaled_costs(self._cost, by_key, candidates, num_real=num_samples, samples_per_step=num_slots),
            tokens=count_tokens(self._cost, by_key, num_samples),
            loss_tokens=loss_tokens(self._schema.loss_key, of_keys, np.ones(num_samples, dtype=np.bool_)),
            lengths=np.array([*of_keys.values()] if with_lengths else np.empty((0, num_samples)), dtype=np.int64),
        )

    def _plan_step(
        self,
        samples: "_Samples",
        num_loaded: NDArray[np.int64],
        first: int,
        *,
        sample_ids: NDArray[np.int64],
        seconds: float,
        epoch: int,
        step: int,
        is_measured: bool,
    ) -> LocalPlan:
        """Plan a step, given its samples, those of each rank, the index of the first, and how long their costs took."""
        started = time.perf_counter()
        shape = self._world_size, self._schema.batch_size
        is_full = len(samples.costs) == math.prod(shape)
        num_real = None if is_full else num_loaded
        is_real = real_rows(shape[1], shape[0], num_real)
        costs, tokens = (_in_rows(values, is_real, is_full=is_full) for values in (samples.costs, samples.tokens))
        within = tokens if self._max_tokens is None else np.minimum(tokens, self._max_tokens)
        assignment = assign_step(self._settings, costs=costs, tokens=within, num_real=num_real)
        trained_by = assignment.rank_of[is_real]
        indices = np.flatnonzero(trained_by == self._rank)
        plan_seconds = seconds + time.perf_counter() - started
        metrics = None
        if is_measured:
            metrics = measure_assignment(
                assignment,
                self._settings,
                self._schema,
                costs=costs,
                tokens=tokens,
                lengths=_in_rows(samples.lengths, is_real, is_full=is_full).reshape(-1, is_real.size),
                num_real=num_real,
                epoch=epoch,
                step=step,
            )
            metrics = replace(metrics, plan_seconds=plan_seconds)
        return LocalPlan(
            indices=first + indices,
            costs=samples.costs[indices],
            tokens=samples.tokens[indices],
            num_rows=self._schema.batch_size if assignment.equal_counts else len(indices),
            world_loss_tokens=int(samples.loss_tokens.sum()),
            plan_hash=self._hash(sample_ids, trained_by),
            metrics=metrics,
        )

    def _hash(self, sample_ids: NDArray[np.int64], trained_by: NDArray[np.int32]) -> int:
        """Return a 63-bit hash of which rank trains which sample, given both for the n samples of a step.

        Multilinear hashing takes a tenth of the time of a cryptographic hash, which is a tenth of that of a plan.
        """
        words = sample_ids * self._world_size
        words += trained_by
        return int(np.dot(words.view(np.uint64), self._multipliers[: len(words)])) >> 1


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


def _in_rows(values: NDArray[np.int64], is_real: NDArray[np.bool_], *, is_full: bool) -> NDArray[np.int64]:
    """Return values [..., n] of samples as int64 [..., W, B], with zeros at padding; a view if all rows are full."""
    shape = (*values.shape[:-1], *is_real.shape)
    if is_full:
        return values.reshape(shape)
    in_rows = np.zeros(shape, dtype=np.int64)
    in_rows[..., is_real] = values
    return in_rows


def _by_name(samples: SampleLengths) -> dict[str, NDArray[np.int64]]:
    """Return the lengths of samples by the names of their keys: int64 [n] each."""
    return dict(zip(name_keys(tuple(samples.of_keys)), samples.of_keys.values(), strict=True))
