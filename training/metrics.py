"""Exact metrics of evaluation, equal bit for bit however the samples are distributed over ranks.

Ranks add up integers only; floats are computed from the sums of all ranks, in one order. The AUC over all samples adds
up weights in float64, and is then equal up to rounding. That of torchmetrics, which TorchRec installs, would not do:
it replaces the scores of a call by their sigmoid if one of them is outside 0..1, integrates in float32, and lets other
ranks wait for one without samples.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError, RankError
from evenrank.core.hashing import mix64
from evenrank.core.rules import Count, Valid
from evenrank.core.settings import check_types
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
        bits = (terms * _weights_of(len(terms), weights, self._device)[:, None]).view(torch.int64)
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
        _check_weights(weight for *_, weight in of_ranks)
        *sums, weight = map(sum, zip(*of_ranks, strict=True))
        means = [float(total / weight) if weight else math.nan for total in sums]
        return dict(zip(self._names, means, strict=True))


class BinaryAUC:
    """Area under the ROC curve of each task: the chance that a positive scores above a negative, ties counting half.

    Each rank keeps its samples, and `compute` broadcasts the positives of one rank at a time, 4 bytes each, which all
    ranks compare with their own negatives (the Mann-Whitney statistic, in int64). So a rank needs memory for its own
    samples, 5 bytes per sample and task, 8 per weight and group and several times that within `compute`, and the
    positives of one other rank.

    Args:
        num_tasks: columns of the scores.
        group: the data-parallel ranks, as for `accumulate`.
        device: where samples are kept and compared; over NCCL, this rank's GPU. `update` synchronizes only if its
            arguments are on another one.
    """

    def __init__(self, num_tasks: Count = 1, *, group: Group | None = None, device: torch.device | str = "cpu") -> None:
        check_types(BinaryAUC, {"num_tasks": num_tasks})
        self._num_tasks = num_tasks
        self._device = torch.device(device)
        self._group = process_group_of(group)
        self._settings = {"metric": "BinaryAUC", "num_tasks": num_tasks, "device": self._device.type}
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._scores = [torch.empty(0, self._num_tasks, device=self._device)]
        self._is_positive = [torch.empty(0, self._num_tasks, dtype=torch.bool, device=self._device)]
        self._weights = [torch.empty(0, dtype=torch.int64, device=self._device)]
        self._groups = [torch.empty(0, dtype=torch.int64, device=self._device)]

    def update(
        self, scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, groups: Tensor | None = None
    ) -> None:
        """Add samples of this rank: logits or probabilities, compared as float32, and targets, positive where above 0.

        Both are [n, num_tasks], of any dtype. `weights` are [n], at least 0; None: 1. A pair counts as the product.
        A target that is NaN makes the AUC NaN, unless its weight is 0, as for missing targets.
        `groups` are [n], integers: the user of each sample, for `compute_grouped`; None: all are in group 0.
        """
        _check_scores(scores, targets, self._num_tasks)
        if groups is not None and (groups.shape != scores.shape[:1] or groups.is_floating_point()):
            raise ConfigError(f"groups must be integers [{len(scores)}], got {groups.dtype} {list(groups.shape)}")
        # Copies, because callers may write the next batch's scores to the same buffer.
        values = scores.detach().to(self._device, torch.float32)
        self._weights.append(_weights_of(len(scores), weights, self._device))
        self._scores.append(_without_missing(values, targets.to(self._device), self._weights[-1]))
        self._is_positive.append((targets > 0).to(self._device))
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device).expand(len(scores))  # which take no memory
        self._groups.append(zeros if groups is None else groups.to(self._device, torch.int64, copy=True))

    @torch.no_grad()
    def compute(self) -> list[float]:
        """Return the AUC of each task over all ranks; NaN with one class only, or a score or target that is NaN.

        Collective: every rank must call this, also without samples.

        Raises:
            RankError: ranks have different metrics, tasks or kinds of devices, or one has a weight below 0.
        """
        scores, is_positive, weights = map(torch.cat, (self._scores, self._is_positive, self._weights))
        self._scores, self._is_positive = [scores], [is_positive]
        own = (weights.is_floating_point(), is_positive.sum(dim=0).tolist(), weights.sum().item())
        of_ranks = gather_checked(self._settings, own, self._group)
        _check_weights(total for *_, total in of_ranks)
        is_weighted = any(rank_is_weighted for rank_is_weighted, *_ in of_ranks)
        weights = weights.double() if is_weighted else weights
        masks = is_positive.unbind(1)
        positives = [scores[mask, task] for task, mask in enumerate(masks)]
        factors = [weights[mask] for mask in masks] if is_weighted else []
        negatives = [_sort(scores[~mask, task], weights[~mask]) for task, mask in enumerate(masks)]
        totals = weights.new_zeros(self._num_tasks, 4)
        for rank, (_, sizes, _) in enumerate(of_ranks):
            of_rank = zip(self._broadcast(positives, rank, sizes), negatives, strict=True)
            wins = [_count_wins_twice(above, *below) for above, below in of_rank]
            if is_weighted:
                wins = [a * b for a, b in zip(wins, self._broadcast(factors, rank, sizes), strict=True)]
            totals[:, 0] += torch.stack([of_task.sum() for of_task in wins])
        totals[:, 1] = (weights[:, None] * is_positive).sum(dim=0)
        totals[:, 2] = (weights[:, None] * ~is_positive).sum(dim=0)
        totals[:, 3] = scores.isnan().sum(dim=0)
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        return [
            wins_twice / (2 * num_positive * num_negative)
            if num_positive and num_negative and not num_nan
            else math.nan
            for wins_twice, num_positive, num_negative, num_nan in totals.tolist()
        ]

    @torch.no_grad()
    def compute_grouped(self) -> list[float]:
        """Return the GAUC of each task: the mean AUC of groups, weighted by their samples (DIN, Zhou et al., 2018).

        Groups with one class only are left out; NaN if none is left, or if a score or target is NaN. Samples are sent
        to the rank that a hash of their group chooses, 16 bytes each and 5 per task, and compared there, on the CPU, in
        one order: so any distribution gives equal bits, also with weights. Collective, and raises, as `compute`.
        """
        parts = [torch.cat(self._weights).double(), *map(torch.cat, (self._is_positive, self._scores, self._groups))]
        num_ranks, rank = (1, 0) if self._group is None else (self._group.size(), self._group.rank())
        owners = (mix64(parts[-1].cpu().numpy().view(np.uint64)) % np.uint64(num_ranks)).astype(np.int64)
        sent = np.bincount(owners, minlength=num_ranks).tolist()
        of_ranks = gather_checked(self._settings, (sent, parts[0].sum().item()), self._group)
        _check_weights(total for _, total in of_ranks)
        received = [sizes[rank] for sizes, _ in of_ranks]
        order = torch.from_numpy(owners.argsort()).to(self._device)
        for index, part in enumerate(parts if self._group is not None else ()):
            parts[index] = part.new_empty(sum(received), *part.shape[1:])
            dist.all_to_all_single(parts[index], part[order], received, sent, group=self._group)
        weights, is_positive, scores, groups = (part.cpu().numpy() for part in parts)
        values: list[float] = []
        for task in range(self._num_tasks):
            keys = weights, is_positive[:, task], scores[:, task], groups
            by_group = np.lexsort(keys)  # samples that are equal in all keys are interchangeable
            of_groups = torch.from_numpy(_auc_of_groups(*(key[by_group] for key in keys)))
            means = MeanMetrics(["gauc"], {}, self._group, "cpu")
            means.add_terms(of_groups[:, :1], of_groups[:, 1])
            values += means.compute().values()
        return values

    def _broadcast(self, parts: Sequence[Tensor], rank: int, sizes: list[int]) -> Sequence[Tensor]:
        """Return the parts of a rank, one per task, of these sizes."""
        if self._group is None or rank == self._group.rank():
            joined = torch.cat(list(parts))
        else:
            joined = parts[0].new_empty(sum(sizes))
        if self._group is not None and len(joined):
            dist.broadcast(joined, group=self._group, group_src=rank)
        parts_of_rank: tuple[Tensor, ...] = joined.split(sizes)
        return parts_of_rank


class RankingMetrics(MeanMetrics):
    """Recall@K, NDCG@K and MRR@K of rankings with one relevant item each, the target, as `recall@10` and so on.

    With the target at place p = 1, 2, ..., they are the means of 1, 1 / log2(p + 1) and 1 / p over all samples, where
    places beyond K count 0. `ks` are the values of K, each at least 1; for other arguments see `BinaryAUC`.
    """

    def __init__(
        self,
        ks: Annotated[Sequence[Count], Valid(len, "at least one")] = (10, 50),
        *,
        group: Group | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_types(RankingMetrics, {"ks": ks})
        names = [f"{name}@{k}" for k in ks for name in ("recall", "ndcg", "mrr")]
        super().__init__(names, {"ks": list(ks)}, group, device)
        # Place 0 stands for all places that do not count.
        gains = [(0.0, 0.0, 0.0), *((1.0, 1 / math.log2(place + 1), 1 / place) for place in range(1, max(ks) + 1))]
        terms = [[gain * (place <= k) for k in ks for gain in gains[place]] for place in range(len(gains))]
        self._terms_of_place = torch.tensor(terms, dtype=torch.float64, device=self._device)

    def update(self, places: Tensor, weights: Tensor | None = None) -> None:
        """Add samples of this rank: integers [n], the targets' places from 1, 0 or less if not found; weights [n]."""
        if places.dim() != 1 or places.is_floating_point():
            raise ConfigError(f"places must be integers [n], got {places.dtype} {list(places.shape)}")
        places = places.to(self._device, torch.int64)
        places = places.where((places > 0) & (places < len(self._terms_of_place)), 0)
        self.add_terms(self._terms_of_place[places], weights)


