"""Step samplers that balance: planned alone by each rank, packed to a number of tokens, or assigned in windows."""

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.no_exchange import LocalPlanner
from evenrank.dataloader.balance.step_samples import PackedSchedule, WindowedOrder, Windows, clip_tokens, pack
from evenrank.dataloader.collate.gather import SampleLengths
from evenrank.dataloader.sampling.steps import Iteration, KnownLengths, StepSampler, StepSamples, StepShape
from evenrank.dataloader.state.resume_point import Left, ResumePoint, SkippedSamples
from evenrank.datasets.order import SampleOrder, derive_seed

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
    """Each rank plans the step of all ranks, from lengths, and trains on its part."""

    def __init__(self, samples: KnownLengths, shape: StepShape, balance: BalanceConfig) -> None:
        super().__init__(shape)
        self._samples = samples
        self._balance = replace(balance, on_step=None)  # which cannot be pickled, or need not be
        self._planner = LocalPlanner(balance, samples.schema, rank=shape.rank, world_size=shape.world_size)
        # Of windows: those of all steps in flight, of which the first and the last may be within theirs, and one for
        # states. Of schedules: the rest of an epoch and all of it, for the epoch that is iterated over and the next.
        self._memo: Memo[Any] = Memo(-(-shape.in_flight // balance.window) + 2 if balance.window > 1 else 4)

    def rank_invariants(self, order: SampleOrder, *, seed: int) -> dict[str, Any]:
        """Return a hash of the costs and the plan of a first step."""
        iteration = StepSampler.begin(self, order, ResumePoint(), seed=seed)
        schedule = iteration.schedule
        if schedule.num_steps == 0:
            return {}
        lengths = self._samples.lengths(iteration.rows(schedule.positions_of_all(range(1))))
        return {"costs and plan of the first step": self._planner.fingerprint(lengths, schedule.num_loaded(0))}

    def sample(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the samples of these steps; with metrics if `is_measured`."""
        sampled = []
        at_once = max(1, _SAMPLES_AT_ONCE // self._shape.samples_per_step)
        for run in (steps[first : first + at_once] for first in range(0, len(steps), at_once)):
            sample_ids = iteration.rows(iteration.schedule.positions_of_all(run))
            plans = self._planner.plan(
                self._lengths(sample_ids),
                run,
                np.stack([iteration.schedule.num_loaded(step) for step in run]),
                sample_ids=sample_ids,
                epoch=iteration.point.epoch,
                is_measured=is_measured,
            )
            for plan in plans:
                fields = {"world_loss_tokens": plan.world_loss_tokens, "plan_hash": plan.plan_hash}
                fields["dp_size"] = self._shape.world_size
                sampled.append(StepSamples(sample_ids[plan.indices], fields, plan.metrics))
        return sampled

    def _lengths(self, sample_ids: NDArray[np.int64]) -> Iterator[SampleLengths]:
        """Yield the lengths of these samples, in blocks."""
        for first in range(0, len(sample_ids), _SAMPLES_AT_ONCE):
            yield self._samples.lengths(sample_ids[first : first + _SAMPLES_AT_ONCE])


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
            sample_ids = iteration.rows(positions)
            tokens = np.concatenate([self._planner.count_tokens(block) for block in self._lengths(sample_ids)])
            name = self._samples.name
            return clip_tokens(tokens, max_tokens, self._balance.on_overflow, lambda i: name(sample_ids[i]))

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
        return replace(iteration, order=WindowedOrder(iteration.order, windows, self._assign))

    def sample(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the samples of these steps; with metrics if `is_measured`, of loads before also without windows."""
        sampled = super().sample(iteration, steps, is_measured=is_measured)
        if is_measured:
            assert isinstance(iteration.order, WindowedOrder)
            loaded = replace(iteration, order=iteration.order.underlying)
            rows = loaded.rows(iteration.schedule.positions_of_all(steps))
            num_loaded = np.stack([iteration.schedule.num_loaded(step) for step in steps])
            loads = self._planner.loads_before(self._lengths(rows), num_loaded)
            for index, (of_step, before) in enumerate(zip(sampled, loads, strict=True)):
                assert of_step.metrics is not None
                sampled[index] = of_step._replace(metrics=replace(of_step.metrics, before=before))
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
        pending, window = skipped
        shape = self._shape.world_size, self._shape.batch_size, self._balance.window
        if window is None or shape != (window.world_size, window.batch_size, window.steps):
            return after
        if (after.position - window.start) % self._shape.samples_per_step:
            return after
        within = replace(after, start=window.start, pending=window.pending)
        again = self.skipped(order, within, after.position, seed=seed).pending
        return within if pending is not None and again is not None and np.array_equal(again, pending) else after

    def _assign(self, order: SampleOrder, first: int, end: int, *, seed: int, epoch: int) -> NDArray[np.integer[Any]]:
        def assign() -> NDArray[np.integer[Any]]:
            sample_ids = order.rows(np.arange(first, end), seed=seed, epoch=epoch)
            lengths, count = self._lengths(sample_ids), len(sample_ids)
            indices = self._planner.assign_to_steps(lengths, count, seed=derive_seed(seed, first), epoch=epoch)
            return indices.astype(np.min_scalar_type(count))  # half the memory of int64, at most 4 Gi samples

        indices: NDArray[np.integer[Any]] = self._memo.get((order.fingerprint(), first, end, seed, epoch), assign)
        return indices


def make_step_sampler(samples: KnownLengths | None, shape: StepShape, balance: BalanceConfig | None) -> StepSampler:
    """Return the step sampler of a loader; to balance, it needs samples with lengths."""
    if balance is None or samples is None:
        return StepSampler(shape)
    kind = PackedStepSampler if balance.pack else WindowedStepSampler if balance.window > 1 else BalancedStepSampler
    return kind(samples, shape, balance)
