"""Means over single predictions: accuracy, log loss and normalized entropy of logits; MSE and MAE."""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from evenrank.core.settings import Count, check_types
from evenrank.dataloader.balance.ranks.process_group import Group
from evenrank.training.mean_metrics import MeanMetrics
from evenrank.training.metrics import check_scores


class _ErrorMetrics(MeanMetrics):
    _terms: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]]  # from scores and targets, float64 [n, num_tasks]

    def __init__(self, num_tasks: Count = 1, *, group: Group | None = None, device: torch.device | str = "cpu") -> None:
        check_types(type(self), locals())
        self._suffixes = [""] if num_tasks == 1 else [f"_{task}" for task in range(num_tasks)]
        names = [name + suffix for name in self._terms for suffix in self._suffixes]
        super().__init__(names, {"num_tasks": num_tasks}, group, device)

    def update(self, scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Add samples of this rank: scores and targets [n, num_tasks], of any dtype, and weights as of `BinaryAUC`."""
        check_scores(scores, targets, len(self._suffixes))
        scores, targets = (values.detach().to(self._device, torch.float64) for values in (scores, targets))
        scores = scores.masked_fill(targets.isnan(), math.nan)
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
