"""Several datasets in one order, in given proportions.

An epoch of `num_samples` positions is a permutation of quotas that lie one behind the other:

    weights 3 : 1, num_samples 8        quota  0 1 2 3 4 5 | 6 7
    a permutation of 0..7                      dataset 0   | dataset 1

A dataset goes through its own permutations without regard to where epochs of the mixture end: one with 4 samples and a
quota of 6 has been seen 1.5 times after the first epoch and 3 times after the second, every sample as often as any
other (or once more).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.order import Samples, permute

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: sets seeds of neighbouring datasets far apart


class Mixed:
    """An order over several datasets; rows of the second are numbered behind those of the first, and so on.

    Args:
        samples: of each dataset.
        weights: of each dataset, any positive numbers: its share of an epoch is in proportion to its weight.
        num_samples: positions of an epoch; None: as many as the datasets have samples together.

    Raises:
        ConfigError: a weight is not positive, or a dataset has no samples, or gets none.

    """

    def __init__(self, samples: Sequence[Samples], weights: Sequence[float], num_samples: int | None = None) -> None:
        self._samples = tuple(samples)
        total = sum(map(len, samples)) if num_samples is None else num_samples
        self._quotas = _quotas(weights, total)
        self._first_rows = np.cumsum([0, *(one.num_rows for one in samples)])[:-1]
        for number, (one, quota) in enumerate(zip(samples, self._quotas.tolist(), strict=True)):
            if not len(one) or not quota:
                raise ConfigError(
                    f"dataset {number} of the mixture has {len(one):,} samples and gets {quota:,} of an epoch's "
                    f"{total:,}; leave it out, or raise its weight or num_samples"
                )
        self.num_samples = total

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at these positions, counted over all datasets: int64 of the same shape."""
        places = permute(positions, self.num_samples, seed=seed, epoch=epoch)
        ends = np.cumsum(self._quotas)
        datasets = np.searchsorted(ends, places, side="right")
        rows = np.empty_like(places)
        for number, samples in enumerate(self._samples):
            mine = datasets == number
            quota = int(self._quotas[number])
            turns = epoch * quota + places[mine] - (ends[number] - quota)  # of the dataset, since the first epoch
            rows[mine] = self._first_rows[number] + _turned(samples, turns, seed + (number + 1) * _GOLDEN)
        return rows

    def identity(self) -> tuple[object, ...]:
        """Say what the order depends on besides seed and epoch."""
        return ("mixture", tuple(map(len, self._samples)), tuple(self._quotas.tolist()))


def _turned(samples: Samples, turns: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the rows at these turns of a dataset that is gone through again and again: int64 of the same shape."""
    rounds, positions = np.divmod(turns, len(samples))
    rows = np.empty_like(turns)
    for number in np.unique(rounds).tolist():
        here = rounds == number
        rows[here] = samples.rows(permute(positions[here], len(samples), seed=seed, epoch=number))
    return rows


def _quotas(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Share out `total` by largest remainders: int64 [datasets], adding up to `total`."""
    shares = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(shares) & (shares > 0)).all():
        raise ConfigError(f"weights must be positive numbers, got {list(weights)}")
    exact = shares / shares.sum() * total
    quotas: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    most_left = np.argsort(quotas - exact, kind="stable")
    quotas[most_left[: total - int(quotas.sum())]] += 1
    return quotas
