"""Step samplers that balance with no exchange, where every rank can read every sample.

A step is planned from the lengths of its samples, which are known without reading them, by the same partition as a
Balancer's. So each rank comes to the same assignment alone, and reads just the samples that it trains on.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.hashing import mix64
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import Cost, count_tokens, scaled_costs
from evenrank.dataloader.balance.exchange.fields import sample_bytes
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, measure_step
from evenrank.dataloader.balance.packing import PackedSchedule, clip_tokens, pack
from evenrank.dataloader.balance.partition.strategies import Assignment, real_rows, unbalanced, warm_up
from evenrank.dataloader.balance.plan import assign_to_steps, in_rows, plan_steps
from evenrank.dataloader.balance.refit import CostSchedule
from evenrank.dataloader.batches.batch import loss_tokens, name_keys
from evenrank.dataloader.collate.gather import DrawKey, SampleLengths
from evenrank.dataloader.sampling.steps import Iteration, KnownLengths, StepSampler, StepSamples, StepShape
from evenrank.dataloader.sampling.windows import WindowedOrder, Windows
from evenrank.dataloader.state.resume_point import Left, ResumePoint, SkippedSamples
from evenrank.datasets.order import SampleOrder, StepSchedule, derive_seed

Value = TypeVar("Value")

# Samples whose lengths and costs are computed in one pass, of several small steps or of part of a large one. Fewer mean
# more calls, for which threads wait for the GIL; of more, glibc returns the memory to the system after each step.
_SAMPLES_AT_ONCE = 1 << 17


class Memo(Generic[Value]):
    """Keeps the `size` values used last, except in pickles and forks; threads wait for a value being computed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._clear()

    def _clear(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._values: dict[Hashable, Future[Value]] = {}  # the one used last comes last

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, computed if it is not kept; exceptions of `compute` are not kept."""
        if self._process != os.getpid():
            self._clear()  # a forked child would wait forever for threads of its parent
        own: Future[Value] = Future()
        try:
            with self._lock:
                value = self._values[key] = self._values.pop(key, own)
                if len(self._values) > self._size:
                    del self._values[next(iter(self._values))]
            if value is own:
                own.set_result(compute())
        except BaseException as error:  # also interrupts, or other threads would wait forever
            with self._lock:
                if self._values.get(key) is own:
                    del self._values[key]
            own.set_exception(error)
            raise
        return value.result()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._size,)


class BalancedStepSampler(StepSampler):
    """Each rank plans the step of all ranks, from lengths, and trains on its part.

    It raises ConfigErrors if the cost or the strategy returns something invalid, or `max_tokens_per_rank` cannot be
    kept.
    """

    def __init__(
        self, samples: KnownLengths, shape: StepShape, balance: BalanceConfig, costs: CostSchedule | None = None
    ) -> None:
        super().__init__(shape)
        balance.check(exchanges=False)
        warm_up(balance.strategy, limits_tokens=balance.max_tokens_per_rank is not None)
        self._samples = samples
        self._balance = balance.for_plans
        self._costs = costs or CostSchedule(balance.cost)
        self._multipliers = mix64(np.arange(shape.samples_per_step, dtype=np.uint64)) | np.uint64(1)  # of `_hash`
        # Of windows: those of all steps in flight, of which the first and the last may be within theirs, and one for
        # states. Of schedules: the rest of an epoch and all of it, for the epoch that is iterated over and the next.
        self._memo: Memo[Any] = Memo(-(-shape.in_flight // balance.window) + 2 if balance.window > 1 else 4)

    def rank_invariants(self, order: SampleOrder, *, seed: int) -> dict[str, Any]:
        """Return a hash of the costs of the first step and, without a limit to tokens, of who trains on its samples.

        Ranks compare it, because costs and strategies that are functions have nothing else but names.
        """
        iteration = StepSampler.begin(self, order, ResumePoint(), seed=seed)
        schedule = iteration.schedule
        if schedule.num_steps == 0:
            return {}
        known = self._known(iteration.keys(schedule.positions_of_all(range(1))), self._balance.cost)
        digest = hashlib.sha256(known.costs.tobytes() + known.tokens.tobytes())
        if self._balance.max_tokens_per_rank is None:
            digest.update(self._plan(known, schedule, range(1), 0).rank_of.tobytes())
        return {"costs and plan of the first step": digest.hexdigest()[:16]}

    def sample(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the samples of these steps, by the cost of the first; with metrics if `is_measured`."""
        cost = self._cost(iteration.point, steps.start, iteration.left)
        at_once = max(1, _SAMPLES_AT_ONCE // self._shape.samples_per_step)
        runs = (steps[first : first + at_once] for first in range(0, len(steps), at_once))
        return [samples for run in runs for samples in self._sample(iteration, run, cost, is_measured=is_measured)]

    def _cost(self, point: ResumePoint, step: int, left: threading.Event) -> Cost:
        """Return the cost that plans a step of the iteration that begins at a point."""
        if point.first_step is None:
            return self._costs.latest
        return self._costs.after(self._costs.decisions(point.first_step + step), left)

    def _sample(self, iteration: Iteration, steps: range, cost: Cost, *, is_measured: bool) -> list[StepSamples]:
        key = iteration.keys(iteration.schedule.positions_of_all(steps))
        sample_ids, started = key.sample_ids, time.perf_counter()
        padding = self._samples.padding
        known = self._known(key, cost, with_lengths=is_measured or padding is not None)
        plan = self._plan(known, iteration.schedule, steps, iteration.point.epoch)
        counts = np.count_nonzero(plan.is_real, axis=(1, 2))
        # Step by step, samples first.
        in_steps = np.arange(self._shape.samples_per_step) < counts[:, np.newaxis]
        trained_by = plan.rank_of[plan.is_real]
        if padding is not None:  # so that all ranks raise its error, in the same step
            batch_of = trained_by + np.repeat(np.arange(len(steps)) * self._shape.world_size, counts)
            padding.check(self._samples.schema.jagged_keys, known.lengths, batch_of)
        loss_tokens_of_steps = in_rows(known.loss_tokens, in_steps).sum(axis=1).tolist()
        hashes = self._hashes(in_rows(sample_ids * self._shape.world_size + trained_by, in_steps))
        own_counts = np.count_nonzero(plan.rank_of == self._shape.rank, axis=(1, 2))
        own_ids = np.split(sample_ids[trained_by == self._shape.rank], np.cumsum(own_counts)[:-1])
        sampled = [
            StepSamples(ids, {"world_loss_tokens": tokens, "plan_hash": plan_hash, "dp_size": self._shape.world_size})
            for ids, tokens, plan_hash in zip(own_ids, loss_tokens_of_steps, hashes, strict=True)
        ]
        if is_measured:
            seconds, ends = (time.perf_counter() - started) / len(steps), np.cumsum(counts)
            lengths = np.split(known.lengths, ends[:-1], axis=1)
            for index, step in enumerate(steps):
                metrics = self._measure(plan, index, lengths[index], iteration.point.epoch, step, seconds)
                sampled[index] = sampled[index]._replace(metrics=metrics)
        return sampled

    def _measure(
        self, plan: "_Plan", index: int, lengths: NDArray[np.int64], epoch: int, step: int, plan_seconds: float
    ) -> StepMetrics:
        return measure_step(
            Assignment(rank_of=plan.rank_of[index], padded=self._balance.partition_options["padded"]),
            costs=plan.costs[index],
            tokens=plan.tokens[index],
            sample_bytes=in_rows(sample_bytes(self._samples.schema, lengths), plan.is_real[index]),
            epoch=epoch,
            step=step,
            is_balanced=self._balance.balances(epoch, step),
            plan_seconds=plan_seconds,
        )

    def _known(
        self, key: DrawKey, cost: Cost, *, with_lengths: bool = False, num_summed: int | None = None
    ) -> "_Known":
        """Return costs that can be summed over `num_summed` samples (None: over a step) and the rest of `_Known`."""
        schema, blocks = self._samples.schema, []
        num_summed = num_summed or self._shape.samples_per_step
        for block, by_name in self._blocks(key):
            n = len(block.num_candidates)
            costs = scaled_costs(cost, by_name, block.num_candidates, samples_per_step=num_summed)
            of_loss = loss_tokens(schema.loss_key, block.of_keys, np.ones(n, dtype=np.bool_))
            lengths = np.array([*block.of_keys.values()] if with_lengths else np.empty((0, n)), dtype=np.int64)
            blocks.append(_Known(costs, count_tokens(cost, by_name, n), of_loss, lengths))
        if len(blocks) == 1:
            return blocks[0]
        return _Known(*(np.concatenate(values, axis=-1) for values in zip(*blocks, strict=True)))

    def _blocks(self, key: DrawKey) -> Iterator[tuple[SampleLengths, dict[str, NDArray[np.int64]]]]:
        """Yield the lengths of samples in blocks, and those of their keys by name, as costs take them."""
        for first in range(0, len(key.sample_ids), _SAMPLES_AT_ONCE):
            of_block = key.sample_ids[first : first + _SAMPLES_AT_ONCE]
            block = self._samples.lengths(key._replace(sample_ids=of_block))
            yield block, dict(zip(name_keys(tuple(block.of_keys)), block.of_keys.values(), strict=True))

    def _plan(self, known: "_Known", schedule: StepSchedule, steps: range, epoch: int) -> "_Plan":
        """Plan steps, given what is known of their samples."""
        shape, num_real = (len(steps), self._shape.world_size, self._shape.batch_size), None
        is_real = np.ones(shape, dtype=np.bool_)
        if len(known.costs) < is_real.size:
            num_real = np.array([schedule.num_loaded(step) for step in steps])
            is_real = np.arange(self._shape.batch_size) < num_real[..., np.newaxis]
        costs, tokens = (in_rows(values, is_real) for values in (known.costs, known.tokens))
        rank_of = plan_steps(costs, tokens, self._balance, num_real=num_real, epoch=epoch, steps=steps)
        return _Plan(rank_of, costs, tokens, is_real)

    def _hashes(self, words: NDArray[np.int64]) -> list[int]:
        """Return a 63-bit hash of each step, given its samples and their ranks: int64 [S, W * B], then 0."""
        # Multilinear hashing takes a tenth of the time of a cryptographic hash, which is a tenth of that of a plan.
        hashes: list[int] = ((words.view(np.uint64) @ self._multipliers) >> np.uint64(1)).tolist()
        return hashes


class PackedStepSampler(BalancedStepSampler):
    """Steps have as many samples as fit `max_tokens_per_rank`."""

    def begin(self, order: SampleOrder, point: ResumePoint, *, seed: int) -> Iteration:
        """Return the iteration that begins at a point of an epoch. Each point is packed once."""
        iteration = super().begin(order, point, seed=seed)
        key = (iteration.order.fingerprint(), point.epoch, point.position, seed)
        return replace(iteration, schedule=self._memo.get(key, lambda: self._pack(iteration)))

    def _pack(self, iteration: Iteration) -> PackedSchedule:
        max_tokens = self._balance.max_tokens_per_rank
        assert max_tokens is not None  # BalanceConfig has checked it

        def tokens_at(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            key = iteration.keys(positions)
            cost, blocks = self._balance.cost, self._blocks(key)
            tokens = np.concatenate([count_tokens(cost, names, len(block.num_candidates)) for block, names in blocks])
            name = self._samples.name
            return clip_tokens(tokens, max_tokens, self._balance.on_overflow, lambda i: name(key.sample_ids[i]))

        return pack(
            tokens_at,
            num_samples=iteration.order.num_samples,
            start=iteration.point.position,
            world_size=self._shape.world_size,
            batch_size=self._shape.batch_size,
            max_tokens=max_tokens,
            drop_last=self._shape.drop_last,
        )


class WindowedStepSampler(BalancedStepSampler):
    """Samples are assigned to steps in windows of several steps."""

    def begin(self, order: SampleOrder, point: ResumePoint, *, seed: int) -> Iteration:
        """Return the iteration that begins at a point of an epoch; its windows are assigned when they are needed."""
        iteration = super().begin(order, point, seed=seed)
        samples_per_step = self._shape.samples_per_step
        end = order.num_samples - (order.num_samples - point.position) % samples_per_step
        steps_to_drain = -(-(point.frontier - point.start) // samples_per_step)
        windows = Windows(
            start=point.start,
            first_end=min(point.start + steps_to_drain * samples_per_step, end),
            end=end,
            samples_per_step=samples_per_step,
            steps=self._balance.window,
        )
        assign = partial(self._assign_window, point, iteration.left)
        return replace(iteration, order=WindowedOrder(iteration.order, windows, assign))

    def sample(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the samples of these steps; with metrics if `is_measured`, of loads before also without windows."""
        sampled = super().sample(iteration, steps, is_measured=is_measured)
        if is_measured:
            assert isinstance(iteration.order, WindowedOrder)
            loaded = replace(iteration, order=iteration.order.underlying)
            cost = self._cost(iteration.point, steps.start, iteration.left)
            costs = self._known(loaded.keys(iteration.schedule.positions_of_all(steps)), cost).costs
            for index, step in enumerate(steps):
                num_loaded, metrics = iteration.schedule.num_loaded(step), sampled[index].metrics
                assert metrics is not None
                of_step, costs = np.split(costs, [int(num_loaded.sum())])
                is_real = real_rows(self._shape.batch_size, self._shape.world_size, num_loaded)
                home = unbalanced(is_real, padded=self._balance.partition_options["padded"])
                sampled[index] = sampled[index]._replace(
                    metrics=replace(metrics, before=home.loads(in_rows(of_step, is_real)))
                )
        return sampled

    def skipped(self, order: SampleOrder, point: ResumePoint, position: int, *, seed: int) -> SkippedSamples:
        """Return the samples skipped before a position, also in its window, if an iteration stops there."""
        windowed = self.begin(order, point, seed=seed).order
        assert isinstance(windowed, WindowedOrder)
        first, end = windowed.windows.bounds(position)
        if position == first:
            return super().skipped(order, point, position, seed=seed)
        is_left = np.zeros(end - first, dtype=np.bool_)
        is_left[windowed.positions(np.arange(position, end), seed=seed, epoch=point.epoch) - first] = True
        rows = is_left.reshape(-1, self._shape.world_size, self._shape.batch_size)
        before = super().skipped(order, point, first, seed=seed)
        return Left(first, self._balance.window, rows).skipped(point, before)

    def resume(self, order: SampleOrder, after: ResumePoint, skipped: SkippedSamples, *, seed: int) -> ResumePoint:
        """Return where to go on: within the window of a saved position, if this sampler assigns it in the same way."""
        if self._costs.can_change:  # then nobody knows the cost that has assigned it
            return after
        pending, begin, shape = skipped
        if begin is None or shape != (self._balance.window, self._shape.world_size, self._shape.batch_size):
            return after
        if (after.position - begin.start) % self._shape.samples_per_step:
            return after
        within = replace(after, start=begin.start, pending=begin.pending)
        again = self.skipped(order, within, after.position, seed=seed).pending
        return within if pending is not None and again is not None and np.array_equal(again, pending) else after

    def _assign_window(
        self,
        point: ResumePoint,
        left: threading.Event,
        order: SampleOrder,
        first: int,
        end: int,
        *,
        seed: int,
        epoch: int,
    ) -> NDArray[np.integer[Any]]:
        def assign() -> NDArray[np.integer[Any]]:
            cost = self._cost(point, max(first - point.position, 0) // self._shape.samples_per_step, left)
            rows, count = order.rows(np.arange(first, end), seed=seed, epoch=epoch), end - first
            known = self._known(DrawKey(seed, epoch, rows), cost, num_summed=count)
            num_steps = count // self._shape.samples_per_step
            options = {"seed": derive_seed(seed, first), "epoch": epoch}
            world_size, config = self._shape.world_size, self._balance
            step_of = assign_to_steps(known.costs, known.tokens, num_steps, world_size, config, **options)
            # Step by step, ascending in each; narrow integers are sorted faster.
            indices = np.argsort(step_of.astype(np.min_scalar_type(num_steps)), kind="stable")
            return indices.astype(np.min_scalar_type(count))  # half the memory of int64, at most 4 Gi samples

        key = order.fingerprint(), first, end, seed, epoch, point.first_step
        indices: NDArray[np.integer[Any]] = self._memo.get(key, assign)
        return indices


class _Plan(NamedTuple):
    """Who trains on the samples of S steps."""

    rank_of: NDArray[np.int32]  # [S, W, B], as the next ones
    costs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    is_real: NDArray[np.bool_]


class _Known(NamedTuple):
    """The values of n samples that are known without reading them."""

    costs: NDArray[np.int64]  # [n]
    tokens: NDArray[np.int64]  # [n]
    loss_tokens: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [K, n], or [0, n] where nothing is measured


def make_step_sampler(
    samples: KnownLengths | None, shape: StepShape, balance: BalanceConfig | None, costs: CostSchedule | None = None
) -> StepSampler:
    """Return the step sampler of a loader; to balance, it needs samples with lengths. `costs` None: one cost."""
    if balance is None or samples is None:
        return StepSampler(shape)
    kind = PackedStepSampler if balance.pack else WindowedStepSampler if balance.window > 1 else BalancedStepSampler
    return kind(samples, shape, balance, costs)
