"""Data that nobody logged: interactions drawn from distributions, and MovieLens with more users and items.

Fractal expansion has U times the users and I times the items of MovieLens; 16 x 32 of ml-20m is called ml-3b. It is
after Belletti et al., "Scalable Realistic Recommendation Datasets through Fractal Expansions" (arXiv:1901.08910). The
matrix of ratings is reduced to R, U x I, in 0..1 (their algorithm 2): its singular vectors are averaged over groups of
consecutive ids and made orthogonal again. Each rating of user u and item m then becomes, with probability R[i, j] for
each (i, j), one of user u*U + i and item m*I + j, of the same value and time: a stochastic Kronecker product. Unlike
theirs, it does not shuffle the users and items of each (i, j), so that histories and popularities stay as skewed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.core.hashing import mix64, mix_word
from evenrank.datasets.distributions import draw_actions
from evenrank.datasets.schema import ACTION, ITEM_ID, TIMESTAMP_MS, USER_ID, user_hash
from evenrank.preprocess.log_config import CATEGORY, Drift, SyntheticConfig
from evenrank.preprocess.read.features import NO_FEATURES, Features, Interactions
from evenrank.preprocess.read.public import CATALOG
from evenrank.preprocess.read.table import EventPart, Events, Piece

_FIRST_MS = 1_600_000_000_000  # every history starts within 30 days from here, in September and October 2020
_DAY_MS = 86_400_000
_USERS_PER_BLOCK = 16_384
_START_MS = 30 * _DAY_MS  # from the first start of a history to the last
_MAX_EVENTS_PER_BLOCK = 1 << 30
Ints = NDArray[np.int64]
_SCHEMA = {USER_ID: pl.Int64, ITEM_ID: pl.Int64, ACTION: pl.Int32, TIMESTAMP_MS: pl.Int64}
_EVENTS_AT_ONCE = 1_000_000  # of an expansion
# Of the randomized SVD (Halko, Martinsson and Tropp, arXiv:0909.4061). Singular values of ratings hardly decrease:
# after 4 iterations, entries of R are wrong by up to 0.2.
_ITERATIONS = 32
_GAMMA = 0x9E3779B97F4A7C15  # between the words that SplitMix64 hashes


def draw_interactions(config: SyntheticConfig, *, seed: int) -> Interactions:
    """Return histories and contextual features of all users; each block of users is drawn when it is read."""
    rng, drift = np.random.default_rng((seed, 0)), config.drift
    contextual = {name: values.sample(rng, config.num_users) for name, values in config.contextual.items()}
    mean_length = config.lengths.sample(np.random.default_rng(0), 1000).mean(dtype=np.float64)
    items, parts = NO_FEATURES, []
    if drift is not None:
        categories = np.arange(len(config.catalogue)) % drift.categories + 1
        items = _features(np.array(config.catalogue), {CATEGORY: categories})
    for first in range(0, config.num_users, _USERS_PER_BLOCK):
        last = min(first + _USERS_PER_BLOCK, config.num_users)
        num_events = _checked_events(first, last, int((last - first) * mean_length))
        read = partial(_draw_block, config, seed, first, last)
        parts.append(EventPart(name=f"users {first + 1} to {last}", num_events=num_events, read=read))
    return Interactions(
        parts=parts,
        sources=tuple,
        context=_features(np.arange(1, config.num_users + 1), contextual),
        item_features=items,
        num_actions=None,
        options={
            "num_users": config.num_users,
            **{name: repr(getattr(config, name)) for name in ("lengths", "items", "actions")},
            "contextual": {name: repr(values) for name, values in config.contextual.items()},
            **({} if drift is None else {"drift": repr(drift)}),
        },
    )


def _features(keys: Ints, ids: Mapping[str, Ints]) -> Features:
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
    elapsed = np.cumsum(rng.exponential(_DAY_MS / 24, num_events).astype(np.int64))
    begins = np.cumsum(lengths) - lengths
    starts = _FIRST_MS + rng.integers(0, 30 * _DAY_MS, last - first)
    items = config.items.sample(rng, num_events)
    actions = draw_actions(config.actions, rng, num_events)
    times = elapsed + np.repeat(starts - np.concatenate(([0], elapsed))[begins], lengths)
    if config.drift is not None:
        items = _drift(config, config.drift, items, times, begins[lengths > 0], seed=seed, first=first)
    users = np.repeat(np.arange(first + 1, last + 1), lengths)
    columns = {USER_ID: users, ITEM_ID: items, ACTION: actions, TIMESTAMP_MS: times}
    return [Events(pl.DataFrame(columns, schema=_SCHEMA))]


def _drift(
    config: SyntheticConfig, drift: Drift, items: Ints, times: Ints, begins: Ints, *, seed: int, first: int
) -> Ints:
    """Replace items [events], drawn by popularity, by items that interest their users and exist at these times.

    `begins` are the first events of the users.

    categories = 3, low = 1         item        1 2 3 | 4 5 6 | 7 8 9
                                    category    1 2 3   1 2 3   1 2 3

    An item of another category becomes the one of its group, so that groups stay as popular as they were drawn. An item
    that has not appeared becomes the next more popular one of its category that has.
    """
    rng = np.random.default_rng((seed, 2, first))  # of its own, which leaves everything else about events as it is
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


class Expansion(NamedTuple):
    """The dataset to expand, the users and items for each of its own, and a factor of all probabilities."""

    base: str
    users: int
    items: int
    rate: float


def parse_expansion(text: str) -> Expansion:
    """Parse NAME:UxI or NAME:UxI:RATE."""
    match = re.fullmatch(r"([^:]+):(\d{1,5})x(\d{1,5})(?::(0?\.\d+))?", text)
    base, users, items, rate = match.groups("1") if match else ("", 0, 0, 0)
    expansion = Expansion(base, int(users), int(items), float(rate))
    is_known = base in CATALOG and base.startswith("ml-")
    if is_known and min(expansion.users, expansion.items) > 1 and expansion.rate:
        return expansion
    raise ConfigError(
        f"{text!r} is no expansion of MovieLens; write it like ml-20m:16x32, with factors of 2 to 99999, or "
        "ml-20m:16x16384:0.01 for a hundredth of the events"
    )


def expand_interactions(base: Interactions, expansion: Expansion, *, seed: int) -> Interactions:
    """Return the expansion of a dataset, which is drawn in pieces while it is read."""
    (part,) = base.parts
    chances, num_events = _reduce(part, expansion)
    num_expected = round(num_events * chances.sum() * expansion.rate)

    expand = partial(_expand, expansion, seed, chances)
    name = f"{part.name} expanded to about {num_expected:,} events"
    return replace(
        base,
        parts=(replace(part, name=name, num_events=num_expected, expand=expand),),
        context=_copied(base.context, expansion.users),
        item_features=_copied(base.item_features, expansion.items),
        options={"expand": expansion._asdict(), "expected_events": num_expected},
    )


def _expand(
    expansion: Expansion, seed: int, chances: NDArray[np.float64], events: Mapping[str, NDArray[Any]]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the copies of events that are drawn, given R, in pieces."""
    num_at_once = int(_EVENTS_AT_ONCE / (chances.sum() * expansion.rate)) + 1
    for first in range(0, len(events[USER_ID]), num_at_once):
        some = {name: values[first : first + num_at_once] for name, values in events.items()}
        words = np.array([seed], dtype=np.uint64)
        for name in (USER_ID, ITEM_ID, TIMESTAMP_MS):  # so that draws do not depend on the pieces
            words = mix64(words) ^ some[name].view(np.uint64)
        drawn, cells = np.divmod(_draw(mix64(words), chances.ravel(), expansion.rate), chances.size)
        copies = {name: values[drawn] for name, values in some.items()}
        copies[USER_ID] = copies[USER_ID] * expansion.users + cells // expansion.items
        copies[ITEM_ID] = copies[ITEM_ID] * expansion.items + cells % expansion.items
        yield copies


