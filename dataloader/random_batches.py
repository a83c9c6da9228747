"""`RandomBatches`: batches drawn from distributions and collated like datasets, for benchmarks and tests."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count, NonNegative
from evenrank.core.settings import Settings, check_types
from evenrank.dataloader.batches.batch import Batch
from evenrank.dataloader.batches.tensors import outside_inference_mode
from evenrank.dataloader.codes import CodeTable
from evenrank.dataloader.collate.gather import StoreRows
from evenrank.dataloader.config import LoaderConfig
from evenrank.dataloader.rank_loader import StepLoader, Transform, make_rng
from evenrank.dataloader.sampling.steps import StepSamples
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


class RandomBatches(StepLoader[Batch]):
    """Random batches of one rank; each iteration is one epoch, and all epochs have the same batches.

    Rank r's batch of step s depends only on the seed and on s * world_size + r, so a state can be loaded with another
    world size where that has as many samples, with another `num_batches`. Lengths are raised to the number of
    candidates, which is 1 for semantic ids, because shorter histories are not samples.

    Args:
        config: of the batches; its codes must be those of all items that `data` may draw (see `random_codes`). Samples
            have no order and no split: `shuffle` and `rows` are the same.
        data: None: the defaults of RandomData.
        num_batches: batches of an epoch.
        num_distinct: make this many batches now and cycle through them, so that a timed loop never waits for batches:
            step s has the tensors, sample ids included, of step s mod num_distinct. None: each step has samples of its
            own, drawn when they are needed.
        rank: data-parallel rank of this process, 0..world_size-1.
        world_size: number of data-parallel ranks.
        transform: as in `build_loader`.

    Raises:
        ConfigError: an argument is out of range, or the settings need a column that random batches lack.
    """

    def __init__(
        self,
        config: LoaderConfig,
        data: RandomData | None = None,
        *,
        num_batches: Count,
        num_distinct: Count | None = None,
        rank: int = 0,
        world_size: int = 1,
        transform: Transform[Batch] | None = None,
    ) -> None:
        check_types(RandomBatches, locals())
        if not isinstance(config.order, str):
            raise ConfigError(f"random batches have no times or requests; leave out order={config.order!r}")
        if transform is not None and num_distinct is not None:
            raise ConfigError(
                "transform is called in each step, and the batches of num_distinct are made before; leave out one"
            )
        self._data = RandomData() if data is None else data
        self._draw = partial(draw_samples, self._data, min_length=config.max_num_candidates, split=config.split)
        empty = self._draw(np.random.default_rng(0), 0)
        super().__init__(config, empty.manifest, rank=rank, world_size=world_size, transform=transform)
        self._num_batches = num_batches
        self._num_distinct = num_distinct
        self._check_columns(empty)
        cycle = (num_distinct, world_size, config.seed) if num_distinct else None
        # Without the distributions, in which ranks may differ.
        decisive = ("random", cycle, config.batch_size, self._collate.filters())
        fingerprint = hashlib.sha256(repr(decisive).encode()).hexdigest()
        self._samples = self._in_order(num_batches * world_size * config.batch_size, fingerprint)
        self._cycle: list[Batch] = []
        self._cycle = [self.batch(step) for step in range(min(num_distinct or 0, num_batches))]

    def batch(self, step: int) -> Batch:
        """Return the batch of a step of the first epoch."""
        batch_size, seed = self._config.batch_size, self._config.seed
        first = (step * self._world_size + self._rank) * batch_size
        (batch,) = self._batches([StepSamples(first + np.arange(batch_size), {})], seed=seed, epoch=0)
        batch.step, batch.position = step, (step + 1) * self._world_size * batch_size
        return self._finish(batch, seed, first)

    def _batches(self, steps: Sequence[StepSamples], *, seed: int, epoch: int) -> list[Batch]:
        if not self._cycle:
            return [self._make(sample_ids, seed) for sample_ids, _, _ in steps]
        per_step = self._world_size * self._config.batch_size
        cycled = (self._cycle[int(sample_ids[0]) // per_step % len(self._cycle)] for sample_ids, _, _ in steps)
        return [dataclasses.replace(batch) for batch in cycled]

    def _own_invariants(self) -> dict[str, Any]:
        # Without the distributions: ranks may draw from different ones.
        return {"num_batches": self._num_batches, "num_distinct": self._num_distinct}

    @outside_inference_mode()
    def _make(self, sample_ids: NDArray[np.int64], seed: int) -> Batch:
        batch_size, num_samples = self._config.batch_size, len(sample_ids)
        rng = make_rng(seed, 0, int(sample_ids[0]) // batch_size if num_samples else 0)
        if self._data.num_real is not None:
            num_samples = int(np.clip(self._data.num_real.sample(rng, 1)[0], 0, num_samples))
        rows = np.arange(num_samples)
        groups = [StoreRows(self._draw(rng, num_samples).remapped(self._config.key_maps), rows, rows)]
        batch: Batch
        place: dict[str, Any] = {"batch_size": batch_size, "memory": self._collated_in}
        (batch,) = self._collate(groups, sample_ids[:num_samples], seed=seed, epoch=0, **place)
        return batch


def random_codes(num_items: Count, *, levels: Count, codebook_size: Count, seed: int = 0) -> CodeTable:
    """Draw `levels` codes in 0..codebook_size-1 for each of the items 0..num_items-1, for `LoaderConfig.codes`."""
    check_types(random_codes, locals())
    codes = np.random.default_rng(seed).integers(0, codebook_size, (num_items, levels), dtype=np.int32)
    return CodeTable(codes=codes, codebook_sizes=(codebook_size,) * levels)
