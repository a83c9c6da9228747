"""How evenly the modes spread patterns of keys over ranks.

The busiest rank of R should have at most 1 + 1.5 sqrt(2 ln R R / n) times the mean of n keys. That is a statement
about chance: owners that are drawn at random exceed it in 1.3 % of all cases with 2 ranks, in 0.2 % with 64, and in 0.2
to 0.4 % on average. So these tests count over many patterns how often it is exceeded, and how far. `excess` is what the
busiest rank has above the mean, over what the bound allows: at most 1 is within it.
"""

from collections.abc import Callable
from functools import cache
from math import log, sqrt
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.dataloader.routing import MODES, KeyMap, Mode, owner_rank
from evenrank.datasets.distributions import Distribution, Zipf

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RANKS = range(2, 65)
PROGRESSION_KEYS = 20 * max(RANKS)  # with fewer, the bound allows twice the mean
TABLE_SIZES = (999_983, 10**6 + 3, (1 << 20) + 1, 3 * 10**6 + 7, 12_345_678)

# As users and videos of KuaiRand-1K: ids from 0, in the order of popularity.
NUM_DRAWS = 4_369_953
USERS = Zipf(exponent=1.5, low=0, high=999, shift=1)
VIDEOS = Zipf(exponent=1.8, low=0, high=49_331, shift=1)


class Drawn(NamedTuple):
    """Distinct ids, ascending, and the lookups of each."""

    ids: Ints
    counts: Ints


@cache
def draw(distribution: Distribution) -> Drawn:
    """Return what 4,369,953 draws look up."""
    return Drawn(*np.unique(distribution.sample(np.random.default_rng(0), NUM_DRAWS), return_counts=True))


def excess(loads: Ints, num_keys: int) -> Floats:
    """Return the excess of each row of loads, [patterns, R]."""
    num_ranks = loads.shape[1]
    allowed = 1.5 * sqrt(2 * log(num_ranks) * num_ranks / num_keys)
    excesses: Floats = (loads.max(axis=1) * num_ranks / num_keys - 1) / allowed
    return excesses


def count_owners(owners: Ints, num_ranks: int) -> Ints:
    """Return the keys of each rank, [patterns, num_ranks], of owners [patterns, keys]."""
    pattern = np.arange(len(owners))[:, np.newaxis]
    return np.bincount((pattern * num_ranks + owners).ravel(), minlength=len(owners) * num_ranks).reshape(-1, num_ranks)


def loads_of(keys: Ints, num_ranks: int, mode: Mode) -> Ints:
    """Return the keys of each rank, [patterns, num_ranks], of keys [patterns, keys], for tables that just hold them."""
    if mode == "continuous":
        owners = np.stack([owner_rank(row, num_ranks, mode, num_embeddings=int(row.max()) + 1) for row in keys])
    else:
        owners = owner_rank(keys, num_ranks, mode)
    return count_owners(owners, num_ranks)


@cache
def strides() -> Ints:
    """Return strides of 2..4096: powers of 2 and 10, 3, 5 and 7 times powers of 2, primes, and every 37th."""
    primes = [stride for stride in range(2, 4097) if all(stride % factor for factor in range(2, int(sqrt(stride)) + 1))]
    multiples = [factor << shift for factor in (1, 3, 5, 7) for shift in range(13) if 1 < factor << shift <= 4096]
    return np.unique([*primes[:50], *primes[50::8], *multiples, 10, 100, 1000, *range(2, 4097, 37)])


@cache
def progressions() -> Ints:
    """Return arithmetic progressions from 0, and others of the same strides from stride - 1."""
    steps = strides()[:, np.newaxis]
    from_0 = np.arange(PROGRESSION_KEYS) * steps
    return np.concatenate([from_0, from_0 + steps - 1])


