"""`Evaluation`: the metrics of a model over a split, on all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenrank.dataloader import Loader
from evenrank.datasets.schema import USER_ID
from evenrank.training import BinaryAUC, ClassificationMetrics, RankingMetrics
from trainer.data import Batches
from trainer.pipelines import Pipeline, run_pipeline


@dataclass(kw_only=True, slots=True)
class Evaluation(ABC):
    """A model and the batches of a split."""

    model: nn.Module
    """What is trained."""
    pipeline: Pipeline[Any]
    """Of the model."""
    loader: Loader[Any]
    batches: Batches[Any]
    """Of the loader."""
    max_steps: int | None
    """Of one evaluation, from the first step of the split on; None: all."""

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Return the metrics by name, the same on all ranks. Collective: every rank must call this."""
        self.model.eval()
        metrics = self._measure()
        self.model.train()
        return metrics

    @abstractmethod
    def _measure(self) -> dict[str, float]: ...

    def _steps(self) -> Iterator[Any]:
        return islice(self.batches, self.max_steps)


@dataclass(kw_only=True, slots=True)
class ActionEvaluation(Evaluation):
    """AUC, GAUC over users, accuracy and normalized entropy of each task over all labels."""

    auc: BinaryAUC
    metrics: ClassificationMetrics
    targets: Callable[[Tensor], Tensor]
    """From labels [n] to what each task should predict, [n, tasks]."""

    def _measure(self) -> dict[str, float]:
        self.auc.reset()
        self.metrics.reset()
        (store,) = self.loader.stores
        of_samples = torch.from_numpy(store.columns[USER_ID][store.rows_of(np.arange(len(store)))])
        of_samples = of_samples.to(next(self.model.parameters()).device)
        for step in run_pipeline(self.pipeline, self._steps()):
            _, logits = step.output
            labels = step.batch.labels
            targets = self.targets(labels.values())
            users = of_samples[step.batch.sample_ids]
            users = users.repeat_interleave(labels.lengths(), output_size=len(targets))  # no rows of padding
            self.auc.update(logits, targets, groups=users)
            self.metrics.update(logits, targets)
        values = {"auc": self.auc.compute(), "gauc": self.auc.compute_grouped()}
        metrics = {f"{name}_{task}": value for name in values for task, value in enumerate(values[name])}
        if len(values["auc"]) == 1:
            metrics = {name: value for name, (value,) in values.items()}
        of_labels = self.metrics.compute()
        return metrics | {name: of_labels[name] for name in of_labels if name.startswith(("accuracy", "normalized"))}


@dataclass(kw_only=True, slots=True)
class RankingEvaluation(Evaluation):
    """Recall@K and NDCG@K of the last item of each sample among all items."""

    metrics: RankingMetrics
    places: Callable[[Any], Tensor]
    """From a batch to the place of each target in its ranking: 1 is the best, 0 means that it was not found."""

    def _measure(self) -> dict[str, float]:
        self.metrics.reset()
        device = next(self.model.parameters()).device
        for batch in self._steps():
            self.metrics.update(self.places(batch.to(device, non_blocking=True)))
        return {name: value for name, value in self.metrics.compute().items() if not name.startswith("mrr")}
