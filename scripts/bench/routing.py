"""Show how evenly the modes of routing spread patterns of keys over ranks. Nothing is timed.

    .venv/bin/python scripts/bench/routing.py [--ranks 2,8,64] [--keys 100000] [--draws 4369953]

Prints one JSON line per pattern, number of ranks and mode:

    pattern     progressions: keys 0, s, 2 s, .. of a stride s; blocks: ids that writers use, each from the start of a
                block of its own; users and videos: distinct ids of Zipf draws (1,000 at exponent 1.5, 49,332 at 1.8),
                in the order of popularity, as they are or times 8
    n           distinct keys
    mode        of `KeyMap`, on TorchRec's ranges of rows. The table has as many rows as the largest key + 1
    keys        distinct keys of the busiest rank over the mean of the ranks
    lookups     lookups of the busiest rank over the mean; progressions and blocks have one lookup per key
    bound       1 + 1.5 sqrt(2 ln R R / n), which `keys` of random owners seldom exceeds
    hottest     lookups of the hottest key over the mean of the ranks, which `lookups` cannot be below
"""

import argparse
import json
from collections.abc import Iterator
from math import log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.routing import MODES, KeyMap
from evenrank.dataloader.routing.key_map import rows_per_rank
from evenrank.datasets.distributions import Zipf

Ints = NDArray[np.int64]

STRIDES = (2, 8, 10, 64, 96, 1000, 1009, 4096)
BLOCKS = ((1 << 20, 4), (1 << 20, 64), (10**6, 64), (1 << 20, 4096))
"""Size of a block, and number of blocks."""
DRAWN = {
    "users": Zipf(exponent=1.5, low=0, high=999, shift=1),
    "videos": Zipf(exponent=1.8, low=0, high=49_331, shift=1),
}


class Pattern(NamedTuple):
    """Keys that are looked up."""

    name: str
    keys: Ints
    """[n], distinct."""
    counts: Ints
    """[n]: lookups of each."""


def make_patterns(num_keys: int, num_draws: int) -> Iterator[Pattern]:
    """Yield all patterns."""
    for stride in STRIDES:
        keys = stride * np.arange(num_keys)
        yield Pattern(f"stride {stride:,}", keys, np.ones_like(keys))
    for block_size, num_blocks in BLOCKS:
        used = np.arange(max(num_keys // num_blocks, 1))
        keys = (block_size * np.arange(num_blocks)[:, np.newaxis] + used).ravel()
        yield Pattern(f"{len(used):,} ids of {num_blocks:,} blocks of {block_size:,}", keys, np.ones_like(keys))
    for name, distribution in DRAWN.items():
        drawn = distribution.sample(np.random.default_rng(0), num_draws)
        keys, counts = np.unique(drawn, return_counts=True)
        yield Pattern(name, keys, counts)
        yield Pattern(f"{name} times 8", 8 * keys, counts)


def owners_of(keys: Ints, num_ranks: int) -> dict[str, Ints]:
    """Return the rank that has each key, int64 [n], by mode."""
    size = int(keys.max()) + 1
    key_maps = [KeyMap(num_embeddings=size, world_size=num_ranks, mode=mode) for mode in MODES]
    return {key_map.mode: key_map(keys) // rows_per_rank(size, num_ranks) for key_map in key_maps}


def rows_of(pattern: Pattern, num_ranks: int) -> Iterator[dict[str, object]]:
    """Yield the rows of a pattern and a number of ranks."""
    name, keys, counts = pattern
    for mode, owners in owners_of(keys, num_ranks).items():
        num_keys = np.bincount(owners, minlength=num_ranks)
        num_lookups = np.bincount(owners, weights=counts, minlength=num_ranks)
        yield {
            "pattern": name,
            "n": len(keys),
            "ranks": num_ranks,
            "mode": mode,
            "keys": round(float(num_keys.max() / num_keys.mean()), 3),
            "lookups": round(float(num_lookups.max() / num_lookups.mean()), 3),
            "bound": round(1 + 1.5 * sqrt(2 * log(num_ranks) * num_ranks / len(keys)), 3),
            "hottest": round(float(counts.max() * num_ranks / counts.sum()), 3),
        }


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8,64", help="numbers of ranks, comma-separated")
    parser.add_argument("--keys", type=int, default=100_000, help="of a progression, and of all blocks")
    parser.add_argument("--draws", type=int, default=4_369_953, help="of users and of videos")
    arguments = parser.parse_args()
    for pattern in make_patterns(arguments.keys, arguments.draws):
        for num_ranks in map(int, arguments.ranks.split(",")):
            for row in rows_of(pattern, num_ranks):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