@cache
def blocks() -> Ints:
    """Return 16,384 ids that writers use, each from the start of a block of its own, from 256 to all of them."""
    return np.stack(
        [
            (np.arange(num_blocks)[:, np.newaxis] * block_size + np.arange(16_384 // num_blocks)).ravel()
            for block_size in (1 << 17, 1 << 20, 1 << 24, 10**6, 3 << 19, 1_000_003)
            for num_blocks in (1, 2, 4, 8, 16, 64)
        ]
    )


@cache
def popular_ids() -> Ints:
    """Return 4,096 distinct ids of Zipf-shaped draws: multiples of them, and with offsets."""
    distributions = (VIDEOS, Zipf(exponent=1.1, high=10**6), Zipf(exponent=1.3, high=10**9))
    return np.stack(
        [
            draw(distribution).ids[:4096] * factor + offset
            for distribution in distributions
            for factor in (1, 2, 8, 10, 64, 1000)
            for offset in (0, 7, 10**12)
        ]
    )


def check_as_random(excesses: Floats) -> None:
    """Check that the bound is exceeded about as rarely as by random owners, and nowhere by more than they would.

    Of random owners of so many patterns, a few have an excess of 1.5; one of 2 has a chance of 1 in 1,000.
    """
    assert excesses.size > 1000
    assert np.mean(excesses > 1) <= 0.01
    assert excesses.max() <= 2


# In a block, ids follow one another, which modulo spreads evenly; it is the ranges of rows that are uneven.
@pytest.mark.parametrize(
    ("patterns", "uneven_mode"), [(progressions, "roundrobin"), (blocks, "continuous"), (popular_ids, "roundrobin")]
)
def test_hashing_spreads_every_pattern_as_random_owners_would(patterns: Callable[[], Ints], uneven_mode: Mode) -> None:
    keys = patterns()
    num_keys = keys.shape[1]
    assert num_keys >= PROGRESSION_KEYS
    assert (np.diff(keys, axis=1) > 0).all()
    excesses, excesses_where_uneven = [], []
    for ranks in RANKS:
        of_hash = excess(loads_of(keys, ranks, "hash_roundrobin"), num_keys)
        is_uneven = loads_of(keys, ranks, uneven_mode).max(axis=1) * ranks >= 2 * num_keys
        excesses.append(of_hash)
        excesses_where_uneven.append(of_hash[is_uneven])
    check_as_random(np.concatenate(excesses))
    check_as_random(np.concatenate(excesses_where_uneven))


@pytest.mark.parametrize("ranks", [2, 3, 8, 24, 64])
@pytest.mark.parametrize("patterns", [progressions, blocks, popular_ids])
def test_loads_of_hashed_keys_vary_as_those_of_random_owners(patterns: Callable[[], Ints], ranks: int) -> None:
    """Not more, as uneven loads would, nor less, as loads that still follow the pattern would."""
    keys = patterns()
    loads, mean = loads_of(keys, ranks, "hash_roundrobin"), keys.shape[1] / ranks
    check_variance(float(np.mean((loads - mean) ** 2)) / (mean * (1 - 1 / ranks)), ranks, len(keys))


def check_variance(ratio: float, ranks: int, num_patterns: int) -> None:
    """Check the mean variance of loads relative to that of random owners, to 5 standard deviations of its estimate."""
    assert abs(ratio - 1) < 5 * sqrt(2 / ((ranks - 1) * num_patterns))


def patterns_within(num_embeddings: int) -> Ints:
    """Return those arithmetic progressions and allotted blocks of 1,280 keys that fit a table."""
    few = np.arange(PROGRESSION_KEYS)
    fitting = [few * step + start for step in strides() for start in (0, step - 1)]
    for block_size in (2048, 1 << 15, 10**5, 1 << 20):
        for num_blocks in (1, 2, 8, 64):
            used = PROGRESSION_KEYS // num_blocks
            fitting.append((np.arange(num_blocks)[:, np.newaxis] * block_size + np.arange(used)).ravel())
    return np.stack([keys for keys in fitting if keys[-1] < num_embeddings])


def test_a_hashed_key_map_spreads_every_pattern_over_ranges_as_random_rows_would() -> None:
    excesses = []
    for num_embeddings in TABLE_SIZES:
        keys = patterns_within(num_embeddings)
        rows = KeyMap(num_embeddings=num_embeddings, world_size=2, mode="hash_roundrobin")(keys)
        for ranks in RANKS:
            owners = owner_rank(rows, ranks, "continuous", num_embeddings)
            excesses.append(excess(count_owners(owners, ranks), PROGRESSION_KEYS))
    check_as_random(np.concatenate(excesses))


@pytest.mark.parametrize("ranks", [3, 8, 24, 64])
@pytest.mark.parametrize("num_embeddings", TABLE_SIZES)
def test_loads_of_a_hashed_key_map_vary_as_those_of_random_rows(num_embeddings: int, ranks: int) -> None:
    keys = patterns_within(num_embeddings)
    rows = KeyMap(num_embeddings=num_embeddings, world_size=ranks, mode="hash_roundrobin")(keys)
    loads = count_owners(owner_rank(rows, ranks, "continuous", num_embeddings), ranks)
    shares = np.bincount(owner_rank(np.arange(num_embeddings), ranks, "continuous", num_embeddings)) / num_embeddings
    mean = PROGRESSION_KEYS * shares
    # Of rows that are drawn without replacement.
    variance = mean * (1 - shares) * (num_embeddings - PROGRESSION_KEYS) / (num_embeddings - 1)
    check_variance(float(np.mean((loads - mean) ** 2 / variance)), ranks, len(keys))


@pytest.mark.parametrize("ranks", [4, 8])
def test_multiples_of_the_number_of_ranks_are_on_one_rank_unless_hashed(ranks: int) -> None:
    keys = np.arange(50_000)[np.newaxis] * ranks
    assert loads_of(keys, ranks, "roundrobin").tolist() == [[50_000] + [0] * (ranks - 1)]
    (loads,) = loads_of(keys, ranks, "hash_roundrobin")
    assert loads.sum() == 50_000
    assert (loads.max() - loads.min()) / loads.mean() < 0.30
    assert loads.max() / loads.min() < 1.5


@pytest.mark.parametrize(
    ("distribution", "num_ids", "hottest", "keys_of_rank", "lookups_of_rank"),
    [
        (
            USERS,
            1000,
            0.392,
            [122, 127, 132, 142, 134, 106, 119, 118],
            [0.416, 0.049, 0.045, 0.056, 0.111, 0.062, 0.039, 0.221],
        ),
        (
            VIDEOS,
            6341,
            0.532,
            [801, 831, 790, 800, 811, 741, 772, 795],
            [0.541, 0.032, 0.023, 0.032, 0.093, 0.042, 0.021, 0.215],
        ),
    ],
    ids=["users", "videos"],
)
def test_hashing_evens_out_distinct_keys_and_not_lookups(
    distribution: Zipf, num_ids: int, hottest: float, keys_of_rank: list[int], lookups_of_rank: list[float]
) -> None:
    ids, counts = draw(distribution)
    assert counts.sum() == NUM_DRAWS
    assert len(ids) == pytest.approx(num_ids, rel=0.03)
    assert counts.max() / NUM_DRAWS == pytest.approx(hottest, abs=0.002)
    # Ids that were given out in steps of 8, on 8 ranks: by modulo, one rank has everything.
    by_modulo, by_hash = (owner_rank(8 * ids, 8, mode) for mode in ("roundrobin", "hash_roundrobin"))
    assert not by_modulo.any()
    num_keys = np.bincount(by_hash, minlength=8)
    assert num_keys.tolist() == pytest.approx(keys_of_rank, rel=0.08)
    assert excess(num_keys[np.newaxis], len(ids)) < 1
    shares = np.bincount(by_hash, weights=counts, minlength=8) / NUM_DRAWS
    assert shares == pytest.approx(lookups_of_rank, abs=0.002)
    # Whatever the rank of the hottest id has besides, that id alone makes it this busy.
    assert 8 * hottest - 0.02 < 8 * shares.max() < 8 * hottest + 0.25


@given(
    st.dictionaries(st.integers(0, 5000), st.integers(1, 10**6), min_size=1, max_size=50),
    st.integers(1, 64),
    st.sampled_from(MODES),
)
def test_no_mode_has_less_on_the_busiest_rank_than_the_hottest_key(
    counts_of: dict[int, int], ranks: int, mode: Mode
) -> None:
    keys, counts = np.array(list(counts_of)), np.array(list(counts_of.values()))
    rows = KeyMap(num_embeddings=5001, world_size=ranks, mode=mode)(keys)
    for owners in (owner_rank(keys, ranks, mode, 5001), owner_rank(rows, ranks, "continuous", 5001)):
        lookups = np.bincount(owners, weights=counts, minlength=ranks)
        assert lookups.max() / lookups.mean() >= ranks * counts.max() / counts.sum() * (1 - 1e-12)
