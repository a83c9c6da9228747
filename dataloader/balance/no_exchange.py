"""`LocalPlanner`: balance with no exchange, where every rank can read every sample.

A step is planned from the lengths of its samples, which the store knows without reading them, by the same partition as
a Balancer's. So each rank comes to the same assignment alone, and reads just the samples that it trains on.
"""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.hashing import mix64
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import count_tokens, scaled_costs
from evenrank.dataloader.balance.exchange.fields import sample_bytes
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.partition.strategies import Assignment, real_rows, unbalanced, warm_up
from evenrank.dataloader.balance.plan import assign_to_steps, in_rows, plan_step
from evenrank.dataloader.batches.batch import loss_tokens, name_keys
from evenrank.dataloader.batches.schema import BatchSchema
from evenrank.dataloader.collate.gather import SampleLengths


class LocalPlan(NamedTuple):
    """The samples that a rank trains in a step."""

    indices: NDArray[np.int64]  # [n], ascending, into all samples that were planned together
    world_loss_tokens: int
    plan_hash: int  # of which rank trains on which sample
    metrics: StepMetrics | None  # None if the step was not measured


class LocalPlanner:
    """Plans the steps of one rank. It keeps nothing between steps, so any thread may plan any step.

    Its methods raise ConfigErrors if the cost or the strategy returns something invalid, or `max_tokens_per_rank`
    cannot be kept. They take samples in blocks of any size, in the order of their positions.
    """

    def __init__(self, config: BalanceConfig, schema: BatchSchema, *, rank: int, world_size: int) -> None:
        config.check(exchanges=False)
        warm_up(config.strategy, limits_tokens=config.max_tokens_per_rank is not None)
        self._config = replace(config, on_step=None)  # which often cannot be pickled
        self._schema = schema
        self._rank = rank
        self._world_size = world_size
        slots = np.arange(world_size * schema.batch_size, dtype=np.uint64)
        self._multipliers = mix64(slots) | np.uint64(1)  # of `_hash`

    def count_tokens(self, samples: SampleLengths) -> NDArray[np.int64]:
        """Return the tokens of n samples: int64 [n]; see `cost.count_tokens`."""
        return count_tokens(self._config.cost, _by_name(samples), len(samples.num_candidates))

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
        """Plan consecutive steps, given the samples of all ranks in these, rank by rank in each step.

        `num_loaded` is int64 [steps, W], the samples that each rank would load unbalanced; `sample_ids` int64 [n].
        """
        started = time.perf_counter()
        known = self._known(samples, with_lengths=is_measured)
        seconds = (time.perf_counter() - started) / len(steps)
        planned, first = [], 0
        for step, loaded in zip(steps, num_loaded, strict=True):
            end = first + int(loaded.sum())
            of_step = _Known(*(values[..., first:end] for values in known))
            started = time.perf_counter()
            assignment, costs, tokens, is_real = self._assign(of_step, loaded, epoch, step)
            trained_by = assignment.rank_of[is_real]
            indices = first + np.flatnonzero(trained_by == self._rank)
            plan_seconds = seconds + time.perf_counter() - started
            metrics = None
            if is_measured:
                metrics = measure_step(
                    assignment,
                    costs=costs,
                    tokens=tokens,
                    sample_bytes=in_rows(sample_bytes(self._schema, of_step.lengths), is_real),
                    epoch=epoch,
                    step=step,
                    is_balanced=self._config.balances(epoch, step),
                    plan_seconds=plan_seconds,
                )
            plan_hash = self._hash(sample_ids[first:end], trained_by)
            planned.append(LocalPlan(indices, int(of_step.loss_tokens.sum()), plan_hash, metrics))
            first = end
        return planned

    def loads_before(self, samples: Iterable[SampleLengths], num_loaded: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the loads of the ranks in consecutive steps without balancing, int64 [W] each; see `plan`."""
        costs, loads = self._known(samples, with_lengths=False).costs, []
        for loaded in num_loaded:
            is_real = real_rows(self._schema.batch_size, self._world_size, loaded)
            of_step, costs = np.split(costs, [int(loaded.sum())])
            home = unbalanced(is_real, padded=self._config.partition_options["padded"])
            loads.append(home.loads(in_rows(of_step, is_real)))
        return loads

    def assign_to_steps(
        self, samples: Iterable[SampleLengths], num_samples: int, *, seed: int, epoch: int
    ) -> NDArray[np.int64]:
        """Return the indices of the samples of a window of full steps, step by step, ascending in each: int64 [n]."""
        known = self._known(samples, with_lengths=False, num_summed=num_samples)
        world_size, config = self._world_size, self._config
        num_steps = num_samples // (world_size * self._schema.batch_size)
        options = {"seed": seed, "epoch": epoch}
        step_of = assign_to_steps(known.costs, known.tokens, num_steps, world_size, config, **options)
        return np.argsort(step_of.astype(np.min_scalar_type(num_steps)), kind="stable")  # narrow ones are faster

    def fingerprint(self, samples: SampleLengths, num_loaded: NDArray[np.int64]) -> str:
        """Return a hash of the costs of a step's samples and, without a limit to tokens, of who trains on them.

        Ranks compare it, because costs and strategies that are functions have nothing else but names.
        """
        known = self._known([samples], with_lengths=False)
        digest = hashlib.sha256(known.costs.tobytes() + known.tokens.tobytes())
        if self._config.max_tokens_per_rank is None:
            digest.update(self._assign(known, num_loaded)[0].rank_of.tobytes())
        return digest.hexdigest()[:16]

    def _known(
        self, samples: Iterable[SampleLengths], *, with_lengths: bool, num_summed: int | None = None
    ) -> "_Known":
        """Return costs that can be summed over `num_summed` samples (None: over a step) and the rest of `_Known`."""
        cost, num_slots = self._config.cost, num_summed or self._world_size * self._schema.batch_size
        blocks = []
        for block in samples:
            candidates, by_name = block.num_candidates, _by_name(block)
            n = len(candidates)
            costs = scaled_costs(cost, by_name, candidates, samples_per_step=num_slots)
            of_loss = loss_tokens(self._schema.loss_key, block.of_keys, np.ones(n, dtype=np.bool_))
            lengths = np.array([*block.of_keys.values()] if with_lengths else np.empty((0, n)), dtype=np.int64)
            blocks.append(_Known(costs, count_tokens(cost, by_name, n), of_loss, lengths))
        if len(blocks) == 1:
            return blocks[0]
        return _Known(*(np.concatenate(values, axis=-1) for values in zip(*blocks, strict=True)))

    def _assign(
        self, known: "_Known", num_loaded: NDArray[np.int64], epoch: int = 0, step: int = 0
    ) -> tuple[Assignment, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the assignment of a step's samples, their costs and tokens, and which rows are samples: [W, B]."""
        world_size, batch_size = self._world_size, self._schema.batch_size
        num_real = None if len(known.costs) == world_size * batch_size else num_loaded
        is_real = real_rows(batch_size, world_size, num_real)
        costs, tokens = (in_rows(values, is_real) for values in (known.costs, known.tokens))
        assignment = plan_step(costs, tokens, self._config, num_real=num_real, epoch=epoch, step=step)
        return assignment, costs, tokens, is_real

    def _hash(self, sample_ids: NDArray[np.int64], trained_by: NDArray[np.int32]) -> int:
        """Return a 63-bit hash of which rank trains on which sample."""
        # Multilinear hashing takes a tenth of the time of a cryptographic hash, which is a tenth of that of a plan.
        words = sample_ids * self._world_size
        words += trained_by
        return int(np.dot(words.view(np.uint64), self._multipliers[: len(words)])) >> 1


class _Known(NamedTuple):
    """The values of n samples that are known without reading them."""

    costs: NDArray[np.int64]  # [n]
    tokens: NDArray[np.int64]  # [n]
    loss_tokens: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [K, n], or [0, n] where nothing is measured


def _by_name(samples: SampleLengths) -> dict[str, NDArray[np.int64]]:
    return dict(zip(name_keys(tuple(samples.of_keys)), samples.of_keys.values(), strict=True))