def _copied(features: Features, num_copies: int) -> Features:
    """Return features of all copies of each user or item."""
    rows, copies = np.divmod(np.arange(len(features.keys) * num_copies), num_copies)
    return replace(features, keys=features.keys[rows] * num_copies + copies, rows=features.rows[rows])


def _reduce(part: EventPart, expansion: Expansion) -> tuple[NDArray[np.float64], int]:
    """Return R, float64 [users, items], and the number of ratings, which are in memory meanwhile."""
    ids = [(pl.col(name).rank("dense") - 1).cast(pl.Int32) for name in (USER_ID, ITEM_ID)]
    batches = chain.from_iterable(map(part.read, part.pieces))
    ratings = pl.concat(events.good.select(USER_ID, ITEM_ID, ACTION) for events in batches).select(*ids, ACTION)
    users, items, actions = (column.to_numpy() for column in ratings.iter_columns())
    num_users, num_items = users.max(initial=-1) + 1, items.max(initial=-1) + 1
    rank = min(expansion.users, expansion.items, num_users, num_items)

    of_items = np.random.default_rng(0).standard_normal((num_items, min(2 * rank + 8, num_users, num_items)))
    for _ in range(_ITERATIONS):
        of_users = np.linalg.qr(_multiply(users, num_users, items, actions, np.linalg.qr(of_items)[0]))[0]
        of_items = _multiply(items, num_items, users, actions, of_users)
    left, scales, right = np.linalg.svd(of_items.T, full_matrices=False)
    of_users = _resize(of_users @ left[:, :rank], expansion.users) * scales[:rank]
    reduced = of_users @ _resize(right[:rank].T, expansion.items).T
    # Rounded, because libraries for linear algebra differ in the last digits.
    return np.round((reduced - reduced.min()) / np.ptp(reduced), 6), len(ratings)


