"""`RankLoader`: base of the loaders of one rank, and the settings that must be the same on all ranks."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.rules import PER_RANK
from evenrank.core.settings import rules_of
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.batches.tensors import outside_inference_mode
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.dataloader.collate.negatives import NegativeSampler, Sources
from evenrank.dataloader.collate.semantic_ids import CodeTable
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.sampling.steps import remapped_stores
from evenrank.dataloader.state.node import EpochNode, HasRankInvariants
from evenrank.dataloader.state.resume_point import CurrentPosition, HasEpoch
from evenrank.datasets.store import SequenceStore

# Compared by their contents: the file may be at another path on another host.
_FILES = frozenset({"codes", "codebook_sizes", "negatives"})

Transform = Callable[[Batch, np.random.Generator], Batch]
"""Returns the batch to yield. The generator's numbers depend on seed, epoch and position, not on the workers."""


class RankLoader(HasEpoch, EpochNode[Batch], HasRankInvariants, Generic[Batch]):
    """The batches of one rank; each iteration is one epoch. For the arguments see `build_loader`."""

    def __init__(
        self,
        config: ReadConfig[Batch],
        *,
        rank: int,
        world_size: int,
        transform: Transform[Batch] | None = None,
        sources: Sources = (),
    ) -> None:
        check_rank(rank, world_size)
        super().__init__()
        self._config = config
        self._collate = config.make_collate(sources)
        self._rank = rank
        self._world_size = world_size
        self._transform = transform
        self._current = CurrentPosition(config.seed)

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
            **shared_settings(self._config, self._collate),
            "transform": _name_of(self._transform),
            **self._own_invariants(),
        }

    def _check_columns(self, store: SequenceStore) -> None:
        """Raise a ConfigError unless the settings fit the columns of a store, whose rows are read later."""
        self._collate.check(store)
        remapped_stores([store], self._collate, self._config.key_maps)

    def _find_samples(self, store: SequenceStore, left_out: Counter[str]) -> NDArray[np.bool_]:
        """Return whether each row of a store is a sample, bool [rows], and count the others, per reason."""
        is_sample = np.ones(len(store), dtype=bool)
        for reason, rows in self._collate.unusable(store).items():
            left_out[reason] += len(rows)
            is_sample[rows] = False
        return is_sample

    @outside_inference_mode()
    def _make_batch(
        self, groups: Sequence[StoreRows], sample_ids: NDArray[np.int64], seed: int, *counters: int, **fields: Any
    ) -> Batch:
        """Make a batch with these fields, and `_finish` it."""
        shape = {"batch_size": self._config.batch_size, "seed": seed}
        (batch,) = self._collate(groups, sample_ids, **shape, epoch=fields["epoch"])
        for name, value in fields.items():
            setattr(batch, name, value)
        return self._finish(batch, seed, *counters)

    def _finish(self, batch: Batch, seed: int, *counters: int) -> Batch:
        """Transform a batch with a generator for seed, epoch and `counters`, and pin it."""
        if self._transform is not None:
            epoch, step, position = batch.epoch, batch.step, batch.position
            try:
                batch = self._transform(batch, make_rng(seed, epoch, *counters))
            except StopIteration as error:  # would be taken for the end of the epoch
                raise RuntimeError(
                    f"the transform raised StopIteration in step {step} of epoch {epoch}; pass next() a default, or "
                    "raise another error"
                ) from error
            if not isinstance(batch, JaggedBatch):
                raise ConfigError(f"the transform returned a {type(batch).__name__}; return the batch to yield")
            batch.epoch, batch.step, batch.position = epoch, step, position  # from which states follow
        return batch.pin_memory() if self._config.pin_memory else batch


def check_rank(rank: int, world_size: int) -> None:
    """Raise a ConfigError unless both are integers, and the rank is one of 0..world_size-1."""
    if not (type(rank) is type(world_size) is int and 0 <= rank < world_size):
        raise ConfigError(
            f"rank must be between 0 and world_size - 1, got rank {rank} of {world_size}; pass this process's rank, an "
            "integer"
        )


def shared_settings(*records: Any) -> dict[str, Any]:
    """Return the fields of dataclasses, except PER_RANK ones, by name, as plain values that ranks can compare."""
    settings: dict[str, Any] = {}
    for record in records:
        for name, rules in rules_of(type(record)).items():
            value = getattr(record, name)
            if isinstance(value, CodeTable | NegativeSampler):
                settings["codes" if isinstance(value, CodeTable) else "negatives"] = value.describe()
            elif PER_RANK not in rules and name not in _FILES:
                settings[name] = _plain(value)
    return settings


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
