"""`RandomBatches`: batches drawn from distributions and collated like datasets, for benchmarks and tests."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import StateError
from evenrank.core.rules import Count, NonNegative
from evenrank.core.settings import Settings, check_types
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.dataloader.collate.semantic_ids import CodeTable
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.rank_loader import RankLoader, make_rng
from evenrank.dataloader.state.checks import Epoch, Natural, StateFormat, Text
from evenrank.dataloader.state.resume_point import Position, ResumePoint
from evenrank.datasets.distributions import Distribution, Lognormal, Uniform, Zipf, draw_actions
from evenrank.datasets.schema import (
    ACTION,
    ITEM_ID,
    MULTI_VALUED,
    TIMESTAMP_MS,
    USER_ID,
    Manifest,
    check_names,
)
from evenrank.datasets.store import SequenceStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomFeature(Settings):
    """A contextual feature with any number of `values` per sample."""

    values: Distribution
    lengths: Distribution
    """Number of values of a sample."""
    max_length: NonNegative
    """Limit to `lengths`; larger draws are clipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomData(Settings):
    """The distributions of the samples of random batches."""

    lengths: Distribution = Lognormal()
    """Events of a sample, including its candidates or its target."""
    items: Distribution = Zipf(exponent=1.05, high=100_000)
    actions: Distribution = Uniform(low=0, high=9)
    """Actions, 0..2^31-1."""
    contextual: Mapping[str, Distribution | RandomFeature] = field(default_factory=dict)
    """By name of the contextual feature; a distribution draws one value per sample."""
    users: Distribution = Uniform(low=0, high=999_999)
    num_real: Distribution | None = None
    """Samples of a batch, clipped to batch_size; None: all rows are samples."""

    def _check(self) -> None:
        check_names(self.contextual)


def draw_samples(
    data: RandomData, rng: np.random.Generator, num_samples: int, *, min_length: int, split: str
) -> SequenceStore:
    """Draw samples of at least `min_length` events, as the rows of a store; an action out of range is a ConfigError."""
    offsets = _offsets(np.maximum(data.lengths.sample(rng, num_samples), min_length))
    num_events = int(offsets[-1])
    actions = draw_actions(data.actions, rng, num_events)
    columns: dict[str, NDArray[Any]] = {ACTION: actions, TIMESTAMP_MS: np.arange(num_events)}
    contextual, list_offsets, list_limits = {}, {}, {}
    for name, feature in data.contextual.items():
        num_values, contextual[name] = num_samples, "int64"
        if isinstance(feature, RandomFeature):
            lengths, contextual[name] = feature.lengths.sample(rng, num_samples), MULTI_VALUED
            list_limits[name] = feature.max_length
            list_offsets[name] = _offsets(np.clip(lengths, 0, feature.max_length))
            num_values, feature = int(list_offsets[name][-1]), feature.values
        columns[name] = feature.sample(rng, num_values)
    columns[ITEM_ID] = data.items.sample(rng, num_events)
    columns[USER_ID] = data.users.sample(rng, num_samples)
    return SequenceStore(
        manifest=Manifest(dataset="random", contextual=contextual),
        split=split,
        offsets=offsets,
        columns=columns,
        list_offsets=list_offsets,
        list_limits=list_limits,
    )


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)])


_FIELDS = {"epoch": Epoch, "position": Natural, "fingerprint": Text}
_FORMAT = StateFormat(owner="random batches", version=3, fields=_FIELDS)


