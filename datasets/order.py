"""Which sample comes when: a stateless permutation, dealing to ranks, and how far an epoch has got.

The permutation depends on the seed, the epoch and the number of samples alone. Position p of it is computed without the
others, so no rank ever holds an array of all samples, and an epoch can be entered anywhere.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.errors import ConfigError
from evenrank.datasets.mix import mix64

# Rounds of the Feistel network. Four give a pseudo-random permutation in theory (Luby and Rackoff, 1988); six leave a
# margin for the weaker round function and for the few bits of small domains.
_ROUNDS = 6
_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)


def permute(positions: NDArray[np.int64], num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the samples at these positions of the epoch's permutation of 0..num_samples-1.

    A Feistel network permutes the smallest power of two that holds all samples; a result outside 0..num_samples-1 is
    put through it again until it falls inside (cycle walking; Black and Rogaway, 2002), which takes fewer than two
    passes on average.

    Args:
        positions: int64, any shape, each in 0..num_samples-1.
        num_samples: how many samples there are, from 1 to 2^62.
        seed: any 64-bit number.
        epoch: from 0; each has a permutation of its own.

    """
    samples = np.array(positions, dtype=np.uint64)
    bits = max(2, (num_samples - 1).bit_length())
    keys = _round_keys(seed, epoch)
    outside = np.ones(samples.shape, dtype=bool)
    while outside.any():
        samples[outside] = _feistel(samples[outside], bits, keys)
        outside = samples >= np.uint64(num_samples)
    return samples.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    start = mix64(np.array([seed & int(_WORD)], dtype=np.uint64))
    start = mix64(start ^ np.uint64((epoch * 0x9E3779B97F4A7C15) & int(_WORD)))
    return mix64(start + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _feistel(words: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The halves may differ by a bit: each round rewrites one of them from the other and then swaps their widths.
    right_bits = bits // 2
    left_bits = bits - right_bits
    left, right = words >> np.uint64(right_bits), words & np.uint64((1 << right_bits) - 1)
    for key in keys:
        rewritten = left ^ (mix64(right ^ key) & np.uint64((1 << left_bits) - 1))
        left, right = right, rewritten
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealing:
    """How the positions of an epoch are dealt: step s takes `world_size * batch_size` of them, rank by rank.

    start = 0, world_size = 2, batch_size = 3, num_samples = 10

    step 0: rank 0 gets 0 1 2, rank 1 gets 3 4 5
    step 1: rank 0 gets 6 7 8, rank 1 gets 9
    """

    num_samples: int
    world_size: int
    batch_size: int  # per rank
    start: int = 0  # positions that were consumed before the first step
    drop_last: bool = False  # leave out a last step that does not fill every rank

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.batch_size < 1:
            raise ConfigError(
                f"world_size and batch_size must be at least 1, got {self.world_size} and {self.batch_size}"
            )
        if not 0 <= self.start <= self.num_samples:
            raise ConfigError(f"start must lie in 0..{self.num_samples}, got {self.start}")

    @property
    def samples_per_step(self) -> int:
        """Positions that a full step takes over all ranks."""
        return self.world_size * self.batch_size

    @property
    def num_steps(self) -> int:
        """Steps that are left, the same on every rank."""
        left = self.num_samples - self.start
        return left // self.samples_per_step if self.drop_last else -(-left // self.samples_per_step)

    def position_after(self, step: int) -> int:
        """Return how many positions are consumed once this step (counted from `start`) is done."""
        return min(self.num_samples, self.start + (step + 1) * self.samples_per_step)

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of one rank in one step: int64 [0..batch_size], ascending; late ranks may get none."""
        first = self.start + step * self.samples_per_step + rank * self.batch_size
        return np.arange(min(first, self.num_samples), min(first + self.batch_size, self.num_samples), dtype=np.int64)
