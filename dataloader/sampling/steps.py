"""`StepSamples`: the samples that a rank trains in a step. Without balancing that is its share of the order."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.no_exchange import LocalPlan
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.state.resume_point import ResumePoint, SavedPosition, Unfinished
from evenrank.datasets.order import EpochSchedule, SampleOrder, StepSchedule
from evenrank.datasets.store import SequenceStore

Batch = TypeVar("Batch", bound=JaggedBatch)


class StepSamples(NamedTuple):
    """The samples of a rank in a step."""

    sample_ids: NDArray[np.int64]
    """[n]: rows of the stores, by position in the epoch."""
    num_rows: int
    """Of its batch, padding included."""
    fields: dict[str, Any]
    """Fields of its batch that its samples alone do not decide."""
    plan: LocalPlan | None
    """How its step was balanced; None if nothing is balanced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What all steps of a rank have in common."""

    rank: int
    """Of this process."""
    world_size: int
    """Number of data-parallel ranks."""
    batch_size: int
    """Rows of a batch, per rank."""
    drop_last: bool
    """Leave out a last step that has room for more samples."""
    in_flight: int = 1
    """Steps from the one that is trained to the last one that is picked ahead of it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Iteration:
    """What a loader iterates over: what is left of an epoch."""

    rest: ResumePoint
    """What is left."""
    order: SampleOrder
    """The rows at its positions."""
    schedule: StepSchedule
    """Its steps, of these positions."""
    seed: int
    """Of the order."""

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the samples at these positions: int64 of the same shape."""
        return self.order.rows(positions, seed=self.seed, epoch=self.rest.epoch)


class StepSampler(ABC, Generic[Batch]):
    """Picks the samples of one rank, and makes batches of them. Any thread may call it.

    Args:
        stores: whose rows are numbered consecutively.
        collate: makes batches.
        shape: of the steps.

    """

    def __init__(self, stores: Sequence[SequenceStore], collate: Collate[Batch], shape: StepShape) -> None:
        self._stores = stores
        self._collate = collate
        self._shape = shape

    def begin(self, order: SampleOrder, rest: ResumePoint, *, seed: int) -> Iteration:
        """Return the iteration over what is left of an epoch.

        Raises:
            ConfigError: there is no such position.

        """
        schedule = EpochSchedule(
            num_samples=order.num_samples,
            world_size=self._shape.world_size,
            batch_size=self._shape.batch_size,
            start=rest.position,
            drop_last=self._shape.drop_last,
        )
        return Iteration(rest=rest, order=rest.order(order), schedule=schedule, seed=seed)

    def unfinished(self, order: SampleOrder, rest: ResumePoint, position: int, *, seed: int) -> Unfinished:
        """Return what is left besides all positions from `position` on, if an iteration over `rest` stops there.

        Args:
            order: of all epochs.
            rest: with which the iteration began.
            position: at the end of a step.
            seed: of the order.

        """
        if position >= rest.end_of_left:
            return Unfinished()
        # Also if these are all positions from this one on: the windows of what was left end with it.
        return Unfinished(left=rest.positions(np.arange(position, rest.end_of_left)))

    def resume(self, order: SampleOrder, saved: SavedPosition) -> ResumePoint:
        """Return what is left after a position that was saved, maybe by another kind of loader."""
        return ResumePoint(epoch=saved.epoch, start=saved.position, position=saved.position, left=saved.unfinished.left)

    def rank_invariants(self, order: SampleOrder, *, seed: int) -> dict[str, Any]:
        """Return what must be the same on all ranks besides the settings, by name."""
        return {}

    @abstractmethod
    def pick(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the picks of these steps, if they are balanced and `is_measured` with metrics."""

    def collate(self, picks: Sequence[StepSamples]) -> list[Batch]:
        """Make the batch of each pick, in one pass if all but the last are full."""
        batch_size = self._shape.batch_size
        is_full = all(len(pick.sample_ids) == batch_size for pick in picks[:-1])
        in_one_pass = is_full and all(pick.num_rows == batch_size for pick in picks)
        batches: list[Batch] = []
        for run in [picks] if in_one_pass else [[pick] for pick in picks]:
            sample_ids = np.concatenate([pick.sample_ids for pick in run])
            groups = group_by_store(self._stores, sample_ids)
            batches += self._collate(groups, sample_ids, batch_size=run[0].num_rows, num_batches=len(run))
        for batch, pick in zip(batches, picks, strict=True):
            for name, value in pick.fields.items():
                setattr(batch, name, value)
        return batches


class OwnPicker(StepSampler[Batch]):
    """Each rank trains its share of the order."""

    def pick(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the picks of these steps."""
        positions = [iteration.schedule.positions(step, self._shape.rank) for step in steps]
        sample_ids = iteration.rows(np.concatenate(positions))
        of_steps = np.split(sample_ids, np.cumsum([len(own) for own in positions])[:-1])
        return [StepSamples(own, self._shape.batch_size, {}, None) for own in of_steps]