class RandomBatches(RankLoader[Batch]):
    """Random batches of one rank; each iteration is one epoch, and all epochs have the same batches.

    Rank r's batch of step s depends only on seed, r and s. Lengths are raised to the number of candidates, or to 1 for
    semantic ids, because shorter histories are not samples.

    Args:
        config: LoaderConfig, or SemanticIdConfig with codes for all items that `data` may draw (see `random_codes`).
            Order, workers and split are ignored.
        data: None: the defaults of RandomData.
        num_batches: batches of an epoch.
        num_distinct: make this many batches now and cycle through them, so that a timed loop never waits for batches:
            step s has the tensors, sample ids included, of step s mod num_distinct. None: each step has samples of its
            own, drawn when they are needed.
        rank: data-parallel rank of this process, 0..world_size-1.
        world_size: number of data-parallel ranks.

    Raises:
        ConfigError: an argument is out of range, or the settings need a column that random batches lack.
    """

    def __init__(
        self,
        config: ReadConfig[Batch],
        data: RandomData | None = None,
        *,
        num_batches: Count,
        num_distinct: Count | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_types(RandomBatches, locals())
        super().__init__(config, rank=rank, world_size=world_size)
        self._data = RandomData() if data is None else data
        self._num_batches = num_batches
        self._num_distinct = num_distinct
        self._check_columns(self._draw(np.random.default_rng(0), 0))
        self._cycle = [self._make(step) for step in range(min(num_distinct or 0, num_batches))]

    def __len__(self) -> int:
        """Return the number of batches of an epoch, whatever state was loaded."""
        return self._num_batches

    def remaining_batches(self) -> int:
        """Return the number of batches of the next iteration: fewer than an epoch's after `load_state_dict`."""
        return self._num_batches - self._current.next.position // self._samples_per_step

    def __iter__(self) -> Iterator[Batch]:
        point = self._current.begin()
        first = point.position // self._samples_per_step
        for step in range(first, self._num_batches):
            batch = self.batch(step)
            batch.epoch, batch.step = point.epoch, step - first
            self._current.after_last = Position(batch.epoch, batch.position)
            yield batch

    def batch(self, step: int) -> Batch:
        """Return the batch of a step of the first epoch."""
        made = self._cycle[step % len(self._cycle)] if self._cycle else self._make(step)
        return dataclasses.replace(made, step=step, position=(step + 1) * self._samples_per_step)

    def _own_invariants(self) -> dict[str, Any]:
        # Without the distributions: ranks may draw from different ones.
        return {"num_batches": self._num_batches, "num_distinct": self._num_distinct}

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after the batch yielded last, or after another one; the same on all ranks."""
        return _FORMAT.make(**self._current.after(after)._asdict(), fingerprint=self._fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the position that `state_dict` returned.

        Raises:
            StateError: the state is of another version or of other settings, including world size and batch size.
        """
        state = _FORMAT.check(state)
        if state["fingerprint"] != self._fingerprint:
            raise StateError(
                f"the state of random batches has fingerprint {state['fingerprint'][:12]}, these batches "
                f"{self._fingerprint[:12]}; load it with the seed, num_batches, num_distinct, batch_size, world_size, "
                "codes and key_maps that it was saved with"
            )
        epoch, position = state["epoch"], state["position"]
        num_samples = self._num_batches * self._samples_per_step
        if position % self._samples_per_step or position > num_samples:
            raise StateError(
                f"the state of random batches has position {position}, which is not after a step of "
                f"{self._samples_per_step} samples; load a state that state_dict returned"
            )
        self._current.move_to(ResumePoint(epoch=epoch, position=position), is_over=position == num_samples)

    @property
    def _samples_per_step(self) -> int:
        return self._world_size * self._config.batch_size

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of everything that batches depend on, besides the rank and the distributions."""
        names = ("world_size", "seed", "num_batches", "num_distinct", "batch_size", "key_maps")
        settings = {name: self._invariants[name] for name in names}
        decisive = {"rank": None, **settings, "filters": self._collate.filters()}
        return hashlib.sha256(repr(decisive).encode()).hexdigest()

    def _make(self, step: int) -> Batch:
        batch_size = num_samples = self._config.batch_size
        rng = make_rng(self._config.seed, self._rank, step)
        if self._data.num_real is not None:
            num_samples = int(np.clip(self._data.num_real.sample(rng, 1)[0], 0, batch_size))
        rows = np.arange(num_samples)
        sample_ids = (step * self._world_size + self._rank) * batch_size + rows
        store = self._draw(rng, num_samples).remapped(self._config.key_maps)
        return self._make_batch([StoreRows(store, rows, rows)], sample_ids, self._config.seed, epoch=0)

    def _draw(self, rng: np.random.Generator, num_samples: int) -> SequenceStore:
        min_length = getattr(self._config, "max_num_candidates", 1)
        return draw_samples(self._data, rng, num_samples, min_length=min_length, split=self._config.split)


def random_codes(num_items: Count, *, levels: Count, codebook_size: Count, seed: int = 0) -> CodeTable:
    """Draw `levels` codes in 0..codebook_size-1 for each of the items 0..num_items-1, for a SemanticIdConfig."""
    check_types(random_codes, locals())
    codes = np.random.default_rng(seed).integers(0, codebook_size, (num_items, levels), dtype=np.int32)
    return CodeTable(codes=codes, codebook_sizes=(codebook_size,) * levels)
