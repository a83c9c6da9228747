"""Which rows of opened datasets are samples, and `StepSampler`: those of a rank in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics
from evenrank.dataloader.batches.batch import JaggedBatch, LossKey
from evenrank.dataloader.batches.memory import HOST, Memory
from evenrank.dataloader.batches.schema import BatchSchema, FieldSpec, schema_of
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import DrawKey, SampleLengths, group_by_store
from evenrank.dataloader.collate.jagged import jagged
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.dataloader.state.resume_point import ResumePoint, SkippedSamples
from evenrank.datasets.order import EpochSchedule, SampleOrder, Samples, StepSchedule
from evenrank.datasets.store import SequenceStore

NUM_CANDIDATES = "num_candidates"
_NO_ROWS = np.empty(0, dtype=np.int64)


def find_samples(
    stores: Sequence[SequenceStore], collate: Collate
) -> tuple[list[Samples], dict[str, NDArray[np.int64]]]:
    """Return the samples of each store and, per reason, the rows of all stores that are not samples, ascending."""
    samples: list[Samples] = []
    left_out: dict[str, NDArray[np.int64]] = {}
    first_row = 0  # of the store, over all stores
    for store in stores:
        others = [] if store is stores[0] else [store, stores[0]]
        schemas = [StoredSamples([each], collate.of(each.manifest), 1).schema for each in others]
        if differences := [text for schema in schemas[1:] for text in schemas[0].differences(schema)]:
            raise DataError(
                f"batches of {store.folder} and {stores[0].folder} differ in {'; '.join(differences)}; a mixture needs "
                "datasets with the same columns"
            )
        unusable = collate.unusable(store)
        for reason, rows in unusable.items():
            left_out[reason] = np.concatenate([left_out.get(reason, _NO_ROWS), first_row + rows])
        samples.append(Samples(num_rows=len(store), left_out=np.unique(np.concatenate([*unusable.values(), _NO_ROWS]))))
        first_row += len(store)
    return samples, left_out


def remapped_stores(
    stores: Sequence[SequenceStore], collate: Collate, key_maps: Mapping[str, KeyMap]
) -> tuple[SequenceStore, ...]:
    """Return these stores, which fit the collate, with the rows of tables in the columns that have a KeyMap."""
    if key_maps:
        (empty,) = collate(group_by_store(stores, _NO_ROWS), _NO_ROWS, batch_size=1)
        features = empty.features.keys()
        if unknown := [name for name in key_maps if name not in features]:
            raise ConfigError(
                f"key_maps has {unknown[0]!r}, which is no feature of the batches; they have {', '.join(features)}"
            )
    # Features that are made when batches are have no column.
    return tuple(
        store.remapped({name: key_maps[name] for name in key_maps if name in store.columns}) for store in stores
    )


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

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step over all ranks."""
        return self.world_size * self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Iteration:
    """The part of an epoch that a loader iterates over, from `point` on."""

    point: ResumePoint
    order: SampleOrder
    schedule: StepSchedule
    seed: int
    left: Event = field(default_factory=Event)
    """Set once it is over, also where a thread still plans steps of it."""

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the samples at these positions: int64 of the same shape."""
        return self.order.rows(positions, seed=self.seed, epoch=self.point.epoch)

    def keys(self, positions: NDArray[np.int64]) -> DrawKey:
        """Return what is drawn by for the samples at these positions."""
        return DrawKey(self.seed, self.point.epoch, self.rows(positions))


class StoredSamples:
    """The samples of opened datasets. Any thread may read them."""

    def __init__(self, stores: Sequence[SequenceStore], collate: Collate, batch_size: int) -> None:
        self.stores = stores
        self.collate = collate
        self._batch_size = batch_size
        self.padding = collate.padding
        self.schema = schema_of(self.batches([StepSamples(_NO_ROWS, {})])[0])

    def lengths(self, key: DrawKey) -> SampleLengths:
        """Return the lengths of samples in an epoch."""
        return self.collate.lengths(group_by_store(self.stores, key.sample_ids), key)

    def name(self, sample_id: int) -> str:
        """Return the row of a sample and the folder of its dataset."""
        ((store, rows, _),) = group_by_store(self.stores, np.array([sample_id]))
        return f"row {int(store.rows_of(rows)[0])} of {store.folder or 'the dataset'}"

    def batches(
        self, steps: Sequence[StepSamples], *, seed: int = 0, epoch: int = 0, memory: Memory = HOST
    ) -> list[Any]:
        """Make the batch of each step, in one pass if all but the last are full."""
        is_full = all(len(step.sample_ids) == self._batch_size for step in steps[:-1])
        batches: list[Any] = []
        for run in [steps] if is_full else [[step] for step in steps]:
            sample_ids = np.concatenate([step.sample_ids for step in run])
            groups = group_by_store(self.stores, sample_ids)
            shape = {"batch_size": self._batch_size, "num_batches": len(run)}
            batches += self.collate(groups, sample_ids, **shape, seed=seed, epoch=epoch, memory=memory)
        for batch, step in zip(batches, steps, strict=True):
            for name, value in step.fields.items():
                setattr(batch, name, value)
        return batches


class GivenLengths:
    """Samples whose lengths a user knows."""

    padding = None  # the user's collate_fn pads

    def __init__(
        self, lengths: Mapping[str, ArrayLike], num_samples: int, batch_size: int, loss_key: LossKey | None
    ) -> None:
        arrays = {name: np.asarray(values) for name, values in lengths.items()}
        for name, values in arrays.items():
            if values.shape != (num_samples,) or values.dtype.kind not in "iu":
                found = f"{values.dtype} of shape {values.shape}"
                raise ConfigError(f"lengths[{name!r}] must be integers of shape ({num_samples},), got {found}")
            if values.min(initial=0) < 0:
                raise ConfigError(f"lengths[{name!r}] must not be negative, got {values.min()}")
        self._arrays = dict(arrays)
        zeros = np.zeros(num_samples, dtype=np.int64)
        self._num_candidates = arrays.pop(NUM_CANDIDATES, zeros).astype(np.int64)
        fields = {} if loss_key is None else {loss_key.key: loss_key.field}
        self._of_keys = {
            (fields.get(name, jagged().field), name): values.astype(np.int64) for name, values in arrays.items()
        }
        specs = tuple(
            FieldSpec(name=field, keys=(name,), dtype=torch.int64, lengths_dtype=torch.int64)
            for field, name in self._of_keys
        )
        self.schema = BatchSchema(batch_type=JaggedBatch, batch_size=batch_size, fields=specs, loss_key=loss_key)

    def check(self, batch: JaggedBatch, sample_ids: NDArray[np.int64]) -> None:
        """Raise a ConfigError if these samples have other lengths in their batch."""
        found: dict[str, Tensor] = {}
        for name, value in batch.tensors():
            if isinstance(value, KeyedJaggedTensor):
                of_keys = zip(value.keys(), value.lengths().view(len(value.keys()), -1), strict=True)
                found |= {key: each for key, each in of_keys if key not in found or (name, key) in self._of_keys}
            elif name == NUM_CANDIDATES and value is not None:
                found[name] = value
        for name in self._arrays.keys() & found.keys():
            given, made = self._arrays[name][sample_ids], found[name][: len(sample_ids)].cpu().numpy()
            for index in np.flatnonzero(given != made)[:1]:
                raise ConfigError(
                    f"sample {sample_ids[index]} has {made[index]} for {name!r} in its batch, but lengths[{name!r}] "
                    f"says {given[index]}; pass the lengths of what collate_fn makes"
                )

    def lengths(self, key: DrawKey) -> SampleLengths:
        """Return the lengths of samples, the same in all epochs."""
        of_keys = {name: values[key.sample_ids] for name, values in self._of_keys.items()}
        return SampleLengths(of_keys=of_keys, num_candidates=self._num_candidates[key.sample_ids])

    def name(self, sample_id: int) -> str:
        """Return the index of a sample."""
        return f"sample {sample_id} of the dataset"


KnownLengths = StoredSamples | GivenLengths
"""Samples whose lengths are known without reading them."""


class StepSampler:
    """Samples of one rank in each step: its share of the order. Any thread may call it."""

    def __init__(self, shape: StepShape) -> None:
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

    def resume(self, order: SampleOrder, after: ResumePoint, skipped: SkippedSamples, *, seed: int) -> ResumePoint:
        """Return where to go on, given the point after a saved position, maybe of another kind of loader."""
        return after

    def rank_invariants(self, order: SampleOrder, *, seed: int) -> dict[str, Any]:
        """Return further values that must be the same on all ranks, by name."""
        return {}

    def sample(self, iteration: Iteration, steps: range, *, is_measured: bool) -> list[StepSamples]:
        """Return the samples of these steps; with metrics if they are balanced and `is_measured`."""
        positions = [iteration.schedule.positions(step, self._shape.rank) for step in steps]
        sample_ids = iteration.rows(np.concatenate(positions))
        ends = np.cumsum([len(own) for own in positions])
        return [StepSamples(own, {}) for own in np.split(sample_ids, ends[:-1])]
