"""`RankLoader`: base of the loaders of one rank, and the settings that must be the same on all ranks.

`StepLoader`: base of those whose samples can be read in any order.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.rules import PER_RANK
from evenrank.core.settings import rules_of
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.batches.memory import HOST, Memory
from evenrank.dataloader.batches.padding import pad_tokens
from evenrank.dataloader.batches.tensors import outside_inference_mode
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.dataloader.collate.item_lists import Sources
from evenrank.dataloader.config import LoaderConfig
from evenrank.dataloader.sampling.epoch_positions import EpochPositions, EpochSamples
from evenrank.dataloader.sampling.steps import StepSampler, StepSamples, StepShape, remapped_stores
from evenrank.dataloader.state.node import EpochNode
from evenrank.dataloader.state.resume_point import CurrentPosition, Position
from evenrank.dataloader.workers import Workers
from evenrank.datasets.order import RowOrder, Samples
from evenrank.datasets.schema import IdSummary, Manifest
from evenrank.datasets.store import SequenceStore

# Compared by their contents: the file may be at another path on another host.
_FILES = frozenset({"codes", "codebook_sizes", "negatives", "candidate_sets"})

Transform = Callable[[Batch, np.random.Generator], Batch]
"""Returns the batch to yield. The generator's numbers depend on seed, epoch and position, not on the workers."""


