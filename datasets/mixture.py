"""`Mixture`: several datasets, each with a share of an epoch in proportion to its weight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count, Positive, Valid
from evenrank.core.settings import Settings
from evenrank.datasets.order import OpenSplit, Order, RowOrder, Samples, Stores, derive_seed, permute


class MixtureOrder(RowOrder):
    """An order over several datasets in proportion to their weights; their rows are numbered consecutively.

    An epoch is a permutation of the datasets' quotas, laid out one after the other:

        weights 3 : 1, num_samples 8        quota index   0 1 2 3 4 5 | 6 7
        a permutation of 0..7                             dataset 0   | dataset 1

    Each dataset cycles through permutations of its own, across epochs: with 4 samples and a quota of 6 it has been seen
    1.5 times after the first epoch and 3 times after the second. All its samples are seen equally often, within one.

    Raises a ConfigError if a weight is not positive, or a dataset has no samples or a quota of 0.
    """

    def __init__(self, samples: Sequence[Samples], weights: Sequence[float], num_samples: int | None = None) -> None:
        self._of_datasets = tuple(samples)
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
        for dataset, samples in enumerate(self._of_datasets):
            in_dataset = datasets == dataset
            quota = int(self._quotas[dataset])
            draws = epoch * quota + quota_indices[in_dataset] - (quota_ends[dataset] - quota)
            rows[in_dataset] = self._first_rows[dataset] + _cycled_rows(samples, draws, derive_seed(seed, dataset))
        return rows

    def fingerprint(self) -> tuple[object, ...]:
        """Return the number of samples and the quota of each dataset."""
        return ("mixture", tuple(map(len, self._of_datasets)), tuple(self._quotas.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture(Settings, Order):
    """Several datasets with the same columns in batches, each with a share of an epoch proportional to its weight."""

    weights: Annotated[Mapping[Path | str, Positive], Valid(len, "of at least one dataset, as {folder: weight}")]
    """Per folder of a dataset. `sample_ids` number the rows of the datasets consecutively, in this order."""
    num_samples: Count | None = None
    """Samples of an epoch, over all ranks; None: the number of samples of all datasets."""

    def open(self, data: Any, open_split: OpenSplit, max_targets: int) -> tuple[Order, Stores]:
        """Open its datasets."""
        return self, [open_split(folder) for folder in self.weights]

    def arrange(self, stores: Stores, samples: Sequence[Samples]) -> MixtureOrder:
        """Return the order over all stores."""
        return MixtureOrder(samples, [*self.weights.values()], self.num_samples)


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
