"""`Pick`: the samples that a rank trains in a step: its share of the order, or one that is balanced over the ranks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.packing import clip_tokens, pack
from evenrank.dataloader.balance.sampler import BalanceConfig, SampledStep, Sampler
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.batch_schema import schema_of
from evenrank.dataloader.collate.lengths import SampleLengths
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.collate.spans import group_by_store
from evenrank.datasets.order import EpochSchedule, SampleOrder, StepSchedule
from evenrank.datasets.store import SequenceStore

_PLANS_KEPT = 4  # the rest of an epoch and all of it, for the epoch that is iterated over and the next one

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


class Picker(ABC, Generic[Batch]):
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

    def schedule(self, order: SampleOrder, *, epoch: int, start: int, seed: int) -> StepSchedule:
        """Return the steps of what is left of an epoch after `start` positions."""
        return EpochSchedule(
            num_samples=order.num_samples,
            world_size=self._shape.world_size,
            batch_size=self._shape.batch_size,
            start=start,
            drop_last=self._shape.drop_last,
        )

    def identity(self, order: SampleOrder, *, seed: int) -> dict[str, Any]:
        """Return what must be the same on all ranks besides the settings, by name."""
        return {}

    @abstractmethod
    def pick(
        self,
        order: SampleOrder,
        schedule: StepSchedule,
        steps: range,
        *,
        epoch: int,
        seed: int,
        is_measured: bool,
    ) -> list[Pick]:
        """Return the picks of these steps, if they are balanced and `is_measured` with metrics."""

    def collate(self, picks: Sequence[Pick]) -> list[Batch]:
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


class OwnPicker(Picker[Batch]):
    """Each rank trains its share of the order."""

    def pick(
        self,
        order: SampleOrder,
        schedule: StepSchedule,
        steps: range,
        *,
        epoch: int,
        seed: int,
        is_measured: bool,
    ) -> list[Pick]:
        """Return the picks of these steps."""
        positions = [schedule.positions(step, self._shape.rank) for step in steps]
        sample_ids = order.rows(np.concatenate(positions), seed=seed, epoch=epoch)
        of_steps = np.split(sample_ids, np.cumsum([len(own) for own in positions])[:-1])
        return [Pick(own, self._shape.batch_size, {}, None) for own in of_steps]


class BalancedPicker(Picker[Batch]):
    """Each rank plans the step of all ranks, from lengths, and trains its part.

    Args:
        stores: see `Picker`.
        collate: see `Picker`.
        shape: see `Picker`.
        balance: how.

    Raises:
        ConfigError: an option of `balance` is out of range.

    """

    def __init__(
        self, stores: Sequence[SequenceStore], collate: Collate[Batch], shape: StepShape, balance: BalanceConfig
    ) -> None:
        super().__init__(stores, collate, shape)
        (empty,) = self.collate([Pick(np.empty(0, dtype=np.int64), shape.batch_size, {}, None)])
        self._balance = replace(balance, group=None, on_step=None)  # which cannot be pickled, or need not be
        self._sampler = Sampler(balance, schema_of(empty), rank=shape.rank, world_size=shape.world_size)

    def identity(self, order: SampleOrder, *, seed: int) -> dict[str, Any]:
        """Return a hash of how a first step is planned."""
        first = Picker.schedule(self, order, epoch=0, start=0, seed=seed)
        if first.num_steps == 0:
            return {}
        sample_ids = order.rows(first.positions_of_all(range(1)), seed=seed, epoch=0)
        lengths = self._collate.lengths(group_by_store(self._stores, sample_ids), len(sample_ids))
        return {"costs and plan of the first step": self._sampler.fingerprint(lengths, first.num_loaded(0))}

    def pick(
        self,
        order: SampleOrder,
        schedule: StepSchedule,
        steps: range,
        *,
        epoch: int,
        seed: int,
        is_measured: bool,
    ) -> list[Pick]:
        """Return the picks of these steps."""
        picks = []
        at_once = max(1, _SAMPLES_AT_ONCE // (self._shape.world_size * self._shape.batch_size))
        for run in (steps[first : first + at_once] for first in range(0, len(steps), at_once)):
            sample_ids = order.rows(schedule.positions_of_all(run), seed=seed, epoch=epoch)
            num_loaded = np.stack([schedule.num_loaded(step) for step in run])
            planned = self._sampler.plan(
                self._lengths(sample_ids), run, num_loaded, epoch=epoch, is_measured=is_measured
            )
            for sampled in planned:
                fields = {"world_loss_tokens": sampled.world_loss_tokens, "dp_size": self._shape.world_size}
                picks.append(Pick(sample_ids[sampled.indices], sampled.num_rows, fields, sampled))
        return picks

    def _lengths(self, sample_ids: NDArray[np.int64]) -> Iterator[SampleLengths]:
        """Yield the lengths of these samples, in blocks."""
        for first in range(0, len(sample_ids), _SAMPLES_AT_ONCE):
            block = sample_ids[first : first + _SAMPLES_AT_ONCE]
            yield self._collate.lengths(group_by_store(self._stores, block), len(block))


class PackedPicker(BalancedPicker[Batch]):
    """A BalancedPicker whose steps have as many samples as fit `max_tokens_per_rank`.

    Args:
        stores: see `Picker`.
        collate: see `Picker`.
        shape: see `Picker`.
        balance: how.

    Raises:
        ConfigError: an option of `balance` is out of range.

    """

    def __init__(
        self, stores: Sequence[SequenceStore], collate: Collate[Batch], shape: StepShape, balance: BalanceConfig
    ) -> None:
        super().__init__(stores, collate, shape, balance)
        self._plans: dict[tuple[int, int, int], StepSchedule] = {}  # by epoch, start and seed

    def schedule(self, order: SampleOrder, *, epoch: int, start: int, seed: int) -> StepSchedule:
        """Return the steps of what is left of an epoch after `start` positions. Each such rest is planned once.

        Raises:
            ConfigError: a sample has more tokens than a rank may have, or there is no such position.

        """
        max_tokens = self._balance.max_tokens_per_rank
        assert max_tokens is not None  # BalanceConfig has checked it

        def tokens_at(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            sample_ids = order.rows(positions, seed=seed, epoch=epoch)
            tokens = np.concatenate([self._sampler.count_tokens(block) for block in self._lengths(sample_ids)])
            return clip_tokens(tokens, max_tokens, self._balance.on_overflow, lambda i: self._name(sample_ids[i]))

        super().schedule(order, epoch=epoch, start=start, seed=seed)  # checks the start
        key = (epoch, start, seed)
        plan = self._plans.get(key)
        if plan is None:
            plan = pack(
                tokens_at,
                num_samples=order.num_samples,
                start=start,
                world_size=self._shape.world_size,
                batch_size=self._shape.batch_size,
                max_tokens=max_tokens,
                drop_last=self._shape.drop_last,
            )
            # Replaced rather than changed, because other threads may read it.
            self._plans = dict([*self._plans.items()][1 - _PLANS_KEPT :]) | {key: plan}
        return plan

    def _name(self, sample_id: np.int64) -> str:
        """Return the name of a sample for an error message."""
        ((store, rows, _),) = group_by_store(self._stores, np.array([sample_id]))
        return f"row {int(rows[0])} of {store.folder or 'the dataset'}"


def make_picker(
    stores: Sequence[SequenceStore], collate: Collate[Batch], shape: StepShape, balance: BalanceConfig | None
) -> Picker[Batch]:
    """Return what picks the samples of a loader; see `Picker` for the arguments.

    Raises:
        ConfigError: an option of `balance` is out of range.

    """
    if balance is None:
        return OwnPicker(stores, collate, shape)
    return (PackedPicker if balance.pack else BalancedPicker)(stores, collate, shape, balance)
