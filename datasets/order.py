"""Which sample comes when: a stateless permutation, dealing to ranks, and how far an epoch has got.

The permutation depends on the seed, the epoch and the number of samples alone. Position p of it is computed without the
others, so no rank ever holds an array of all samples, and an epoch can be entered anywhere.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.core.hashing import mix64, mix_word

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
    permuted = np.array(positions, dtype=np.uint64)
    bits = max(2, (num_samples - 1).bit_length())
    _permute(permuted.reshape(-1), np.uint64(num_samples), np.uint64(bits), _round_keys(seed, epoch))
    return permuted.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    start = mix64(np.array([seed & int(_WORD)], dtype=np.uint64))
    start = mix64(start ^ np.uint64((epoch * 0x9E3779B97F4A7C15) & int(_WORD)))
    return mix64(start + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


@compiled
def _permute(words: NDArray[np.uint64], num_samples: np.uint64, bits: np.uint64, keys: NDArray[np.uint64]) -> None:
    """Replace each word by its image."""
    one = np.uint64(1)
    for index in range(len(words)):
        word = words[index]
        while True:
            # The halves may differ by a bit: each round rewrites one from the other, and then swaps their widths.
            right_bits = bits // np.uint64(2)
            left_bits = bits - right_bits
            left, right = word >> right_bits, word & ((one << right_bits) - one)
            for key in keys:
                left, right = right, left ^ (mix_word(right ^ key) & ((one << left_bits) - one))
                left_bits, right_bits = right_bits, left_bits
            word = (left << right_bits) | right
            if word < num_samples:
                break
        words[index] = word


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The rows of a split that are samples: all but those left out. Memory is that of the rows left out."""

    num_rows: int
    left_out: NDArray[np.int64]  # ascending

    def __len__(self) -> int:
        return self.num_rows - len(self.left_out)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the samples with these numbers, each in 0..len-1: int64 of the same shape."""
        # left_out 2 3 7: before row 2 there are 2 samples, before row 3 also 2, before row 7 there are 5. Sample 4 has
        # two rows left out before it, so it is row 6; sample 5 has three, so it is row 8.
        before = self.left_out - np.arange(len(self.left_out))
        rows: NDArray[np.int64] = numbers + np.searchsorted(before, numbers, side="right")
        return rows


class Order(Protocol):
    """Which sample comes at which position of an epoch."""

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""
        ...

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows of the samples at these positions, each in 0..num_samples-1: int64 of the same shape."""
        ...

    def identity(self) -> tuple[object, ...]:
        """Say what the order depends on besides seed and epoch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffled:
    """Another permutation each epoch."""

    samples: Samples

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""
        return len(self.samples)

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at these positions."""
        return self.samples.rows(permute(positions, len(self.samples), seed=seed, epoch=epoch))

    def identity(self) -> tuple[object, ...]:
        """Say what the order depends on besides seed and epoch."""
        return ("shuffle", len(self.samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class AsStored:
    """The order of the rows, in every epoch."""

    samples: Samples

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""
        return len(self.samples)

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at these positions."""
        return self.samples.rows(positions)

    def identity(self) -> tuple[object, ...]:
        """Say what the order depends on besides seed and epoch."""
        return ("rows", len(self.samples))


class ByTime:
    """The order of the rows' last events, in every epoch, for training in one pass over time.

    Args:
        samples: the rows that are samples.
        time_order: int64 [rows]: the rows, by the time of their last event.

    """

    def __init__(self, samples: Samples, time_order: NDArray[np.int64]) -> None:
        self._time_order = time_order
        places = np.flatnonzero(np.isin(time_order, samples.left_out))
        self._places = Samples(num_rows=samples.num_rows, left_out=places)

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""
        return len(self._places)

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at these positions."""
        return self._time_order[self._places.rows(positions)]

    def identity(self) -> tuple[object, ...]:
        """Say what the order depends on besides seed and epoch."""
        return ("time", len(self._places))


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

    def first_position(self, step: int, rank: int) -> int:
        """Return where the positions of one rank in one step begin, or would, if there were as many samples."""
        return self.start + step * self.samples_per_step + rank * self.batch_size

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of one rank in one step: int64 [0..batch_size], ascending; late ranks may get none."""
        first = self.first_position(step, rank)
        return np.arange(min(first, self.num_samples), min(first + self.batch_size, self.num_samples), dtype=np.int64)
