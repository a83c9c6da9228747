"""`EpochPositions`: the position of a loader or sampler in its epochs, and the state that saves it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.balance.ranks.agree import PlanCheck
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.dataloader.routing.remap import check_dist_type, dist_type
from evenrank.dataloader.sampling.steps import Iteration, StepSampler
from evenrank.dataloader.state.resume_point import (
    CurrentPosition,
    HasEpoch,
    Position,
    ResumePoint,
    SavedPosition,
    checked_state,
    warn_of_rest,
)
from evenrank.datasets.order import SampleOrder
from evenrank.datasets.schema import IdSummary

Batch = TypeVar("Batch")


class EpochSamples(NamedTuple):
    """The samples of an epoch."""

    order: SampleOrder
    sampler: StepSampler
    fingerprint: str
    """A hash of everything that decides on the samples and their order."""
    window: tuple[int, int] | None = None
    """As in `SavedPosition`."""


class EpochPositions(HasEpoch, ABC):
    """Mixin of what hands out the steps of an order, one epoch per iteration."""

    _ids: Mapping[str, IdSummary]
    _key_maps: Mapping[str, KeyMap]
    _seed: int
    _plan_check: PlanCheck | None  # None: not balanced
    _observe: Callable[[StepMetrics], None] | None

    def __init__(self) -> None:
        self._current = CurrentPosition()
        self._begun: dict[int, ResumePoint] = {}  # by epoch, where its latest iteration began within it

    @abstractmethod
    def _samples_of(self, epoch: int) -> EpochSamples:
        """Return the samples of an epoch."""

    @property
    def num_samples(self) -> int:
        """Samples of the next iteration's epoch, over all ranks."""
        return self._samples_of(self.epoch).order.num_samples

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch; of the next one, as with `pack` epochs differ in this."""
        return self._begin(ResumePoint(epoch=self.epoch)).schedule.num_steps

    def remaining_batches(self) -> int:
        """Return the number of batches of the next iteration: fewer than an epoch's after `load_state_dict`."""
        return self._begin(self._current.next).schedule.num_steps

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the position that `state_dict` returned.

        If no samples are left in that epoch, the next iteration is the next epoch.

        Raises:
            StateError: the state is damaged, of another version, or of other data, codes, filters or `key_maps`;
                to train on other data after it, call `begin_after`.
            ConfigError: the rest of the epoch cannot be packed.
        """
        entries = checked_state(state, self._ids)
        order, sampler, fingerprint, _ = self._samples_of(entries["epoch"])
        saved = SavedPosition.from_entries(entries, order.num_samples, fingerprint)
        check_dist_type(saved.dist_type, self._key_maps, source="the loader's state")
        point = sampler.resume(order, saved)
        is_over = point.position > 0 and not sampler.begin(order, point, seed=saved.seed).schedule.num_steps
        self._seed = saved.seed
        self._begun[point.epoch] = point
        self._current.move_to(point, is_over=is_over)

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin with the epoch after that of a state, which may be of another dataset, such as yesterday's log.

        Raises:
            StateError: the state is damaged, or of a dataset whose vocabulary this one does not extend.
        """
        self._current.start_epoch(SavedPosition.next_epoch(state, self._ids)[0])

    def _begin_epoch(self) -> Iteration:
        """Return the next iteration, after which the next epoch follows."""
        iteration = self._begin(self._current.next)
        epoch, position = self._current.after_last
        if self._plan_check is not None and epoch in self._begun and epoch < self.epoch:
            schedule = self._begin(self._begun[epoch]).schedule
            if position and schedule.num_steps and position < schedule.position_after(schedule.num_steps - 1):
                warn_of_rest(self._current.after_last)
        self._begun[iteration.point.epoch] = self._current.begin()
        return iteration

    def _begin(self, point: ResumePoint) -> Iteration:
        order, sampler, *_ = self._samples_of(point.epoch)
        return sampler.begin(order, point, seed=self._seed)

    def _hand_out(self, steps: Iterable[tuple[Batch, Position, int | None, StepMetrics | None]]) -> Iterator[Batch]:
        """Yield the batches of steps, given with the position after each, the hash of its plan, and its metrics."""
        check, observe = self._plan_check, self._observe
        plans = None if check is None else check.begin_epoch(self.epoch, self.remaining_batches())
        for batch, after, plan_hash, metrics in steps:
            if plans is not None and plan_hash is not None:
                plans.add(plan_hash)
            if observe is not None and metrics is not None:
                observe(metrics)
            self._current.after_last = after
            yield batch
        if check is not None and plans is not None:
            check.end_epoch(plans)

    def _state(self, after: JaggedBatch | Position | None) -> dict[str, Any]:
        """Return the state after a batch, or a position, that was handed out; None: the last one."""
        epoch, position = self._current.after_last if after is None else (after.epoch, after.position)
        point = self._begun.get(epoch)
        if point is None or position < point.position:
            point = ResumePoint(epoch=epoch)
        order, sampler, fingerprint, window = self._samples_of(epoch)
        skipped = sampler.skipped(order, point, position, seed=self._seed)
        saved = SavedPosition(epoch, position, self._seed, skipped, dist_type(self._key_maps), window)
        return saved.to_state(order.num_samples, fingerprint, self._ids)
