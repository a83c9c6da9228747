"""Interactions drawn from distributions: skewed data for demonstrations, tests and benchmarks, repeatable by seed."""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import Distribution, Lognormal, Zipf
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.sources.interactions import IS_GOOD, Context, EventPart, Interactions

_FIRST_MS = 1_600_000_000_000  # events begin in September 2020, within the first 30 days
_DAY_MS = 86_400_000
_NUM_SEGMENTS = 8
_USERS_PER_BLOCK = 16_384
_SCHEMA = {USER_ID: pl.Int64, ITEM_ID: pl.Int64, ACTION: pl.Int32, TIMESTAMP_MS: pl.Int64, IS_GOOD: pl.Boolean}


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    """What to draw. Users are 1..num_users; items are those that `items` draws, ranked by popularity under a Zipf."""

    num_users: int = 20_000
    lengths: Distribution = field(default_factory=Lognormal)  # events per user
    items: Distribution = field(default_factory=lambda: Zipf(exponent=1.05, high=50_000))
    num_actions: int = 5

    def __post_init__(self) -> None:
        if self.num_users < 1 or self.num_actions < 1:
            raise ConfigError(
                f"num_users and num_actions must be at least 1, got {self.num_users} and {self.num_actions}"
            )


def draw_interactions(config: SyntheticConfig, *, seed: int) -> Interactions:
    """Draw every user's history, with one contextual feature, `segment`; a block of users at a time, as it is read."""
    segments = np.random.default_rng((seed, 0)).integers(1, _NUM_SEGMENTS, config.num_users, endpoint=True)
    return Interactions(
        parts=[_part(config, seed, first) for first in range(0, config.num_users, _USERS_PER_BLOCK)],
        sources=tuple,
        context=Context(
            features=pl.DataFrame({USER_ID: np.arange(1, config.num_users + 1), "segment": segments}),
            labels={"segment": (None, *(f"segment {i}" for i in range(1, _NUM_SEGMENTS + 1)))},
        ),
        num_actions=config.num_actions,
        options={
            "num_users": config.num_users,
            "num_actions": config.num_actions,
            "lengths": repr(config.lengths),
            "items": repr(config.items),
        },
    )


def _part(config: SyntheticConfig, seed: int, first: int) -> EventPart:
    last = min(first + _USERS_PER_BLOCK, config.num_users)
    mean_length = config.lengths.sample(np.random.default_rng(0), 1000).mean()
    return EventPart(
        name=f"users {first + 1} to {last}",
        size=int((last - first) * mean_length * 20),
        events=pl.defer(lambda: _draw_block(config, seed, first, last), schema=_SCHEMA),
    )


def _draw_block(config: SyntheticConfig, seed: int, first: int, last: int) -> pl.DataFrame:
    # A generator of its own for each block: what one draws does not depend on the others.
    rng = np.random.default_rng((seed, 1, first))
    lengths = config.lengths.sample(rng, last - first)
    total = int(lengths.sum())
    # Time stamps ascend within a user: a start, then gaps of an hour on average.
    elapsed = np.cumsum(rng.exponential(_DAY_MS / 24, total).astype(np.int64))
    before = np.concatenate(([0], elapsed))[np.cumsum(lengths) - lengths]
    starts = _FIRST_MS + rng.integers(0, 30 * _DAY_MS, last - first)
    return pl.DataFrame(
        {
            USER_ID: np.repeat(np.arange(first + 1, last + 1), lengths),
            ITEM_ID: config.items.sample(rng, total),
            ACTION: rng.integers(0, config.num_actions, total).astype(np.int32),
            TIMESTAMP_MS: elapsed + np.repeat(starts - before, lengths),
            IS_GOOD: np.ones(total, dtype=bool),
        },
        schema=_SCHEMA,
    )