@compiled
def _multiply(
    rows: NDArray[np.int32],
    num_rows: int,
    columns: NDArray[np.int32],
    actions: NDArray[np.int32],
    vectors: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Multiply the matrix with actions + 1 at (rows, columns) by vectors [columns, n]: return [rows, n]."""
    product = np.zeros((num_rows, vectors.shape[1]))
    for row, column, action in zip(rows, columns, actions):  # noqa: B905  # Numba has no strict
        for n in range(vectors.shape[1]):
            product[row, n] += (action + 1) * vectors[column, n]
    return product


def _resize(vectors: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Average vectors [n, rank] over n rows in order to [size, rank], and return the closest orthogonal ones."""
    bounds = np.arange(size + 1) * len(vectors)
    begin, end = bounds[:-1] // size, -(-bounds[1:] // size)
    sums = np.vstack([np.zeros(vectors.shape[1]), np.cumsum(vectors, axis=0)])
    left, _, right = np.linalg.svd((sums[end] - sums[begin]) / (end - begin)[:, None], full_matrices=False)
    orthogonal: NDArray[np.float64] = left @ right
    return orthogonal


@compiled
def _draw(words: NDArray[np.uint64], chances: NDArray[np.float64], rate: float) -> Ints:
    """Draw cells with probability chances * rate for each event: return event * len(chances) + cell, ascending."""
    drawn = np.empty(int(len(words) * chances.sum() * rate * 1.1) + 1024, dtype=np.int64)
    num_drawn = 0
    log_miss = np.log1p(-rate)
    for event in range(len(words)):
        word, cell = words[event], -1
        while True:
            # To the next cell that the rate lets through, and whether its own chance does.
            word += np.uint64(_GAMMA)
            skipped = np.log((np.float64(mix_word(word) >> np.uint64(11)) + 0.5) * 2.0**-53) / log_miss
            if skipped >= len(chances) - 1 - cell:
                break
            cell += 1 + int(skipped)
            word += np.uint64(_GAMMA)
            if np.float64(mix_word(word) >> np.uint64(11)) * 2.0**-53 < chances[cell]:
                if num_drawn == len(drawn):
                    drawn = np.concatenate((drawn, np.empty_like(drawn)))
                drawn[num_drawn] = event * len(chances) + cell
                num_drawn += 1
    return drawn[:num_drawn]
