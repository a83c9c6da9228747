"""Ranking and retrieval with HSTU."""

from functools import partial
from typing import Any

from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.schema import ITEM_ID, USER_ID, Manifest
from evenrank.training import BinaryAUC, RankingMetrics, batch_work, hstu_flops, label_bits
from hstu.config import HSTUConfig
from hstu.embeddings import Embeddings
from hstu.layer import HSTUAttention
from hstu.ranking import HSTURanking, at_least
from hstu.retrieval import HSTURetrieval
from hstu.tables import feature_of, tables
from hstu.work import attention_flops
from trainer.config import TrainConfig
from trainer.evaluate import AUCEvaluation, RankingEvaluation
from trainer.routing import make_key_maps
from trainer.tasks import Task
from trainer.world import World


def ranking(config: TrainConfig, manifest: Manifest, world: World) -> Task:
    """Predict the action of each event of the history from those before it; measured by AUC."""
    shape = _shape(config, manifest)
    # A batch has whole actions for one task, and their low bits for several.
    is_single = config.num_tasks == 1
    targets = at_least(config.positive_action) if is_single else partial(label_bits, num_tasks=config.num_tasks)
    configs = tables(manifest.vocabulary_sizes, shape)
    key_maps = _key_maps(config, configs, world)
    model = HSTURanking(_embeddings(config, configs), shape, num_tasks=config.num_tasks, targets=targets)
    auc = BinaryAUC(config.num_tasks, group=world.data, device=world.device)
    return Task(
        read=partial(LoaderConfig, user_id=config.user_id, num_tasks=config.num_tasks, key_maps=key_maps),
        key_maps=key_maps,
        model=model,
        dense=model.dense,
        num_tasks=config.num_tasks,
        evaluation=partial(AUCEvaluation, auc=auc, targets=targets),
        **_work(config, shape, head=(config.hidden, config.hidden, config.num_tasks)),
    )


def retrieval(config: TrainConfig, manifest: Manifest, world: World) -> Task:
    """Predict the next item; measured by the place of each sample's last item among all items."""
    if config.pipeline != "none":
        raise ConfigError(
            f"the evaluation of retrieval looks items up outside the pipeline {config.pipeline!r}; use --pipeline none"
        )
    shape = _shape(config, manifest)
    configs = tables(manifest.vocabulary_sizes, shape, retrieval=True)
    key_maps = _key_maps(config, configs, world)
    # Negatives, and all items of an evaluation, are rows of the table: whatever the routing, each item has one.
    model = HSTURetrieval(
        _embeddings(config, configs),
        shape,
        num_items=manifest.vocabulary_sizes[ITEM_ID],
        num_negatives=config.num_negatives,
        seed=config.seed,
    )
    return Task(
        read=partial(LoaderConfig, user_id=config.user_id, key_maps=key_maps),
        key_maps=key_maps,
        model=model,
        dense=model.dense,
        num_tasks=1,
        evaluation=partial(
            RankingEvaluation,
            metrics=RankingMetrics((config.k,), group=world.data, device=world.device),
            places=model.places_of_targets,
        ),
        **_work(config, shape, head=(config.hidden, config.embedding_dim)),
    )


def _key_maps(config: TrainConfig, configs: list[EmbeddingConfig], world: World) -> dict[str, KeyMap]:
    """Return which row has which key, of the tables that `_embeddings` shards."""
    large = [table for table in configs if table.num_embeddings >= config.min_sharded_rows]
    rows = {feature_of(table.name): table.num_embeddings for table in large}
    return make_key_maps(rows if config.embeddings == "sharded" else {}, config.routing, world.data_size)


def _embeddings(config: TrainConfig, configs: list[EmbeddingConfig]) -> nn.Module:
    if config.embeddings == "sharded":
        # Too large for the memory of one process, perhaps.
        return Embeddings(configs, min_sharded_rows=config.min_sharded_rows, device="meta")
    replicated: nn.Module = EmbeddingCollection(tables=configs)
    return replicated


def _shape(config: TrainConfig, manifest: Manifest) -> HSTUConfig:
    contextual = (*((USER_ID,) if config.user_id else ()), *manifest.contextual)
    return HSTUConfig(
        max_length=len(contextual) + 2 * config.max_history_length,
        contextual=contextual,
        embedding_dim=config.embedding_dim,
        hidden=config.hidden,
        heads=config.heads,
        head_dim=config.hidden // config.heads,
        layers=config.layers,
        dropout=config.dropout,
        attention=config.attention,
        fused_norms=config.fused_norms,
        recompute=config.recompute,
    )


def _work(config: TrainConfig, shape: HSTUConfig, *, head: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a Task that say what there is to compute."""
    return {
        "attention": HSTUAttention,
        "attention_flops": attention_flops,
        "cost": shape.cost(),
        "flops": hstu_flops(
            hidden=shape.hidden,
            heads=shape.heads // config.tensor_parallel,  # of this rank
            head_dim=shape.head_dim,
            layers=shape.layers,
            embedding=(shape.embedding_dim, shape.hidden, shape.hidden),
            head=head,
        ),
        "work": partial(batch_work, interleave_actions=shape.interleave_actions, contextual=shape.contextual),
    }
