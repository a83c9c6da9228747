"""`MeanMetrics`: means over the samples of all ranks, with equal bits however these are distributed."""

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader.balance.ranks.agree import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of

_EXPONENTS = 2048  # the last is that of infinity, with a mantissa of 0, and NaN
_HALF = 26  # bits of a mantissa


class MeanMetrics:
    """Weighted means of terms of each sample; rounded are only a term times its weight, and the mean.

    A float64 of at least 0 is (2^52 + mantissa) 2^(exponent - 1075). For each exponent, numbers are counted, and the
    upper and the lower halves of their mantissas added up, in int64: 48 KiB per metric, which are exact for 2^37
    numbers of any size. `settings` are compared between ranks.
    """

    def __init__(self, names: list[str], settings: dict[str, Any], group: Group | None, device: torch.device | str):
        self._names, self._device, self._group = names, torch.device(device), process_group_of(group)
        self._settings = {"metric": type(self).__name__, **settings, "device": self._device.type}
        self._first_bins = _EXPONENTS * torch.arange(len(names) + 1, device=self._device)  # the last are of weights
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._bins = torch.zeros(3, _EXPONENTS * len(self._first_bins), dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def add_terms(self, terms: Tensor, weights: Tensor | None = None) -> None:
        """Add samples by their terms, float64 [n, metrics], at least 0, as `update` does."""
        terms = torch.cat([terms, torch.ones_like(terms[:, :1])], dim=1)
        bits = (terms * weights_of(len(terms), weights, self._device)[:, None]).view(torch.int64)
        bins = (bits >> 2 * _HALF) % _EXPONENTS + self._first_bins  # without the sign, which NaN may have
        parts = torch.stack([torch.ones_like(bits), (bits >> _HALF) % (1 << _HALF), bits % (1 << _HALF)])
        self._bins.index_add_(1, bins.flatten(), parts.flatten(1))

    def compute(self) -> dict[str, float]:
        """Return the metrics over all ranks, by name; NaN without samples, or with a score that is NaN.

        Collective: every rank must call this, also without samples.

        Raises:
            RankError: ranks have different metrics, arguments or kinds of devices, or one has a weight below 0.
        """
        own = [_join(*of_column) for of_column in self._bins.view(3, -1, _EXPONENTS).transpose(0, 1).tolist()]
        of_ranks = gather_checked(self._settings, own, self._group)
        check_weights(weight for *_, weight in of_ranks)
        *sums, weight = map(sum, zip(*of_ranks, strict=True))
        means = [float(total / weight) if weight else math.nan for total in sums]
        return dict(zip(self._names, means, strict=True))


def _join(counts: list[int], upper: list[int], lower: list[int]) -> Fraction | float:
    """Return the sum of a column."""
    if counts[-1]:
        return math.nan if upper[-1] or lower[-1] else math.inf
    mantissas = [(n << 2 * _HALF) + (high << _HALF) + low for n, high, low in zip(counts, upper, lower, strict=True)]
    mantissas[0] -= counts[0] << 2 * _HALF  # subnormal numbers are mantissa 2^-1074
    return Fraction(sum(of_one << max(exponent - 1, 0) for exponent, of_one in enumerate(mantissas)), 1 << 1074)


def weights_of(num_samples: int, weights: Tensor | None, device: torch.device) -> Tensor:
    """Return a copy of weights [n] in float64, NaN for those below 0; without any, ones in int64, without memory."""
    if weights is None:
        return torch.ones(1, dtype=torch.int64, device=device).expand(num_samples)
    if weights.shape != (num_samples,):
        raise ConfigError(f"weights must be [{num_samples}], one per sample, got {list(weights.shape)}")
    weights = weights.detach().to(device, torch.float64)
    return weights.where(weights >= 0, math.nan)  # without a synchronization; see `check_weights`


def check_weights(totals: Iterable[float | Fraction]) -> None:
    """Raise a RankError, on every rank, unless the sum of each rank's weights is a number."""
    if wrong := [rank for rank, total in enumerate(totals) if isinstance(total, float) and not math.isfinite(total)]:
        raise RankError(f"rank {wrong[0]} has weights below 0, infinite or NaN; pass finite ones of at least 0")