class _ErrorMetrics(MeanMetrics):
    _terms: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]]  # from scores and targets, float64 [n, num_tasks]

    def __init__(self, num_tasks: Count = 1, *, group: Group | None = None, device: torch.device | str = "cpu") -> None:
        check_types(type(self), {"num_tasks": num_tasks})
        self._suffixes = [""] if num_tasks == 1 else [f"_{task}" for task in range(num_tasks)]
        names = [name + suffix for name in self._terms for suffix in self._suffixes]
        super().__init__(names, {"num_tasks": num_tasks}, group, device)

    def update(self, scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Add samples of this rank: scores and targets [n, num_tasks], of any dtype, and weights as of `BinaryAUC`."""
        _check_scores(scores, targets, len(self._suffixes))
        scores, targets = (values.detach().to(self._device, torch.float64) for values in (scores, targets))
        scores = _without_missing(scores, targets, _weights_of(len(scores), weights, self._device))
        targets = targets.masked_fill(targets.isnan(), 0)
        self.add_terms(torch.cat([term(scores, targets) for term in self._terms.values()], dim=1), weights)


class ClassificationMetrics(_ErrorMetrics):
    """`accuracy`, `log_loss`, `base_rate` and `normalized_entropy`; of several tasks `accuracy_0`, `accuracy_1`, ...

    Logits above 0 predict a positive; targets above 0 are positive. The normalized entropy (He et al., "Practical
    Lessons from Predicting Clicks on Ads at Facebook", 2014) is the log loss over that of predicting the base rate, the
    share of positives; NaN with one class only. Bits are equal however samples are distributed, also with weights;
    those of log losses on processors of one kind. Arguments are those of `BinaryAUC`.
    """

    _terms: ClassVar = {
        "accuracy": lambda logits, targets: ((logits > 0) == (targets > 0)).double().where(~logits.isnan(), math.nan),
        # Not softplus, which rounds the last samples of a call differently on CPUs.
        "log_loss": lambda logits, targets: -logsigmoid(logits.where(targets > 0, -logits)),
        "base_rate": lambda _, targets: (targets > 0).double(),
    }

    def compute(self) -> dict[str, float]:
        """Return the metrics, by name; see `RegressionMetrics.compute`."""
        metrics = super().compute()
        for suffix in self._suffixes:
            p = metrics[f"base_rate{suffix}"]
            entropy = -p * math.log(p) - (1 - p) * math.log1p(-p) if 0 < p < 1 else math.nan
            metrics[f"normalized_entropy{suffix}"] = metrics[f"log_loss{suffix}"] / entropy
        return metrics


class RegressionMetrics(_ErrorMetrics):
    """`mse` and `mae`: means of squared and absolute errors. For all else see `ClassificationMetrics`."""

    _terms: ClassVar = {
        "mse": lambda scores, targets: (scores - targets).square(),
        "mae": lambda scores, targets: (scores - targets).abs(),
    }


def _join(counts: list[int], upper: list[int], lower: list[int]) -> Fraction | float:
    """Return the sum of a column."""
    if counts[-1]:
        return math.nan if upper[-1] or lower[-1] else math.inf
    mantissas = [(n << 2 * _HALF) + (high << _HALF) + low for n, high, low in zip(counts, upper, lower, strict=True)]
    mantissas[0] -= counts[0] << 2 * _HALF  # subnormal numbers are mantissa 2^-1074
    return Fraction(sum(of_one << max(exponent - 1, 0) for exponent, of_one in enumerate(mantissas)), 1 << 1074)


def _weights_of(num_samples: int, weights: Tensor | None, device: torch.device) -> Tensor:
    """Return a copy of weights [n] in float64, NaN for those below 0; without any, ones in int64, without memory."""
    if weights is None:
        return torch.ones(1, dtype=torch.int64, device=device).expand(num_samples)
    if weights.shape != (num_samples,):
        raise ConfigError(f"weights must be [{num_samples}], one per sample, got {list(weights.shape)}")
    weights = weights.detach().to(device, torch.float64)
    return weights.where(weights >= 0, math.nan)  # without a synchronization; see `_check_weights`


def _check_weights(totals: Iterable[float | Fraction]) -> None:
    """Raise a RankError, on every rank, unless the sum of each rank's weights is a number."""
    if wrong := [rank for rank, total in enumerate(totals) if isinstance(total, float) and not math.isfinite(total)]:
        raise RankError(f"rank {wrong[0]} has weights below 0, infinite or NaN; pass finite ones of at least 0")


def _check_scores(scores: Tensor, targets: Tensor, num_tasks: int) -> None:
    """Raise a ConfigError unless both are [n, num_tasks]."""
    if scores.shape != targets.shape or scores.shape[1:] != (num_tasks,):
        raise ConfigError(
            f"scores and targets must be [n, {num_tasks}], got scores {list(scores.shape)} "
            f"and targets {list(targets.shape)}"
        )


def _without_missing(scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return scores that are NaN where targets are, but 0 where these have no weight, because they are missing."""
    is_nan = targets.isnan()
    return scores.masked_fill(is_nan, math.nan).masked_fill(is_nan & (weights == 0)[:, None], 0)


def _sort(scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [m] in ascending order, and the weight of the first 0, 1, ..., m of them."""
    ascending, order = scores.sort()
    return ascending, torch.cat([weights.new_zeros(1), weights[order].cumsum(0)])


def _count_wins_twice(positives: Tensor, negatives: Tensor, weight_of_first: Tensor) -> Tensor:
    """Return twice the weight of the negatives [m], ascending, below each positive, and once that of ties: [n]."""
    below = torch.searchsorted(negatives, positives)
    not_above = torch.searchsorted(negatives, positives, right=True)
    return weight_of_first[below] + weight_of_first[not_above]


@compiled
def _auc_of_groups(
    weights: NDArray[np.float64], is_positive: NDArray[np.bool_], scores: NDArray[np.float32], groups: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return AUC and weight of each group, [n, 2], with weight 0 for those of one class and after the last group.

    Samples [n] ascend by group, score and class. Without weights, counts are exact up to 2^53 pairs of samples.
    """
    of_groups = np.zeros((len(groups), 2))
    group = -1
    for i in range(len(groups)):
        if i == 0 or groups[i] != groups[i - 1]:
            group, wins, positive, negative, tied = group + 1, 0.0, 0.0, 0.0, 0.0
        elif scores[i] != scores[i - 1]:
            tied = 0.0
        if is_positive[i]:
            wins += weights[i] * (negative - tied / 2)
            positive += weights[i]
        else:
            negative, tied = negative + weights[i], tied + weights[i]
        if positive * negative > 0:
            of_groups[group] = wins / (positive * negative), positive + negative
    if np.isnan(scores).any():
        of_groups[0] = np.nan, 1.0
    return of_groups
