"""How models are measured: exactly, over a split and all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenrank.training import BinaryAUC, RankingMetrics, run_pipeline
from evenrank.training.pipelines import Pipeline
from trainer.data import Batches


@dataclass(kw_only=True, slots=True)
class Evaluation(ABC):
    """A model and the batches of a split."""

    model: nn.Module
    """What is trained."""
    pipeline: Pipeline[Any]
    """Of the model."""
    batches: Batches[Any]

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Return the metrics by name, the same on all ranks. Collective: every rank must call this."""
        self.model.eval()
        metrics = self._measure()
        self.model.train()
        return metrics

    @abstractmethod
    def _measure(self) -> dict[str, float]: ...


@dataclass(kw_only=True, slots=True)
class AUCEvaluation(Evaluation):
    """The AUC of each task over all labels."""

    auc: BinaryAUC
    targets: Callable[[Tensor], Tensor]
    """From labels [n] to what each task should predict, [n, tasks]."""

    def _measure(self) -> dict[str, float]:
        self.auc.reset()
        for step in run_pipeline(self.pipeline, self.batches):
            _, logits = step.output
            self.auc.update(logits, self.targets(step.batch.labels.values()))
        values = self.auc.compute()
        return {"auc": values[0]} if len(values) == 1 else {f"auc_{task}": value for task, value in enumerate(values)}


@dataclass(kw_only=True, slots=True)
class RankingEvaluation(Evaluation):
    """Recall@K and NDCG@K of the last item of each sample among all items."""

    metrics: RankingMetrics
    places: Callable[[Any], Tensor]
    """From a batch to the place of each target in its ranking: 1 is the best, 0 means that it was not found."""

    def _measure(self) -> dict[str, float]:
        self.metrics.reset()
        device = next(self.model.parameters()).device
        for batch in self.batches:
            self.metrics.update(self.places(batch.to(device, non_blocking=True)))
        return {name: value for name, value in self.metrics.compute().items() if not name.startswith("mrr")}
