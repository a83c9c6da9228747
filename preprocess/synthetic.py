"""Interactions drawn from distributions: skewed data for demonstrations, tests and benchmarks, repeatable by seed."""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from evenrank.datasets.distributions import Distribution, Lognormal, Zipf
from evenrank.datasets.errors import ConfigError
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.interactions import Context, Interactions

_FIRST_MS = 1_600_000_000_000  # events begin in September 2020, within the first 30 days
_DAY_MS = 86_400_000
_NUM_SEGMENTS = 8


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
    """Draw every user's history, with one contextual feature, `segment`."""
    rng = np.random.default_rng(seed)
    user_ids = np.arange(1, config.num_users + 1)
    lengths = config.lengths.sample(rng, config.num_users)
    segments = rng.integers(1, _NUM_SEGMENTS, config.num_users, endpoint=True)
    total = int(lengths.sum())
    # Time stamps ascend within a user: a start, then gaps of an hour on average.
    gaps = rng.exponential(_DAY_MS / 24, total).astype(np.int64)
    elapsed = np.cumsum(gaps)
    ends = np.cumsum(lengths)
    before = np.concatenate(([0], elapsed))[ends - lengths]
    starts = _FIRST_MS + rng.integers(0, 30 * _DAY_MS, config.num_users)
    events = pl.DataFrame(
        {
            USER_ID: np.repeat(user_ids, lengths),
            ITEM_ID: config.items.sample(rng, total),
            ACTION: rng.integers(0, config.num_actions, total).astype(np.int32),
            TIMESTAMP_MS: elapsed + np.repeat(starts - before, lengths),
        }
    )
    return Interactions(
        events=events.lazy(),
        context=Context(
            features=pl.DataFrame({USER_ID: user_ids, "segment": segments}),
            labels={"segment": (None, *(f"segment {i}" for i in range(1, _NUM_SEGMENTS + 1)))},
        ),
        num_actions=config.num_actions,
        sources=(),
        options={
            "num_users": config.num_users,
            "lengths": repr(config.lengths),
            "items": repr(config.items),
        },
    )
