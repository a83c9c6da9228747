"""Exact metrics of evaluation, equal bit for bit however the samples are distributed over ranks.

Ranks add up integers only; floats are computed from the sums of all ranks, in one order. The AUC of torchmetrics, which
TorchRec installs, would not do: it replaces the scores of a call by their sigmoid if one of them is outside 0..1,
integrates in float32, and lets other ranks wait for one without samples.
"""

import math
from collections.abc import Iterator, Sequence

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
    samples, 5 bytes per sample and task and several times that within `compute`, and the positives of one other rank.

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

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Add samples of this rank: logits or probabilities, compared as float32, and targets, positive where above 0.

        Both are [n, num_tasks], of any dtype.
        """
        if scores.shape != targets.shape or scores.shape[1:] != (self._num_tasks,):
            raise ConfigError(
                f"scores and targets must be [n, {self._num_tasks}], got scores {list(scores.shape)} "
                f"and targets {list(targets.shape)}"
            )
        # Copies, because callers may write the next batch's scores to the same buffer.
        self._scores.append(scores.detach().to(self._device, torch.float32, copy=True))
        self._is_positive.append((targets > 0).to(self._device))

    @torch.no_grad()
    def compute(self) -> list[float]:
        """Return the AUC of each task over all ranks; NaN if it has samples of one class only, or a score that is NaN.

        Collective: every rank must call this, also without samples.

        Raises:
            RankError: ranks have different metrics, tasks or kinds of devices.
        """
        scores, is_positive = torch.cat(self._scores), torch.cat(self._is_positive)
        self._scores, self._is_positive = [scores], [is_positive]
        tasks = range(self._num_tasks)
        positives = [scores[is_positive[:, task], task] for task in tasks]
        negatives = [scores[~is_positive[:, task], task].sort().values for task in tasks]
        totals = torch.zeros(self._num_tasks, 4, dtype=torch.int64, device=self._device)
        for of_rank in self._broadcast_each(positives):
            totals[:, 0] += torch.stack([_count_wins_twice(*pair) for pair in zip(of_rank, negatives, strict=True)])
        totals[:, 1] = is_positive.sum(dim=0)
        totals[:, 2] = (~is_positive).sum(dim=0)
        totals[:, 3] = scores.isnan().sum(dim=0)
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        return [
            wins_twice / (2 * num_positive * num_negative)
            if num_positive and num_negative and not num_nan
            else math.nan
            for wins_twice, num_positive, num_negative, num_nan in totals.tolist()
        ]

    def _broadcast_each(self, parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the parts of each rank in turn: [n] each, equally many on all ranks, of any sizes."""
        all_sizes = gather_checked(self._settings, [len(part) for part in parts], self._group)
        for rank, sizes in enumerate(all_sizes):
            if self._group is None or rank == self._group.rank():
                joined = torch.cat(list(parts))
            else:
                joined = parts[0].new_empty(sum(sizes))
            if self._group is not None and len(joined):
                dist.broadcast(joined, group=self._group, group_src=rank)
            yield list(joined.split(sizes))


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

    def update(self, places: Tensor) -> None:
        """Add samples of this rank: integers [n], the targets' places from 1; 0 or less if the target was not found."""
        if places.dim() != 1 or places.is_floating_point():
            raise ConfigError(f"places must be integers [n], got {places.dtype} {list(places.shape)}")
        places = places.to(self._device, torch.int64)
        places = places.where((places > 0) & (places < len(self._counts)), 0)
        # bincount would synchronize, to know how many bins there are.
        self._counts = self._counts.index_add(0, places, torch.ones_like(places))

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Return `recall@K`, `ndcg@K` and `mrr@K` of each K over all ranks; NaN without samples.

        Collective: every rank must call this, also without samples.

        Raises:
            RankError: ranks have different metrics, `ks` or kinds of devices.
        """
        gather_checked(self._settings, None, self._group)
        totals = self._counts.clone()
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


def _count_wins_twice(positives: Tensor, negatives: Tensor) -> Tensor:
    """Sum up 2 for each positive [n] above a negative [m], ascending, and 1 for each tie: an int64 scalar."""
    below = torch.searchsorted(negatives, positives)
    not_above = torch.searchsorted(negatives, positives, right=True)
    return (below + not_above).sum()
