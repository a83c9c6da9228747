"""What a job learns: a model, the batches that it reads, and how it is measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from evenrank.dataloader.balance import Cost
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.schema import read_manifest
from evenrank.training.attention_timing import LayerFlops
from evenrank.training.flops import ModelFlops, Work
from trainer.config import TrainConfig
from trainer.evaluate import Evaluation
from trainer.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model, the batches that it reads, and how it is measured."""

    read: Callable[..., ReadConfig[Any]]
    """The class of its loader's settings, with those that the task needs, such as `key_maps`."""
    key_maps: Mapping[str, KeyMap]
    """Which row of its table has which key, by feature; a feature without a map has key k in row k."""
    model: nn.Module
    """Returns loss sums [num_tasks] and logits of a batch."""
    dense: nn.Module
    """The part of the model that computes in low precision, which is not traced: all but sharded tables."""
    attention: type[nn.Module]
    """The modules whose time can be measured."""
    attention_flops: LayerFlops | None
    """Their FLOPs; None: their time alone is measured."""
    num_tasks: int
    """Entries of the loss sums."""
    cost: Cost
    """What a sample costs, for the Balancer."""
    flops: ModelFlops
    """Of the model."""
    work: Callable[[Any], Work]
    """What a batch gives the model to do."""
    evaluation: Callable[..., Evaluation]
    """From the trained model, its pipeline and the batches to evaluate."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """What decides on its batches besides the settings, by content: a job that resumes must keep it."""


def make_task(config: TrainConfig, data: Path, world: World) -> Task:
    """Return what a job learns, from its dataset. Collective: every rank must call this.

    Raises:
        ConfigError: a setting does not fit the data, or another setting.
        DataError: the dataset, or the file of codes, is missing or malformed.

    """
    # Imported here, because each of them imports this module.
    from trainer.hstu_tasks import ranking, retrieval
    from trainer.semantic_id_task import semantic_ids

    make = semantic_ids if config.model == "semantic-ids" else {"ranking": ranking, "retrieval": retrieval}[config.task]
    manifest = read_manifest(data)
    task = make(config, manifest, world)
    return replace(task, kept={"dataset": f"{manifest.dataset} {manifest.content_hash[:16]}", **task.kept})
