"""Several datasets in one order, in given proportions.

An epoch of `num_samples` positions is a permutation of the datasets' quotas, which are laid out one after the other:

    weights 3 : 1, num_samples 8        quota index   0 1 2 3 4 5 | 6 7
    a permutation of 0..7                             dataset 0   | dataset 1

Each dataset cycles through permutations of its own, across the mixture's epochs: with 4 samples and a quota of 6 it has
been seen 1.5 times after the first epoch and 3 times after the second. Its samples are seen equally often, give or take
one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.order import Samples, derive_seed, permute


class MixtureOrder:
    """An order over several datasets, whose rows are numbered consecutively: the second's follow the first's.

    Args:
        samples: of each dataset.
        weights: of each dataset, positive; its share of an epoch is proportional to its weight.
        num_samples: positions of an epoch; None: the number of samples of all datasets.

    Raises:
        ConfigError: a weight is not positive, or a dataset has no samples or a quota of 0.

    """

    def __init__(self, samples: Sequence[Samples], weights: Sequence[float], num_samples: int | None = None) -> None:
        self._samples = tuple(samples)
        total = sum(map(len, samples)) if num_samples is None else num_samples
        self._quotas = _quotas(weights, total)
        self._first_rows = np.cumsum([0, *(dataset_samples.num_rows for dataset_samples in samples)])[:-1]
        for dataset, (dataset_samples, quota) in enumerate(zip(samples, self._quotas.tolist(), strict=True)):
            if not len(dataset_samples) or not quota:
                raise ConfigError(
                    f"dataset {dataset} of the mixture has {len(dataset_samples):,} samples and gets {quota:,} of an "
                    f"epoch's {total:,}; leave it out, or raise its weight or num_samples"
                )
        self.num_samples = total

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at these positions, counted over all datasets: int64 of the same shape."""
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

    def identity(self) -> tuple[object, ...]:
        """Return everything besides seed and epoch that the order depends on."""
        return ("mixture", tuple(map(len, self._samples)), tuple(self._quotas.tolist()))


def _cycled_rows(samples: Samples, draws: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return rows of a dataset that is iterated over and over, each time in another permutation.

    Args:
        samples: of the dataset.
        draws: int64, any shape: how many samples were drawn before, since the first epoch.
        seed: of the dataset.

    Returns:
        int64, the same shape as `draws`.

    """
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
