"""The model of a job, its batches and its metrics: ranking with HSTU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from evenrank.dataloader import Cross, Loader, LoaderConfig, Pools
from evenrank.dataloader.balance import Cost
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.schema import ACTION, USER_ID, Manifest
from evenrank.training import (
    BinaryAUC,
    ClassificationMetrics,
    ModelFlops,
    Work,
    batch_work,
    hstu_flops,
    label_bits,
)
from hstu import Embeddings, HSTUConfig, HSTURanking, at_least, tables
from trainer.config import OfTarget, TrainConfig, parse_cross, parse_target_feature
from trainer.parallel import Pipeline, run_pipeline
from trainer.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model, the batches that it reads, and how it is measured."""

    read: Callable[..., LoaderConfig]
    """The class of its loader's settings, with those that the task needs."""
    model: nn.Module
    """Returns loss sums [num_tasks] and logits of a batch."""
    dense: nn.Module
    """The part of the model that computes in low precision, which is not traced: all but embedding tables."""
    cost: Cost
    """What a sample costs, for balancing."""
    flops: ModelFlops
    """Of the model."""
    work: Callable[[Any], Work]
    """What a batch gives the model to do."""
    evaluate: Callable[[Pipeline[Any], Loader[Any], Iterable[Any]], dict[str, float]]
    """From the pipeline of a model in evaluation mode, a loader and some of its batches to the metrics. Collective."""


def ranking(config: TrainConfig, manifest: Manifest, world: World) -> Task:
    """Predict the action of each event of the history, or of candidates, from those before.

    Measured by AUC, GAUC over users, accuracy and normalized entropy of each task over all labels.
    """
    # A batch has whole actions for one task, and their low bits for several.
    is_single = config.num_tasks == 1
    targets = at_least(config.positive_action) if is_single else partial(label_bits, num_tasks=config.num_tasks)
    shape, own_sizes = _shape(config, manifest), {name: rows for name, _, rows in _of_target(config)}
    configs = tables({**manifest.vocabulary_sizes, **own_sizes}, shape)
    embeddings = _embeddings(config, configs)
    model = HSTURanking(embeddings, shape, num_tasks=config.num_tasks, targets=targets)

    def evaluate(pipeline: Pipeline[Any], loader: Loader[Any], batches: Iterable[Any]) -> dict[str, float]:
        auc = BinaryAUC(config.num_tasks, device=world.device)
        others = ClassificationMetrics(config.num_tasks, device=world.device)
        (store,) = loader.stores
        of_samples = torch.from_numpy(store.columns[USER_ID][store.rows_of(np.arange(len(store)))]).to(world.device)
        for step in run_pipeline(pipeline, batches):
            logits, labels = step.output[1], step.batch.labels
            reached = targets(labels.values())
            users = of_samples[step.batch.sample_ids]
            users = users.repeat_interleave(labels.lengths(), output_size=len(reached))  # no rows of padding
            auc.update(logits, reached, groups=users)
            others.update(logits, reached)
        by_task = {"auc": auc.compute(), "gauc": auc.compute_grouped()}
        metrics = {
            name if is_single else f"{name}_{task}": value
            for name, values in by_task.items()
            for task, value in enumerate(values)
        }
        known = others.compute()
        return metrics | {name: known[name] for name in known if name.startswith(("accuracy", "normalized"))}

    return Task(
        read=partial(
            LoaderConfig,
            user_id=config.user_id,
            max_num_candidates=config.num_candidates,
            num_tasks=config.num_tasks,
            label=config.label,
            pools=Pools(values=config.pools, within=config.pools_within) if config.pools else None,
            item_features=config.item_features,
            target_features={name: of for name, of, _ in map(parse_target_feature, config.target_features)},
            crosses={
                name: Cross(of=tuple(of.split(",")), size=rows) for name, of, rows in map(parse_cross, config.crosses)
            },
            key_maps=_key_maps(config, configs, world),
        ),
        model=model,
        dense=model.dense,
        cost=shape.cost(),
        flops=hstu_flops(
            hidden=shape.hidden,
            heads=shape.heads,
            head_dim=shape.head_dim,
            layers=shape.layers,
            embedding=(shape.embedding_dim, shape.hidden, shape.hidden),
            head=(config.hidden, config.hidden, config.num_tasks),
        ),
        work=partial(batch_work, interleave_actions=shape.interleave_actions, contextual=shape.contextual),
        evaluate=evaluate,
    )


def _shape(config: TrainConfig, manifest: Manifest) -> HSTUConfig:
    single = (name for name, dtype in manifest.contextual.items() if dtype == "int64")  # ids with one value
    made = (name for name, _, rows in _of_target(config) if rows)
    contextual = (*((USER_ID,) if config.user_id else ()), *single, *made)
    return HSTUConfig(
        max_length=len(contextual) + 2 * config.max_history_length + config.num_candidates,
        contextual=contextual,
        item_features=config.item_features,
        embedding_dim=config.embedding_dim,
        hidden=config.hidden,
        heads=config.heads,
        head_dim=config.hidden // config.heads,
        layers=config.layers,
        dropout=config.dropout,
        attention=config.attention,
        recompute=config.recompute,
    )


def _of_target(config: TrainConfig) -> list[OfTarget]:
    return [*map(parse_target_feature, config.target_features), *map(parse_cross, config.crosses)]


def _key_maps(config: TrainConfig, configs: list[EmbeddingConfig], world: World) -> dict[str, KeyMap]:
    """Return the maps of sharded tables. Actions, which are labels too, cannot have one."""
    if config.routing == "continuous":
        return {}
    sizes = {table.feature_names[0]: table.num_embeddings for table in configs}
    return {
        name: KeyMap(num_embeddings=size, world_size=world.size, mode=config.routing)
        for name, size in sizes.items()
        if size >= config.min_sharded_rows and name != ACTION
    }


def _embeddings(config: TrainConfig, configs: list[EmbeddingConfig]) -> nn.Module:
    if config.embeddings == "sharded":  # created by `shard`: too large for the memory of one process, perhaps
        return Embeddings(configs, min_sharded_rows=config.min_sharded_rows, device="meta")
    replicated: nn.Module = EmbeddingCollection(tables=configs)
    return replicated
