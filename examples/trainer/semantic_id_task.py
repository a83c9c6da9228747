"""Generating the codes of the next item with a causal decoder."""

from functools import partial

from evenrank.dataloader import SemanticIdBatch, SemanticIdConfig, random_codes
from evenrank.dataloader.collate.semantic_ids import CodeTable, read_codes
from evenrank.datasets.schema import ITEM_ID, USER_ID, Manifest
from evenrank.training import RankingMetrics, decoder_flops
from evenrank.training.flops import Work, causal_work
from semantic_ids.beam_search import Catalogue, beam_search
from semantic_ids.config import DecoderConfig
from semantic_ids.decoder import DecoderLayer
from semantic_ids.model import SemanticIdModel
from trainer.config import TrainConfig
from trainer.evaluate import RankingEvaluation
from trainer.tasks import Task
from trainer.world import World


def semantic_ids(config: TrainConfig, manifest: Manifest, world: World) -> Task:
    """Predict the codes of each next item; measured by the place of the last item in a beam search."""
    table = _code_table(config, manifest)
    contextual = (*((USER_ID,) if config.user_id else ()), *manifest.contextual)
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
            SemanticIdConfig, codes=table, user_id=config.user_id, history_labels=True, candidate_feature=True
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
        work=_work,
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


def _work(batch: SemanticIdBatch) -> Work:
    """Count the tokens of each sample: the values of all features, and the one that begins a candidate."""
    tokens = batch.features.lengths().view(-1, batch.batch_size).sum(dim=0) + 1
    return causal_work(tokens, predictions=batch.loss_tokens)
