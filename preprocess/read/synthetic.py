"""Interactions drawn from distributions: skewed, reproducible data for demonstrations, tests and benchmarks."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import draw_actions
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, user_hash
from evenrank.preprocess.log_config import CATEGORY, Drift, SyntheticConfig
from evenrank.preprocess.read.features import NO_FEATURES, Features, Interactions
from evenrank.preprocess.read.table import EventPart, Events, Piece

_FIRST_MS = 1_600_000_000_000  # every history starts within 30 days from here, in September and October 2020
_DAY_MS = 86_400_000
_USERS_PER_BLOCK = 16_384
_START_MS = 30 * _DAY_MS  # from the first start of a history to the last
_MAX_EVENTS_PER_BLOCK = 1 << 30
_SCHEMA = {USER_ID: pl.Int64, ITEM_ID: pl.Int64, ACTION: pl.Int32, TIMESTAMP_MS: pl.Int64}


def draw_interactions(config: SyntheticConfig, *, seed: int) -> Interactions:
    """Return histories and contextual features of all users; each block of users is drawn when it is read."""
    rng, drift = np.random.default_rng((seed, 0)), config.drift
    contextual = {name: values.sample(rng, config.num_users) for name, values in config.contextual.items()}
    mean_length = config.lengths.sample(np.random.default_rng(0), 1000).mean(dtype=np.float64)
    parts = []
    for first in range(0, config.num_users, _USERS_PER_BLOCK):
        last = min(first + _USERS_PER_BLOCK, config.num_users)
        num_events = _checked_events(first, last, int((last - first) * mean_length))
        read = partial(_draw_block, config, seed, first, last)
        parts.append(EventPart(name=f"users {first + 1} to {last}", num_events=num_events, read=read))
    return Interactions(
        parts=parts,
        sources=tuple,
        context=_features(np.arange(1, config.num_users + 1), contextual),
        item_features=NO_FEATURES if drift is None else _categories(config.catalogue, drift),
        num_actions=None,
        options={
            "num_users": config.num_users,
            **{name: repr(getattr(config, name)) for name in ("lengths", "items", "actions")},
            "contextual": {name: repr(values) for name, values in config.contextual.items()},
            **({} if drift is None else {"drift": repr(drift)}),
        },
    )


def _categories(catalogue: range, drift: Drift) -> Features:
    return _features(np.array(catalogue), {CATEGORY: np.arange(len(catalogue)) % drift.categories + 1})


def _features(keys: NDArray[np.int64], ids: Mapping[str, NDArray[np.int64]]) -> Features:
    """Return drawn features, the value of whose id 1 is called `NAME 1`."""
    numbers = {name: pl.int_range(1, int(drawn.max()) + 1, eager=True) for name, drawn in ids.items()}
    values = {name: (f"{name} " + of_name.cast(pl.String)).rename("") for name, of_name in numbers.items()}
    return Features(keys=keys, rows=pl.DataFrame(ids), values=values)


def _draw_block(config: SyntheticConfig, seed: int, first: int, last: int, piece: Piece) -> list[Events]:
    # One generator per block, so that a block does not depend on which others were drawn before.
    rng = np.random.default_rng((seed, 1, first))
    lengths = config.lengths.sample(rng, last - first)
    num_events = _checked_events(first, last, sum(lengths.tolist()))  # in Python's integers, which do not overflow
    # Time stamps ascend within a user: a start, then gaps of one hour on average.
    elapsed, begins = (
        np.cumsum(rng.exponential(_DAY_MS / 24, num_events).astype(np.int64)),
        np.cumsum(lengths) - lengths,
    )
    starts = _FIRST_MS + rng.integers(0, 30 * _DAY_MS, last - first)
    items = config.items.sample(rng, num_events)
    actions = draw_actions(config.actions, rng, num_events)
    times = elapsed + np.repeat(starts - np.concatenate(([0], elapsed))[begins], lengths)
    if config.drift is not None:  # a generator of its own leaves everything else about events as it is
        of_drift = np.random.default_rng((seed, 2, first))
        items = _drift(config, config.drift, items, times, begins[lengths > 0], seed=seed, rng=of_drift)
    users = np.repeat(np.arange(first + 1, last + 1), lengths)
    columns = {USER_ID: users, ITEM_ID: items, ACTION: actions, TIMESTAMP_MS: times}
    return [Events(pl.DataFrame(columns, schema=_SCHEMA))]


def _drift(
    config: SyntheticConfig,
    drift: Drift,
    items: NDArray[np.int64],
    times: NDArray[np.int64],
    begins: NDArray[np.int64],
    *,
    seed: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Replace items [events], drawn by popularity, by items that interest their users and exist at these times.

    `begins` are the first events of the users.

    categories = 3, low = 1         item        1 2 3 | 4 5 6 | 7 8 9
                                    category    1 2 3   1 2 3   1 2 3

    An item of another category becomes the one of its group, so that groups stay as popular as they were drawn. An item
    that has not appeared becomes the next more popular one of its category that has.
    """
    num_events, places, period_ms = len(items), items - config.catalogue.start, drift.days * _DAY_MS
    elapsed = times - _FIRST_MS
    # Exponential distributions have no memory: whether an interest ends depends on the time since the last event.
    is_new = rng.random(num_events) < -np.expm1(-np.diff(times, prepend=times[:1]) / period_ms)
    is_new[begins] = True
    fashion = user_hash((elapsed[is_new] // period_ms).astype(np.int64), salt=2 * seed + 1)
    liked = config.items.sample(rng, len(fashion)) + (fashion % np.uint64(drift.categories)).astype(np.int64)
    interests = (liked - config.catalogue.start)[np.cumsum(is_new) - 1] % drift.categories
    is_liked = rng.random(num_events) < drift.share
    places = np.where(is_liked, places - places % drift.categories + interests, places)
    missing = np.arange(num_events)
    while len(missing):
        wanted = places[missing]
        share_to_come = drift.new_items * (1 - elapsed[missing] / _START_MS)
        has_appeared = user_hash(wanted, salt=2 * seed + 2) * 2.0**-64 >= share_to_come
        is_there = (wanted < drift.categories) | (has_appeared & (wanted < len(config.catalogue)))
        missing = missing[~is_there]
        places[missing] -= drift.categories
    return places + config.catalogue.start


def _checked_events(first: int, last: int, num_events: int) -> int:
    if num_events > _MAX_EVENTS_PER_BLOCK:
        raise ConfigError(
            f"users {first + 1:,} to {last:,} have {num_events:,} events, more than {_MAX_EVENTS_PER_BLOCK:,}; choose "
            "shorter lengths"
        )
    return num_events
