"""Exact metrics of evaluation, equal bit for bit however the samples are distributed over ranks.

Ranks add up integers only; floats are computed from the sums of all ranks, in one order. Weights are added up in
float64, so weighted metrics are equal up to rounding. The AUC of torchmetrics, which TorchRec installs, would not do:
it replaces the scores of a call by their sigmoid if one of them is outside 0..1, integrates in float32, and lets other
ranks wait for one without samples.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.ranks.consistency import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of


class BinaryAUC:
    """Area under the ROC curve of each task: the chance that a positive scores above a negative, ties counting half.

    Each rank keeps its samples, and `compute` broadcasts the positives of one rank at a time, 4 bytes each, which all
    ranks compare with their own negatives (the Mann-Whitney statistic, in int64). So a rank needs memory for its own
    samples, 5 bytes per sample and task, 8 per weight and several times that within `compute`, and the positives of
    one other rank.

    Args:
        num_tasks: columns of the scores.
        group: the data-parallel ranks, as for `accumulate`.
        device: where samples are kept and compared; over NCCL, this rank's GPU. `update` synchronizes only if its
            arguments are on another one.
    """

    def __init__(self, num_tasks: int = 1, *, group: Group | None = None, device: torch.device | str = "cpu") -> None:
        if num_tasks < 1:
            raise ConfigError(f"num_tasks must be at least 1, got {num_tasks}")
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

    def update(self, scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Add samples of this rank: logits or probabilities, compared as float32, and targets, positive where above 0.

        Both are [n, num_tasks], of any dtype. `weights` are [n], at least 0; None: 1. A pair counts as the product.
        """
        if scores.shape != targets.shape or scores.shape[1:] != (self._num_tasks,):
            raise ConfigError(
                f"scores and targets must be [n, {self._num_tasks}], got scores {list(scores.shape)} "
                f"and targets {list(targets.shape)}"
            )
        # Copies, because callers may write the next batch's scores to the same buffer.
        self._scores.append(scores.detach().to(self._device, torch.float32, copy=True))
        self._is_positive.append((targets > 0).to(self._device))
        self._weights.append(_weights_of(len(scores), weights, self._device))

    @torch.no_grad()
    def compute(self) -> list[float]:
        """Return the AUC of each task over all ranks; NaN if it has samples of one class only, or a score that is NaN.

        Collective: every rank must call this, also without samples.

        Raises:
            RankError: ranks have different metrics, tasks or kinds of devices.
        """
        scores, is_positive, weights = map(torch.cat, (self._scores, self._is_positive, self._weights))
        self._scores, self._is_positive = [scores], [is_positive]
        own = (weights.is_floating_point(), is_positive.sum(dim=0).tolist())
        of_ranks = gather_checked(self._settings, own, self._group)
        is_weighted = any(rank_is_weighted for rank_is_weighted, _ in of_ranks)
        weights = weights.double() if is_weighted else weights
        masks = is_positive.unbind(1)
        positives = [scores[mask, task] for task, mask in enumerate(masks)]
        factors = [weights[mask] for mask in masks] if is_weighted else []
        negatives = [_sort(scores[~mask, task], weights[~mask]) for task, mask in enumerate(masks)]
        totals = weights.new_zeros(self._num_tasks, 4)
        for rank, (_, sizes) in enumerate(of_ranks):
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


class RankingMetrics:
    """Recall@K, NDCG@K and MRR@K of rankings with one relevant item each, the target.

    With the target at place p = 1, 2, ..., they are the means of 1, 1 / log2(p + 1) and 1 / p over all samples, where
    places beyond K count 0. Each rank counts the samples of each place up to the largest K: 8 bytes per place, which
    `compute` adds up over ranks.

    `ks` are the values of K, each at least 1; `group` and `device` are those of `BinaryAUC`.
    """

    def __init__(
        self, ks: Sequence[int] = (10, 50), *, group: Group | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if not ks or min(ks) < 1:
            raise ConfigError(f"ks must be numbers of at least 1, got {list(ks)}")
        self._ks = tuple(ks)
        self._device = torch.device(device)
        self._group = process_group_of(group)
        self._settings = {"metric": "RankingMetrics", "ks": list(ks), "device": self._device.type}
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        # Place 0 stands for all places that do not count.
        self._counts = torch.zeros(max(self._ks) + 1, dtype=torch.int64, device=self._device)

    def update(self, places: Tensor, weights: Tensor | None = None) -> None:
        """Add samples of this rank: integers [n], the targets' places from 1; 0 or less if the target was not found.

        `weights` are [n], at least 0; None: each sample has weight 1.
        """
        if places.dim() != 1 or places.is_floating_point():
            raise ConfigError(f"places must be integers [n], got {places.dtype} {list(places.shape)}")
        places = places.to(self._device, torch.int64)
        places = places.where((places > 0) & (places < len(self._counts)), 0)
        # bincount would synchronize, to know how many bins there are.
        counts = _weights_of(len(places), weights, self._device)
        dtype = torch.promote_types(self._counts.dtype, counts.dtype)
        self._counts = self._counts.to(dtype).index_add(0, places, counts.to(dtype))

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Return `recall@K`, `ndcg@K` and `mrr@K` of each K over all ranks; NaN without samples.

        Collective: every rank must call this, also without samples.

        Raises:
            RankError: ranks have different metrics, `ks` or kinds of devices.
        """
        are_weighted = gather_checked(self._settings, self._counts.is_floating_point(), self._group)
        totals = self._counts.double() if any(are_weighted) else self._counts.clone()
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        counts = totals.tolist()
        num_samples = sum(counts)
        metrics: dict[str, float] = {}
        for k in self._ks:
            places = range(1, k + 1)
            sums = {
                "recall": sum(counts[place] for place in places),
                "ndcg": math.fsum(counts[place] / math.log2(place + 1) for place in places),
                "mrr": math.fsum(counts[place] / place for place in places),
            }
            metrics |= {f"{name}@{k}": total / num_samples if num_samples else math.nan for name, total in sums.items()}
        return metrics


def _weights_of(num_samples: int, weights: Tensor | None, device: torch.device) -> Tensor:
    """Return a copy of weights [n] in float64; without any, ones in int64, which take no memory."""
    if weights is None:
        return torch.ones(1, dtype=torch.int64, device=device).expand(num_samples)
    if weights.shape != (num_samples,):
        raise ConfigError(f"weights must be [{num_samples}], one per sample, got {list(weights.shape)}")
    return weights.detach().to(device, torch.float64, copy=True)


def _sort(scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [m] in ascending order, and the weight of the first 0, 1, ..., m of them."""
    ascending, order = scores.sort()
    return ascending, torch.cat([weights.new_zeros(1), weights[order].cumsum(0)])


def _count_wins_twice(positives: Tensor, negatives: Tensor, weight_of_first: Tensor) -> Tensor:
    """Return twice the weight of the negatives [m], ascending, below each positive, and once that of ties: [n]."""
    below = torch.searchsorted(negatives, positives)
    not_above = torch.searchsorted(negatives, positives, right=True)
    return weight_of_first[below] + weight_of_first[not_above]
