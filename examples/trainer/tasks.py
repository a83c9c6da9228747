"""`make_task`: the model of a job, its batches and its metrics: ranking and retrieval with HSTU, or semantic ids."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SemanticIdBatch, random_codes
from evenrank.dataloader.balance import Cost
from evenrank.dataloader.codes import CodeTable, read_codes
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.schema import ITEM_ID, USER_ID, Manifest, read_manifest
from evenrank.training import (
    BinaryAUC,
    ClassificationMetrics,
    RankingMetrics,
    batch_work,
    decoder_flops,
    hstu_flops,
    label_bits,
)
from evenrank.training.attention_timing import LayerFlops
from evenrank.training.flops import ModelFlops, Work, causal_work
from hstu.config import HSTUConfig, feature_of, tables
from hstu.embeddings import Embeddings
from hstu.layer import HSTUAttention, attention_flops
from hstu.ranking import HSTURanking, at_least
from hstu.retrieval import HSTURetrieval
from semantic_ids.beam_search import Catalogue, beam_search
from semantic_ids.config import DecoderConfig
from semantic_ids.decoder import DecoderLayer
from semantic_ids.model import SemanticIdModel
from trainer.config import TrainConfig
from trainer.evaluation import ActionEvaluation, Evaluation, RankingEvaluation
from trainer.routing import make_key_maps
from trainer.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model, the batches that it reads, and how it is measured."""

    read: Callable[..., LoaderConfig]
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
    """What a sample costs, for balancing."""
    flops: ModelFlops
    """Of the model."""
    work: Callable[[Any], Work]
    """What a batch gives the model to do."""
    evaluation: Callable[..., Evaluation]
    """From the trained model, its pipeline and the batches to evaluate."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """What decides on its batches besides the settings, by content: a job that resumes must keep it."""


def ranking(config: TrainConfig, manifest: Manifest, world: World) -> Task:
    """Predict the action of each event of the history, or of candidates, from those before; see `ActionEvaluation`."""
    shape = _shape(config, manifest)
    # A batch has whole actions for one task, and their low bits for several.
    is_single = config.num_tasks == 1
    targets = at_least(config.positive_action) if is_single else partial(label_bits, num_tasks=config.num_tasks)
    configs = tables(manifest.vocabulary_sizes, shape)
    key_maps = _key_maps(config, configs, world)
    model = HSTURanking(_embeddings(config, configs), shape, num_tasks=config.num_tasks, targets=targets)
    auc = BinaryAUC(config.num_tasks, group=world.data, device=world.device)
    metrics = ClassificationMetrics(config.num_tasks, group=world.data, device=world.device)
    return Task(
        read=partial(
            LoaderConfig,
            user_id=config.user_id,
            max_num_candidates=config.num_candidates,
            num_tasks=config.num_tasks,
            key_maps=key_maps,
        ),
        key_maps=key_maps,
        model=model,
        dense=model.dense,
        num_tasks=config.num_tasks,
        evaluation=partial(ActionEvaluation, auc=auc, metrics=metrics, targets=targets),
        **_flops_and_work(config, shape, head=(config.hidden, config.hidden, config.num_tasks)),
    )


def retrieval(config: TrainConfig, manifest: Manifest, world: World) -> Task:
    """Predict the next item; measured by the place of each sample's last item among all items."""
    if config.pipeline != "none":
        raise ConfigError(
            f"the evaluation of retrieval looks items up outside the pipeline {config.pipeline!r}; use --pipeline none"
        )
    if config.time_windows is not None:
        raise ConfigError(
            "retrieval is trained on whole histories, whose events are in many windows of time; use --task ranking or "
            "--model semantic-ids with --time-windows"
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
        **_flops_and_work(config, shape, head=(config.hidden, config.embedding_dim)),
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


def _contextual(config: TrainConfig, manifest: Manifest) -> tuple[str, ...]:
    """Return the features that are one token of a sample each: ids with one value."""
    single = (name for name, dtype in manifest.contextual.items() if dtype == "int64")
    return (*((USER_ID,) if config.user_id else ()), *single)


def _shape(config: TrainConfig, manifest: Manifest) -> HSTUConfig:
    contextual = _contextual(config, manifest)
    return HSTUConfig(
        max_length=len(contextual) + 2 * config.max_history_length + config.num_candidates,
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


def _flops_and_work(config: TrainConfig, shape: HSTUConfig, *, head: tuple[int, ...]) -> dict[str, Any]:
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


def semantic_ids(config: TrainConfig, manifest: Manifest, world: World) -> Task:
    """Predict the codes of each next item; measured by the place of the last item in a beam search."""
    table = _code_table(config, manifest)
    contextual = _contextual(config, manifest)
    shape = DecoderConfig(
        codebook_sizes=table.codebook_sizes,
        contextual={name: manifest.vocabulary_sizes[name] for name in contextual},
        hidden=config.hidden,
        heads=config.heads,
        layers=config.layers,
        dropout=config.dropout,
    )
    model = SemanticIdModel(shape)
    catalogue = Catalogue(table, world.device)
    return Task(
        read=partial(
            LoaderConfig,
            codes=table,
            user_id=config.user_id,
            history_labels=config.time_windows is None,  # events of earlier windows have been trained
            candidate_feature=True,
        ),
        key_maps={},
        kept={"codes": table.describe()},  # not the file's path, or the seed that draws them
        model=model,
        dense=model,
        attention=DecoderLayer,
        attention_flops=None,
        num_tasks=shape.levels,
        cost=shape.cost(),
        flops=decoder_flops(
            hidden=shape.hidden,
            heads=shape.heads,
            head_dim=shape.head_dim,
            layers=shape.layers,
            ffn_hidden=shape.ffn_multiplier * shape.hidden,
            head=(shape.hidden, max(shape.codebook_sizes)),
        ),
        work=_semantic_id_work,
        evaluation=partial(
            RankingEvaluation,
            metrics=RankingMetrics((config.k,), device=world.device),
            places=lambda batch: beam_search(model, batch, catalogue, beams=config.k).places_of_targets(batch),
        ),
    )


def _code_table(config: TrainConfig, manifest: Manifest) -> CodeTable:
    if config.codes is not None:
        return read_codes(config.codes)
    num_items = manifest.vocabulary_sizes[ITEM_ID]
    return random_codes(num_items, levels=config.code_levels, codebook_size=config.codebook_size, seed=config.seed)


def _semantic_id_work(batch: SemanticIdBatch) -> Work:
    """Count the tokens of each sample: the values of all features, and the one that begins a candidate."""
    tokens = batch.features.lengths().view(-1, batch.batch_size).sum(dim=0) + 1
    return causal_work(tokens, predictions=batch.loss_tokens)


def make_task(config: TrainConfig, data: Path, world: World) -> Task:
    """Return what a job learns, from its dataset. Collective: every rank must call this.

    Raises:
        ConfigError: a setting does not fit the data, or another setting.
        DataError: the dataset, or the file of codes, is missing or malformed.
    """
    make = semantic_ids if config.model == "semantic-ids" else {"ranking": ranking, "retrieval": retrieval}[config.task]
    manifest = read_manifest(data)
    task = make(config, manifest, world)
    return replace(task, kept={"dataset": f"{manifest.dataset} {manifest.content_hash[:16]}", **task.kept})
