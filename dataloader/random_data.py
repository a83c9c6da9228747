"""Samples drawn from distributions, as the rows of a store in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import Distribution, Lognormal, Uniform, Zipf, draw_actions
from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    ITEM_ID,
    SCHEMA_VERSION,
    TIMESTAMP_MS,
    USER_ID,
    Manifest,
    check_names,
)
from evenrank.datasets.store import MultiValued, SequenceStore


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
    users: Distribution = Uniform(low=0, high=999_999)
    """User ids, of which batches have the feature `user_id` if the config says so."""
    num_real: Distribution | None = None
    """Samples of a batch, clipped to batch_size; None: all rows are samples."""

    def __post_init__(self) -> None:
        check_names(self.contextual)


def draw_samples(
    data: RandomData, rng: np.random.Generator, num_samples: int, *, min_length: int, split: str
) -> SequenceStore:
    """Draw samples, as the rows of a store.

    Args:
        data: distributions of the samples.
        rng: where random numbers come from.
        num_samples: rows of the store.
        min_length: smaller draws of lengths are raised to it.
        split: name of the split.

    Raises:
        ConfigError: an action is out of range.

    """
    lengths = np.maximum(data.lengths.sample(rng, num_samples), min_length)
    offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
    num_events = int(offsets[-1])
    actions = draw_actions(data.actions, rng, num_events)
    contextual, multi_valued = _draw_context(data, rng, num_samples)
    events: dict[str, NDArray[np.integer]] = {
        ITEM_ID: data.items.sample(rng, num_events),
        ACTION: actions,
        TIMESTAMP_MS: np.arange(num_events),
    }
    users = data.users.sample(rng, num_samples)
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
        split=split,
        offsets=offsets,
        events={name: values.astype(EVENT_DTYPES[name]) for name, values in events.items()},
        rows={USER_ID: users, **contextual},
        multi_valued=multi_valued,
    )


def _draw_context(
    data: RandomData, rng: np.random.Generator, num_samples: int
) -> tuple[dict[str, NDArray[np.int64]], dict[str, MultiValued]]:
    """Draw the values of all contextual features, and where those of each sample begin in multi-valued ones."""
    values: dict[str, NDArray[np.int64]] = {}
    multi_valued: dict[str, MultiValued] = {}
    for name, feature in data.contextual.items():
        if isinstance(feature, RandomFeature):
            lengths = np.clip(feature.lengths.sample(rng, num_samples), 0, feature.max_length)
            offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
            values[name] = feature.values.sample(rng, int(offsets[-1]))
            multi_valued[name] = MultiValued(offsets=offsets, max_length=feature.max_length)
        else:
            values[name] = feature.sample(rng, num_samples)
    return values, multi_valued
