"""The order of samples: a stateless permutation, and the schedule that assigns positions to steps and ranks.

The permutation depends only on the seed, the epoch and the number of samples. Each position of it is computed
independently, so no rank ever holds an array of all samples, and an epoch can be entered at any position.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.core.hashing import mix64, mix_word
from evenrank.core.rules import Count, NonNegative
from evenrank.core.settings import Settings

# Rounds of the Feistel network. Four give a pseudo-random permutation in theory (Luby and Rackoff, 1988); six leave a
# margin for the weaker round function and for the few bits of small domains.
_ROUNDS = 6
_WORD_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples are spread evenly over 64-bit words


def permute(positions: NDArray[np.int64], num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the samples at positions of an epoch's permutation of 0..num_samples-1: int64 of the same shape.

    A Feistel network permutes the smallest power of two that is at least `num_samples`, which is at most 2^62. A result
    outside 0..num_samples-1 is permuted again until it is inside (cycle walking; Black and Rogaway, 2002): fewer than
    two passes on average.
    """
    words = np.array(positions, dtype=np.uint64)
    bits = max(2, (num_samples - 1).bit_length())
    key = mix64(np.array([seed & _WORD_MASK], dtype=np.uint64))
    key = mix64(key ^ np.uint64((epoch * _GOLDEN) & _WORD_MASK))
    round_keys = mix64(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    _permute_in_place(words.reshape(-1), np.uint64(num_samples), np.uint64(bits), round_keys)
    return words.view(np.int64)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the index-th dataset of a mixture or block of a stream, far from those of its neighbours."""
    return seed + (index + 1) * _GOLDEN


@compiled
def _permute_in_place(
    words: NDArray[np.uint64], num_samples: np.uint64, bits: np.uint64, keys: NDArray[np.uint64]
) -> None:
    one = np.uint64(1)
    for index in range(len(words)):
        word = words[index]
        while True:
            # The halves may differ by one bit: each round rewrites one half from the other, then swaps their widths.
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
    """The rows of a split that are samples: all except a few left out, which alone take memory."""

    num_rows: int
    left_out: NDArray[np.int64]  # [n]: rows that are not samples, ascending

    def __len__(self) -> int:
        return self.num_rows - len(self.left_out)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of samples with indices in 0..len-1: int64 of the same shape."""
        # left_out 2 3 7: 2 samples precede row 2, also 2 precede row 3, and 5 precede row 7. Sample 4 comes after two
        # rows that are left out, so it is row 6; sample 5 comes after three, so it is row 8.
        samples_before = self.left_out - np.arange(len(self.left_out))
        return indices + np.searchsorted(samples_before, indices, side="right")


class SampleOrder(Protocol):
    """The row at each position of each epoch."""

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at positions, each in 0..num_samples-1: int64 of the same shape."""

    def fingerprint(self) -> tuple[object, ...]:
        """Return everything besides seed and epoch that determines the order, for comparison with a saved state."""


class RowOrder:
    """Ascending rows, in every epoch."""

    _kind = "rows"

    def __init__(self, *, samples: Samples) -> None:
        self._samples = samples
        self.num_samples = len(samples)

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at positions."""
        return self._samples.rows(positions)

    def fingerprint(self) -> tuple[object, ...]:
        """Return the kind of order and its length."""
        return (self._kind, self.num_samples)


class ShuffledOrder(RowOrder):
    """A different permutation of the samples in each epoch."""

    _kind = "shuffle"

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at positions."""
        return self._samples.rows(permute(positions, self.num_samples, seed=seed, epoch=epoch))


class StepSchedule(ABC):
    """The positions of an epoch that each step takes, and each rank's share of them before balancing."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Remaining steps, the same on every rank."""

    @abstractmethod
    def position_after(self, step: int) -> int:
        """Return the number of positions that are consumed after a step."""

    @abstractmethod
    def first_position(self, step: int, rank: int) -> int:
        """Return the first position of a rank in a step; may be past the step's end, where the rank has none."""

    @abstractmethod
    def num_loaded(self, step: int) -> NDArray[np.int64]:
        """Return the number of positions of each rank in a step: int64 [world_size]."""

    def positions_of_all(self, steps: range) -> NDArray[np.int64]:
        """Return the positions of all ranks in consecutive steps, step by step and rank by rank: int64 [n]."""
        end = self.position_after(steps[-1])
        return np.arange(min(self.first_position(steps[0], 0), end), end, dtype=np.int64)

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank in a step, ascending: int64 [n]."""
        first, end = self.first_position(step, rank), self.first_position(step, rank + 1)
        step_end = self.position_after(step)
        return np.arange(min(first, step_end), min(end, step_end), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSchedule(Settings, StepSchedule):
    """Each step takes the next `world_size * batch_size` positions, rank by rank, of which `start` are consumed before.

    start = 0, world_size = 2, batch_size = 3, num_samples = 10

    step 0: rank 0 gets 0 1 2, rank 1 gets 3 4 5
    step 1: rank 0 gets 6 7 8, rank 1 gets 9
    """

    num_samples: NonNegative
    world_size: Count
    batch_size: Count  # positions per rank and step
    start: NonNegative = 0
    drop_last: bool = False  # leave out a last step that does not fill every rank

    def _check(self) -> None:
        if self.start > self.num_samples:
            raise ConfigError(f"start must be between 0 and num_samples = {self.num_samples}, got {self.start}")

    @property
    def samples_per_step(self) -> int:
        """Positions of a full step over all ranks."""
        return self.world_size * self.batch_size

    @property
    def num_steps(self) -> int:
        """Remaining steps."""
        remaining = self.num_samples - self.start
        return remaining // self.samples_per_step if self.drop_last else -(-remaining // self.samples_per_step)

    def position_after(self, step: int) -> int:
        """Return the number of positions that are consumed after a step."""
        return min(self.num_samples, self.first_position(step + 1, 0))

    def first_position(self, step: int, rank: int) -> int:
        """Return the first position of a rank in a step; may be past the end of the epoch."""
        return self.start + (step * self.world_size + rank) * self.batch_size

    def num_loaded(self, step: int) -> NDArray[np.int64]:
        """Return the number of positions of each rank in a step: `batch_size` while any are left."""
        remaining = self.num_samples - self.first_position(step, 0)
        return np.clip(remaining - self.batch_size * np.arange(self.world_size), 0, self.batch_size)


class MixtureOrder:
    """An order over several datasets in proportion to their weights; their rows are numbered consecutively.

    An epoch is a permutation of the datasets' quotas, laid out one after the other:

        weights 3 : 1, num_samples 8        quota index   0 1 2 3 4 5 | 6 7
        a permutation of 0..7                             dataset 0   | dataset 1

    Each dataset cycles through permutations of its own, across epochs: with 4 samples and a quota of 6 it has been seen
    1.5 times after the first epoch and 3 times after the second. All its samples are seen equally often, within one.

    Raises a ConfigError if a weight is not positive, or a dataset has no samples or a quota of 0.
    """

    def __init__(self, samples: Sequence[Samples], weights: Sequence[float], num_samples: int | None = None) -> None:
        self._samples = tuple(samples)
        self.num_samples = total = sum(map(len, samples)) if num_samples is None else num_samples
        self._quotas = _quotas(weights, total)
        self._first_rows = np.cumsum([0, *(dataset_samples.num_rows for dataset_samples in samples)])[:-1]
        for dataset, (dataset_samples, quota) in enumerate(zip(samples, self._quotas.tolist(), strict=True)):
            if not len(dataset_samples) or not quota:
                raise ConfigError(
                    f"dataset {dataset} of the mixture has {len(dataset_samples):,} samples and gets {quota:,} of an "
                    f"epoch's {total:,}; leave it out, or raise its weight or num_samples"
                )

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at positions, numbered over all datasets: int64 of the same shape."""
        quota_indices = permute(positions, self.num_samples, seed=seed, epoch=epoch)
        quota_ends = np.cumsum(self._quotas)
        datasets = np.searchsorted(quota_ends, quota_indices, side="right")
        rows = np.empty_like(quota_indices)
        for dataset, samples in enumerate(self._samples):
            in_dataset = datasets == dataset
            quota = int(self._quotas[dataset])
            draws = epoch * quota + quota_indices[in_dataset] - (quota_ends[dataset] - quota)
            rows[in_dataset] = self._first_rows[dataset] + _cycled_rows(samples, draws, derive_seed(seed, dataset))
        return rows

    def fingerprint(self) -> tuple[object, ...]:
        """Return the number of samples and the quota of each dataset."""
        return ("mixture", tuple(map(len, self._samples)), tuple(self._quotas.tolist()))


def _cycled_rows(samples: Samples, draws: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the rows of draws, numbered since the first epoch; each pass over the dataset has its own permutation."""
    passes, positions = np.divmod(draws, len(samples))
    rows = np.empty_like(draws)
    for pass_index in np.unique(passes).tolist():
        in_pass = passes == pass_index
        rows[in_pass] = samples.rows(permute(positions[in_pass], len(samples), seed=seed, epoch=pass_index))
    return rows


def _quotas(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Apportion `total` by the largest-remainder method: int64 [datasets], with sum `total`."""
    shares = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(shares) & (shares > 0)).all():
        raise ConfigError(f"weights must be positive numbers, got {list(weights)}")
    with np.errstate(over="ignore"):
        if np.isinf(shares.sum()):
            shares = shares / shares.max()
    exact = shares / shares.sum() * total
    quotas: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(quotas - exact, kind="stable")
    quotas[largest_remainders[: total - int(quotas.sum())]] += 1
    return quotas
