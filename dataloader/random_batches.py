"""Batches straight from distributions, for benchmarks and tests: collated as those of datasets are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.collate.semantic_ids import CodeTable
from evenrank.dataloader.collate.spans import Pick
from evenrank.dataloader.config import ReadConfig
from evenrank.datasets.distributions import Distribution, Lognormal, Uniform, Zipf
from evenrank.datasets.schema import ACTION, EVENT_DTYPES, ITEM_ID, SCHEMA_VERSION, TIMESTAMP_MS, USER_ID, Manifest
from evenrank.datasets.store import SequenceStore

_MAX_ACTION = int(np.iinfo(EVENT_DTYPES[ACTION]).max)

Batch = TypeVar("Batch", bound=JaggedBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomData:
    """What the samples of random batches are drawn from."""

    lengths: Distribution = Lognormal()  # events of a sample; its candidates, or its target, are among them
    items: Distribution = Zipf(exponent=1.05, high=100_000)
    actions: Distribution = Uniform(low=0, high=9)
    contextual: Mapping[str, Distribution] = field(default_factory=dict)  # per feature
    num_real: Distribution | None = None  # samples of a batch, at most batch_size; None: all rows are samples

    def __post_init__(self) -> None:
        if taken := [name for name in self.contextual if name in EVENT_DTYPES or name == USER_ID]:
            raise ConfigError(f"a contextual feature cannot be called {taken[0]!r}; that is a column of every dataset")


class RandomBatches(Generic[Batch]):
    """Iterates over random batches of one rank; each iteration yields the same ones.

    Rank r's batch of step s depends on seed, r and s alone. Samples that would not be one of a dataset, such as those
    with fewer events than candidates, get as many events as they need.

    Args:
        config: what batches are: LoaderConfig or SemanticIdConfig, whose items must lie in its table of codes. Its
            order, workers and split do not matter. A table of codes for items 0..n-1 comes from `random_codes`.
        data: what they are drawn from.
        num_batches: of an iteration.
        rank: of this process; ranks draw independently.
        world_size: how many ranks there are.

    Raises:
        ConfigError: there are no batches, or no such rank.

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
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must lie in 0..world_size-1, got rank {rank} of {world_size}")
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
        """Say what must be the same on all ranks, and `rank`, which must be the rank's own."""
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "seed": self._config.seed,
            "num_batches": self._num_batches,
        }

    def batch(self, step: int) -> Batch:
        """Return the batch of one step."""
        size = self._config.batch_size
        rng = np.random.default_rng([self._config.seed & 0xFFFFFFFFFFFFFFFF, self._rank, step])
        count = size
        if self._data.num_real is not None:
            count = int(np.clip(self._data.num_real.sample(rng, 1)[0], 0, size))
        rows = np.arange(count)
        sample_ids = (step * self._world_size + self._rank) * size + rows
        store = self._draw(rng, count)
        (batch,) = self._collate([Pick(store, rows, rows)], sample_ids, batch_size=size)
        batch.step, batch.position = step, (step + 1) * self._world_size * size
        if self._config.pin_memory:
            return batch.pin_memory()
        return batch

    def _draw(self, rng: np.random.Generator, count: int) -> SequenceStore:
        least = max(getattr(self._config, "max_num_candidates", 1), 0)
        lengths = np.maximum(self._data.lengths.sample(rng, count), least)
        offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
        total = int(offsets[-1])
        actions = self._data.actions.sample(rng, total)
        if total and not 0 <= int(actions.min()) <= int(actions.max()) <= _MAX_ACTION:
            raise ConfigError(f"actions must lie in 0..{_MAX_ACTION}, got {int(actions.min())} to {int(actions.max())}")
        contextual = {name: drawn.sample(rng, count) for name, drawn in self._data.contextual.items()}
        drawn_events = {
            ITEM_ID: self._data.items.sample(rng, total),
            ACTION: actions,
            TIMESTAMP_MS: np.arange(total),
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
            events={name: values.astype(EVENT_DTYPES[name]) for name, values in drawn_events.items()},
            rows={USER_ID: np.arange(count), **contextual},
        )


def random_codes(num_items: int, *, levels: int, codebook_size: int, seed: int = 0) -> CodeTable:
    """Draw a code for each of the items 0..num_items-1, for a SemanticIdConfig."""
    for name, value in (("num_items", num_items), ("levels", levels), ("codebook_size", codebook_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    codes = np.random.default_rng(seed).integers(0, codebook_size, (num_items, levels), dtype=np.int32)
    return CodeTable(codes=codes, codebook_sizes=(codebook_size,) * levels)
