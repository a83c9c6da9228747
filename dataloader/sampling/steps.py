"""`StepSampler`: the samples that a rank trains in a step, without balancing, and the batches of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.metrics import StepMetrics
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.state.resume_point import ResumePoint, SavedPosition, SkippedSamples
from evenrank.datasets.order import EpochSchedule, SampleOrder, StepSchedule
from evenrank.datasets.store import SequenceStore

Batch = TypeVar("Batch", bound=JaggedBatch)


class StepSamples(NamedTuple):
    """The samples of a rank in a step."""

    sample_ids: NDArray[np.int64]
    """[n], by position in the epoch."""
    fields: dict[str, Any]
    """Fields of the batch that depend on the samples of all ranks."""
    metrics: StepMetrics | None = None


class StepShape(NamedTuple):
    """The settings that all steps of a rank have in common; `batch_size` is per rank."""

    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    in_flight: int = 1
    """Steps from the one that is trained to the last one that is sampled ahead of it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Iteration:
    """The part of an epoch that a loader iterates over, from `point` on."""

    point: ResumePoint
    order: SampleOrder
    schedule: StepSchedule
    seed: int

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the samples at these positions: int64 of the same shape."""
        return self.order.rows(positions, seed=self.seed, epoch=self.point.epoch)


class StepSampler(Generic[Batch]):
    """Samples of one rank, its share of the order, and batches of them. Any thread may call it."""

    def __init__(self, stores: Sequence[SequenceStore], collate: Collate[Batch], shape: StepShape) -> None:
        self._stores = stores
        self._collate = collate
        self._shape = shape

    def begin(self, order: SampleOrder, point: ResumePoint, *, seed: int) -> Iteration:
        """Return the iteration that begins at a point of an epoch."""
        schedule = EpochSchedule(
            num_samples=order.num_samples,
            world_size=self._shape.world_size,
            batch_size=self._shape.batch_size,
            start=point.position,
            drop_last=self._shape.drop_last,
        )
        return Iteration(point=point, order=point.order(order), schedule=schedule, seed=seed)

    def skipped(self, order: SampleOrder, point: ResumePoint, position: int, *, seed: int) -> SkippedSamples:
        """Return the samples skipped before a position, if the iteration from `point` on stops there, after a step."""
        if position >= point.frontier:
            return SkippedSamples()
        # Also if these are all positions from this one on: the windows that drain pending samples end with them.
        return SkippedSamples(point.positions(np.arange(position, point.frontier)))

    def resume(self, order: SampleOrder, saved: SavedPosition) -> ResumePoint:
        """Return the point after a position that was saved, maybe by another kind of loader."""
        position = saved.position
        return ResumePoint(epoch=saved.epoch, start=position, position=position, pending=saved.skipped.pending)

    def rank_invariants(self, order: SampleOrder, *, seed: int) -> dict[str, Any]:
        """Return further values that must be the same on all ranks, by name."""
        return {}

    def sample(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the samples of these steps; with metrics if they are balanced and `is_measured`."""
        positions = [iteration.schedule.positions(step, self._shape.rank) for step in steps]
        sample_ids = iteration.rows(np.concatenate(positions))
        of_steps = np.split(sample_ids, np.cumsum([len(own) for own in positions])[:-1])
        return [StepSamples(own, {}) for own in of_steps]

    def collate(self, steps: Sequence[StepSamples]) -> list[Batch]:
        """Make the batch of each step, in one pass if all but the last are full."""
        batch_size = self._shape.batch_size
        is_full = all(len(step.sample_ids) == batch_size for step in steps[:-1])
        batches: list[Batch] = []
        for run in [steps] if is_full else [[step] for step in steps]:
            sample_ids = np.concatenate([step.sample_ids for step in run])
            groups = group_by_store(self._stores, sample_ids)
            batches += self._collate(groups, sample_ids, batch_size=batch_size, num_batches=len(run))
        for batch, step in zip(batches, steps, strict=True):
            for name, value in step.fields.items():
                setattr(batch, name, value)
        return batches
