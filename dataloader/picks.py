"""`Pick`: the samples that a rank trains in a step: its share of the order, or one that is balanced over the ranks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.sampler import BalanceConfig, SampledStep, Sampler
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.batch_schema import schema_of
from evenrank.dataloader.collate.lengths import SampleLengths
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.collate.spans import group_by_store
from evenrank.datasets.order import EpochSchedule, SampleOrder
from evenrank.datasets.store import SequenceStore

Batch = TypeVar("Batch", bound=JaggedBatch)

# Samples whose lengths and costs are computed in one pass, of several small steps or of part of a large one. Fewer mean
# more calls, for which threads wait for the GIL; of more, glibc returns the memory to the system after each step.
_SAMPLES_AT_ONCE = 1 << 17


class Pick(NamedTuple):
    """The samples of a rank in a step."""

    sample_ids: NDArray[np.int64]
    """[n]: rows of the stores, by position in the epoch."""
    num_rows: int
    """Of its batch, padding included."""
    fields: dict[str, Any]
    """Fields of its batch that its samples alone do not decide."""
    plan: SampledStep | None
    """How its step was balanced; None if nothing is balanced."""


class Picker(ABC, Generic[Batch]):
    """Picks the samples of one rank, and makes batches of them. It keeps nothing between calls, so any thread may call.

    Args:
        stores: whose rows are numbered consecutively.
        collate: makes batches.
        rank: of this process.
        batch_size: rows of a full batch.

    """

    def __init__(self, stores: Sequence[SequenceStore], collate: Collate[Batch], *, rank: int, batch_size: int) -> None:
        self._stores = stores
        self._collate = collate
        self._rank = rank
        self._batch_size = batch_size

    @abstractmethod
    def pick(
        self,
        order: SampleOrder,
        schedule: EpochSchedule,
        steps: range,
        *,
        epoch: int,
        seed: int,
        is_measured: bool,
    ) -> list[Pick]:
        """Return the picks of these steps, if they are balanced and `is_measured` with metrics."""

    def collate(self, picks: Sequence[Pick]) -> list[Batch]:
        """Make the batch of each pick, in one pass if all but the last are full."""
        is_full = all(len(pick.sample_ids) == self._batch_size for pick in picks[:-1])
        in_one_pass = is_full and all(pick.num_rows == self._batch_size for pick in picks)
        batches: list[Batch] = []
        for run in [picks] if in_one_pass else [[pick] for pick in picks]:
            sample_ids = np.concatenate([pick.sample_ids for pick in run])
            groups = group_by_store(self._stores, sample_ids)
            batches += self._collate(groups, sample_ids, batch_size=run[0].num_rows, num_batches=len(run))
        for batch, pick in zip(batches, picks, strict=True):
            for name, value in pick.fields.items():
                setattr(batch, name, value)
        return batches


class OwnPicker(Picker[Batch]):
    """Each rank trains its share of the order."""

    def pick(
        self,
        order: SampleOrder,
        schedule: EpochSchedule,
        steps: range,
        *,
        epoch: int,
        seed: int,
        is_measured: bool,
    ) -> list[Pick]:
        """Return the picks of these steps."""
        positions = [schedule.positions(step, self._rank) for step in steps]
        sample_ids = order.rows(np.concatenate(positions), seed=seed, epoch=epoch)
        of_steps = np.split(sample_ids, np.cumsum([len(own) for own in positions])[:-1])
        return [Pick(own, self._batch_size, {}, None) for own in of_steps]


class BalancedPicker(Picker[Batch]):
    """Each rank plans the step of all ranks, from lengths, and trains its part.

    Args:
        stores: see `Picker`.
        collate: see `Picker`.
        balance: how.
        rank: see `Picker`.
        world_size: the number of ranks.
        batch_size: see `Picker`.

    Raises:
        ConfigError: an option of `balance` is out of range.

    """

    def __init__(
        self,
        stores: Sequence[SequenceStore],
        collate: Collate[Batch],
        balance: BalanceConfig,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
    ) -> None:
        super().__init__(stores, collate, rank=rank, batch_size=batch_size)
        (empty,) = self.collate([Pick(np.empty(0, dtype=np.int64), batch_size, {}, None)])
        self._sampler = Sampler(balance, schema_of(empty), rank=rank, world_size=world_size)

    def pick(
        self,
        order: SampleOrder,
        schedule: EpochSchedule,
        steps: range,
        *,
        epoch: int,
        seed: int,
        is_measured: bool,
    ) -> list[Pick]:
        """Return the picks of these steps."""
        picks = []
        at_once = max(1, _SAMPLES_AT_ONCE // schedule.samples_per_step)
        for run in (steps[first : first + at_once] for first in range(0, len(steps), at_once)):
            sample_ids = order.rows(schedule.positions_of_all(run), seed=seed, epoch=epoch)
            for sampled in self._sampler.plan(self._lengths(sample_ids), run, epoch=epoch, is_measured=is_measured):
                fields = {"world_loss_tokens": sampled.world_loss_tokens, "dp_size": schedule.world_size}
                picks.append(Pick(sample_ids[sampled.indices], sampled.num_rows, fields, sampled))
        return picks

    def _lengths(self, sample_ids: NDArray[np.int64]) -> Iterator[SampleLengths]:
        """Yield the lengths of these samples, in blocks."""
        for first in range(0, len(sample_ids), _SAMPLES_AT_ONCE):
            block = sample_ids[first : first + _SAMPLES_AT_ONCE]
            yield self._collate.lengths(group_by_store(self._stores, block), len(block))
