"""Batches drawn from distributions, for benchmarks and tests; they are collated like those of datasets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.collate.semantic_ids import CodeTable
from evenrank.dataloader.collate.spans import StoreRows
from evenrank.dataloader.config import ReadConfig, check_rank
from evenrank.dataloader.protocols import HasIdentity
from evenrank.dataloader.transform import make_rng
from evenrank.datasets.distributions import Distribution, Lognormal, Uniform, Zipf, draw_actions
from evenrank.datasets.schema import ACTION, EVENT_DTYPES, ITEM_ID, SCHEMA_VERSION, TIMESTAMP_MS, USER_ID, Manifest
from evenrank.datasets.store import MultiValued, SequenceStore

Batch = TypeVar("Batch", bound=JaggedBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomFeature:
    """A contextual feature of random batches with any number of values per sample."""

    values: Distribution
    """Of each value."""
    lengths: Distribution
    """Values of a sample."""
    max_length: int
    """Larger draws of `lengths` are set to it."""

    def __post_init__(self) -> None:
        if self.max_length < 0:
            raise ConfigError(f"max_length must be at least 0, got {self.max_length}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomData:
    """The distributions of the samples of random batches."""

    lengths: Distribution = Lognormal()
    """Events of a sample, including its candidates or its target."""
    items: Distribution = Zipf(exponent=1.05, high=100_000)
    """Item ids."""
    actions: Distribution = Uniform(low=0, high=9)
    """Actions, 0..2^31-1."""
    contextual: Mapping[str, Distribution | RandomFeature] = field(default_factory=dict)
    """Each contextual feature, by name; given as a distribution, it has one value per sample."""
    num_real: Distribution | None = None
    """Samples of a batch, clipped to batch_size; None: all rows are samples."""

    def __post_init__(self) -> None:
        if reserved := [name for name in self.contextual if name in EVENT_DTYPES or name == USER_ID]:
            raise ConfigError(
                f"a contextual feature cannot be called {reserved[0]!r}, a column of every dataset; rename it"
            )


class RandomBatches(HasIdentity, Generic[Batch]):
    """Random batches of one rank, the same ones in each iteration.

    Rank r's batch of step s depends only on seed, r and s. Lengths are raised to the number of candidates, or to 1 for
    semantic ids, because shorter histories are not samples.

    Args:
        config: LoaderConfig, or SemanticIdConfig with codes for all items that `data` may draw (see `random_codes`).
            Order, workers and split are ignored.
        data: distributions of the samples; None: the defaults of RandomData.
        num_batches: batches of an iteration.
        rank: of this process; ranks draw independently of each other.
        world_size: number of data-parallel ranks.

    Raises:
        ConfigError: an argument is out of range, or the settings need a column that random batches lack.

    """

    def __init__(
        self,
        config: ReadConfig[Batch],
        data: RandomData | None = None,
        *,
        num_batches: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if num_batches < 1:
            raise ConfigError(f"num_batches must be at least 1, got {num_batches}")
        check_rank(rank, world_size)
        self._config = config
        self._data = RandomData() if data is None else data
        self._collate = config.make_collate()
        self._num_batches = num_batches
        self._rank = rank
        self._world_size = world_size
        self._collate.check(self._draw(np.random.default_rng(0), 0))

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._num_batches):
            yield self.batch(step)

    def identity(self) -> dict[str, int]:
        """Return the settings that must be the same on all ranks, and this process's `rank`."""
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "seed": self._config.seed,
            "num_batches": self._num_batches,
        }

    def batch(self, step: int) -> Batch:
        """Return the batch of a step."""
        batch_size = self._config.batch_size
        rng = make_rng(self._config.seed, self._rank, step)
        num_samples = batch_size
        if self._data.num_real is not None:
            num_samples = int(np.clip(self._data.num_real.sample(rng, 1)[0], 0, batch_size))
        rows = np.arange(num_samples)
        sample_ids = (step * self._world_size + self._rank) * batch_size + rows
        store = self._draw(rng, num_samples)
        (batch,) = self._collate([StoreRows(store, rows, rows)], sample_ids, batch_size=batch_size)
        batch.step, batch.position = step, (step + 1) * self._world_size * batch_size
        if self._config.pin_memory:
            return batch.pin_memory()
        return batch

    def _draw(self, rng: np.random.Generator, num_samples: int) -> SequenceStore:
        """Draw samples, as the rows of a store."""
        min_length = getattr(self._config, "max_num_candidates", 1)
        lengths = np.maximum(self._data.lengths.sample(rng, num_samples), min_length)
        offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
        num_events = int(offsets[-1])
        actions = draw_actions(self._data.actions, rng, num_events)
        contextual, multi_valued = self._draw_context(rng, num_samples)
        events: dict[str, NDArray[np.integer]] = {
            ITEM_ID: self._data.items.sample(rng, num_events),
            ACTION: actions,
            TIMESTAMP_MS: np.arange(num_events),
        }
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            dataset="random",
            sources=(),
            options={},
            splits={},
            contextual=tuple(contextual),
            extra_events={},
            vocabulary_sizes={},
            context_labels={},
            content_hash="",
        )
        return SequenceStore(
            manifest=manifest,
            split=self._config.split,
            offsets=offsets,
            events={name: values.astype(EVENT_DTYPES[name]) for name, values in events.items()},
            rows={USER_ID: np.arange(num_samples), **contextual},
            multi_valued=multi_valued,
        )

    def _draw_context(
        self, rng: np.random.Generator, num_samples: int
    ) -> tuple[dict[str, NDArray[np.int64]], dict[str, MultiValued]]:
        """Draw the values of all contextual features, and where those of each sample begin in multi-valued ones."""
        values: dict[str, NDArray[np.int64]] = {}
        multi_valued: dict[str, MultiValued] = {}
        for name, feature in self._data.contextual.items():
            if isinstance(feature, RandomFeature):
                lengths = np.clip(feature.lengths.sample(rng, num_samples), 0, feature.max_length)
                offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
                values[name] = feature.values.sample(rng, int(offsets[-1]))
                multi_valued[name] = MultiValued(offsets=offsets, max_length=feature.max_length)
            else:
                values[name] = feature.sample(rng, num_samples)
        return values, multi_valued


def random_codes(num_items: int, *, levels: int, codebook_size: int, seed: int = 0) -> CodeTable:
    """Draw a random code for each of the items 0..num_items-1, for a SemanticIdConfig.

    Args:
        num_items: rows of the table.
        levels: codes per item.
        codebook_size: codes of each level are in 0..codebook_size-1.
        seed: of the draw.

    Raises:
        ConfigError: an argument is below 1.

    """
    for name, value in (("num_items", num_items), ("levels", levels), ("codebook_size", codebook_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    codes = np.random.default_rng(seed).integers(0, codebook_size, (num_items, levels), dtype=np.int32)
    return CodeTable(codes=codes, codebook_sizes=(codebook_size,) * levels)
