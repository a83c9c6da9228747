"""Interactions drawn from distributions: skewed, reproducible data for demonstrations, tests and benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import polars as pl

from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import Distribution, Lognormal, Uniform, Zipf, draw_actions
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, check_new_names
from evenrank.preprocess.files.table import EventPart, Events, Piece
from evenrank.preprocess.sources.features import Features
from evenrank.preprocess.sources.interactions import Interactions

_FIRST_MS = 1_600_000_000_000  # every history starts within 30 days from here, in September and October 2020
_DAY_MS = 86_400_000
_USERS_PER_BLOCK = 16_384
_MAX_USERS = 1_000_000_000  # their features are drawn at once
_MAX_EVENTS_PER_BLOCK = 1 << 30
_SCHEMA = {USER_ID: pl.Int64, ITEM_ID: pl.Int64, ACTION: pl.Int32, TIMESTAMP_MS: pl.Int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    """The size and the distributions of a synthetic dataset. Users are 1..num_users."""

    num_users: int = 20_000
    lengths: Distribution = field(default_factory=Lognormal)
    """Number of events per user."""
    items: Distribution = field(default_factory=lambda: Zipf(exponent=1.05, high=50_000))
    """Item ids of events; under a Zipf distribution, ids are ranks of popularity."""
    actions: Distribution = field(default_factory=lambda: Uniform(low=0, high=4))
    """Actions of events, 0..2^31-1."""
    contextual: Mapping[str, Distribution] = field(default_factory=lambda: {"segment": Uniform(low=1, high=8)})
    """Ids of each contextual feature, by name, at least 0; one value per user, 0 for missing."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_users <= _MAX_USERS:
            raise ConfigError(f"num_users must be between 1 and {_MAX_USERS:,}, got {self.num_users}")
        check_new_names(self.contextual)


def draw_interactions(config: SyntheticConfig, *, seed: int) -> Interactions:
    """Return histories and contextual features of all users; each block of users is drawn when it is read."""
    rng = np.random.default_rng((seed, 0))
    contextual = {name: values.sample(rng, config.num_users) for name, values in config.contextual.items()}
    return Interactions(
        parts=[_part(config, seed, first) for first in range(0, config.num_users, _USERS_PER_BLOCK)],
        sources=tuple,
        context=Features(
            keys=np.arange(1, config.num_users + 1),
            rows=pl.DataFrame(contextual),
            values={
                name: pl.Series([f"{name} {i}" for i in range(1, int(ids.max()) + 1)], dtype=pl.String)
                for name, ids in contextual.items()
            },
        ),
        num_actions=None,
        options={
            "num_users": config.num_users,
            **{name: repr(getattr(config, name)) for name in ("lengths", "items", "actions")},
            "contextual": {name: repr(values) for name, values in config.contextual.items()},
        },
    )


def _part(config: SyntheticConfig, seed: int, first: int) -> EventPart:
    last = min(first + _USERS_PER_BLOCK, config.num_users)
    mean_length = config.lengths.sample(np.random.default_rng(0), 1000).mean(dtype=np.float64)
    _check_events(first, last, int((last - first) * mean_length))
    return EventPart(
        name=f"users {first + 1} to {last}",
        num_events=int((last - first) * mean_length),
        read=partial(_read_block, config, seed, first, last),
    )


def _read_block(config: SyntheticConfig, seed: int, first: int, last: int, piece: Piece) -> list[Events]:
    return [Events(_draw_block(config, seed, first, last))]


def _draw_block(config: SyntheticConfig, seed: int, first: int, last: int) -> pl.DataFrame:
    # One generator per block, so that a block does not depend on which others were drawn before.
    rng = np.random.default_rng((seed, 1, first))
    lengths = config.lengths.sample(rng, last - first)
    num_events = sum(lengths.tolist())  # in Python's integers, which do not overflow
    _check_events(first, last, num_events)
    # Time stamps ascend within a user: a start, then gaps of one hour on average.
    elapsed = np.cumsum(rng.exponential(_DAY_MS / 24, num_events).astype(np.int64))
    elapsed_before_user = np.concatenate(([0], elapsed))[np.cumsum(lengths) - lengths]
    starts = _FIRST_MS + rng.integers(0, 30 * _DAY_MS, last - first)
    return pl.DataFrame(
        {
            USER_ID: np.repeat(np.arange(first + 1, last + 1), lengths),
            ITEM_ID: config.items.sample(rng, num_events),
            ACTION: draw_actions(config.actions, rng, num_events),
            TIMESTAMP_MS: elapsed + np.repeat(starts - elapsed_before_user, lengths),
        },
        schema=_SCHEMA,
    )


def _check_events(first: int, last: int, num_events: int) -> None:
    if num_events > _MAX_EVENTS_PER_BLOCK:
        raise ConfigError(
            f"users {first + 1:,} to {last:,} have {num_events:,} events, more than {_MAX_EVENTS_PER_BLOCK:,}; choose "
            "shorter lengths"
        )