class RankLoader(EpochPositions, EpochNode[Batch], Generic[Batch]):
    """The batches of one rank; each iteration is one epoch. For the arguments see `build_loader`.

    Batches have the columns of `manifest`; `ids` are those whose meaning a state has, None: its own.
    """

    def __init__(
        self,
        config: LoaderConfig,
        manifest: Manifest,
        *,
        rank: int,
        world_size: int,
        transform: Transform[Batch] | None = None,
        sources: Sources = (),
        ids: Mapping[str, IdSummary] | None = None,
    ) -> None:
        check_rank(rank, world_size)
        EpochNode.__init__(self)  # which protocols before it do not call
        self._config = config
        self._collate = Collate.create(config, manifest, sources)
        self._rank = rank
        self._world_size = world_size
        self._transform = transform
        self._memory = Memory(config.device, pins=config.pin_memory)
        self._workers = Workers(config.num_workers, ahead=config.num_workers, persistent=config.persistent_workers)
        meaning = {**(manifest.ids if ids is None else ids), **self._collate.ids}
        self._set_up(CurrentPosition(config.seed), meaning, config.key_maps)

    def __iter__(self) -> Iterator[Batch]:
        return self._hand_out(self._made_steps())

    def _made_steps(self) -> Iterator[tuple[Batch, Position, StepSamples]]:
        memory = self._memory
        memory.begin()
        for batch, position, samples in self._make_steps():
            yield memory.hand_out(batch), position, samples

    @abstractmethod
    def _make_steps(self) -> Iterator[tuple[Batch, Position, StepSamples]]:
        """Begin the next iteration, and yield the batch of each step, with the position after it."""

    def close(self) -> None:
        """Stop the threads that `persistent_workers` keeps; another iteration starts new ones."""
        self._workers.close()

    def get_state(self) -> dict[str, Any]:
        """Return `state_dict()` without comparing plans: some nodes of torchdata ask for it after every batch."""
        return self._state(None)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_observe": None, "_plan_check": None}  # often an open file; a connection

    @abstractmethod
    def _own_invariants(self) -> dict[str, Any]:
        """Return further settings that must be the same on all ranks."""

    def rank_invariants(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks, and this process's `rank`."""
        return {**self._invariants, "seed": self._current.seed}

    @cached_property  # because a Balancer compares invariants in every step
    def _invariants(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            **shared_settings(self._config),
            **self._collate.describe(),
            "transform": _name_of(self._transform),
            **self._own_invariants(),
        }

    def _in_order(self, num_samples: int, fingerprint: str) -> EpochSamples:
        """Return the samples 0..num_samples-1, of which each rank gets consecutive ones in each step."""
        drop_last = self._config.drop_last
        shape = StepShape(self._rank, self._world_size, self._config.batch_size, drop_last=drop_last)
        rows = Samples(num_rows=num_samples, left_out=np.empty(0, dtype=np.int64))
        return EpochSamples(order=RowOrder(samples=rows), sampler=StepSampler(shape), fingerprint=fingerprint)

    def _check_columns(self, store: SequenceStore) -> None:
        """Raise a ConfigError unless the settings fit the columns of a store, whose rows are read later."""
        remapped_stores([store], self._collate.of(store.manifest), self._config.key_maps)

    @outside_inference_mode()
    def _make_batch(
        self, groups: Sequence[StoreRows], sample_ids: NDArray[np.int64], seed: int, *counters: int, **fields: Any
    ) -> Batch:
        """Make a batch with these fields, and `_finish` it."""
        batch: Batch
        shape = {"batch_size": self._config.batch_size, "seed": seed}
        (batch,) = self._collate(groups, sample_ids, **shape, epoch=fields["epoch"], memory=self._collated_in)
        for name, value in fields.items():
            setattr(batch, name, value)
        return self._finish(batch, seed, *counters)

    @property
    def _collated_in(self) -> Memory:
        """Where batches are collated: those that are changed are on the CPU."""
        return self._memory if self._transform is None and self._collate.padding is None else HOST

    def _finish(self, batch: Batch, seed: int, *counters: int) -> Batch:
        """Transform a batch, if there is a transform, with a generator for seed, epoch and `counters`, and pad it."""
        padding = self._collate.padding
        if self._transform is None:
            return batch if padding is None else self._memory.move(pad_tokens(batch, padding))
        epoch, step, position = batch.epoch, batch.step, batch.position
        try:
            batch = self._transform(batch, make_rng(seed, epoch, *counters))
        except StopIteration as error:  # would be taken for the end of the epoch
            raise RuntimeError(
                f"the transform raised StopIteration in step {step} of epoch {epoch}; pass next() a default, or raise "
                "another error"
            ) from error
        if not isinstance(batch, JaggedBatch):
            raise ConfigError(f"the transform returned a {type(batch).__name__}; return the batch to yield")
        batch.epoch, batch.step, batch.position = epoch, step, position  # from which states follow
        return self._memory.move(pad_tokens(batch, padding))


class StepLoader(RankLoader[Batch]):
    """A loader whose samples can be read in any order, so that threads make groups of `prefetch` batches."""

    @abstractmethod
    def _batches(self, steps: Sequence[StepSamples], *, seed: int, epoch: int) -> list[Batch]:
        """Return the batch of each step; any thread may call it."""

    def _make_steps(self) -> Iterator[tuple[Batch, Position, StepSamples]]:
        seed, iteration, is_measured = self._current.seed, self._begin_epoch(), self._observe is not None
        epoch, schedule = iteration.point.epoch, iteration.schedule
        sampler = self._samples_of(epoch).sampler

        @outside_inference_mode()
        def make_batches(steps: range) -> list[tuple[Batch, StepSamples]]:
            sampled = sampler.sample(iteration, steps, is_measured=is_measured)
            made = []
            for step, batch in zip(steps, self._batches(sampled, seed=seed, epoch=epoch), strict=True):
                batch.epoch, batch.step, batch.position = epoch, step, schedule.position_after(step)
                made.append(self._finish(batch, seed, schedule.first_position(step, self._rank)))
            return list(zip(made, sampled, strict=True))

        num_steps, prefetch = schedule.num_steps, self._config.prefetch
        step_ranges = (range(num_steps)[first : first + prefetch] for first in range(0, num_steps, prefetch))
        try:
            for batch, samples in chain.from_iterable(self._workers.map(make_batches, step_ranges)):
                yield batch, Position(batch.epoch, batch.position), samples
        finally:
            iteration.left.set()


def check_rank(rank: int, world_size: int) -> None:
    """Raise a ConfigError unless both are integers, and the rank is one of 0..world_size-1."""
    if not (type(rank) is type(world_size) is int and 0 <= rank < world_size):
        raise ConfigError(
            f"rank must be between 0 and world_size - 1, got rank {rank} of {world_size}; pass this process's rank, an "
            "integer"
        )


def shared_settings(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, except PER_RANK ones, by name, as plain values that ranks can compare."""
    rules = rules_of(type(record))
    return {name: _plain(getattr(record, name)) for name in rules if PER_RANK not in rules[name] and name not in _FILES}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return tuple((name, _plain(value[name])) for name in sorted(value))
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _name_of(function: object) -> str | None:
    """Return the name of a function, or of the class of another callable; None for None."""
    while isinstance(function, partial):  # the arguments of a transform may contain its rank
        function = function.func
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)


def make_rng(seed: int, *counters: int) -> np.random.Generator:
    """Return the random generator for a seed, which may be negative, and counters such as epoch and position."""
    return np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, *counters])
