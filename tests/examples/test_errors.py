"""Users' mistakes with the models and the trainer: the call, and the one line of its ConfigError."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import own_model
import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import CodeTable
from evenrank.datasets import read_manifest
from hstu import ATTENTIONS, HSTUConfig, tables
from hstu.model import lay_out
from semantic_ids import Catalogue, DecoderConfig, beam_search
from tests.examples.hstu.samples import CONFIG, make_batch, make_ranking, make_sequences
from tests.examples.semantic_ids.test_semantic_ids import SIZES, batch_of, make_model, random_samples
from trainer import TrainConfig, make_pipeline


def _codes(value: int, sizes: tuple[int, ...] = SIZES) -> Catalogue:
    return Catalogue(CodeTable(codes=np.full((2, len(sizes)), value, dtype=np.int32), codebook_sizes=sizes))


USER: Any = "user_id"  # without a comma behind it
NO, NONE, OTHER = torch.zeros(0, 1, 64), torch.tensor([False]), HSTUConfig(max_length=9, contextual=("country",))
RANKED, CODED = make_batch([{"num_candidates": 1}]), batch_of(random_samples(4, max_history=1))
LIMITS = {"user_id": 1, "tags": 3, "item_id": 24, "action": 23}
ROWS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: HSTUConfig(max_length=9, contextual=USER),
        "...contextual must be of type tuple..., got 'us...",
    ),
    (lambda: HSTUConfig(max_length=0), "HSTUConfig: max_length must be at least 1, got 0"),
    (lambda: HSTUConfig(max_length=9, attention="x"), "...must be one of padded, triton, auto, got 'x'..."),
    (lambda: tables({"item_id": 3}, CONFIG), "no vocabulary size of 'action'; known are those of item_id"),
    (
        lambda: ATTENTIONS["triton"](NO, NO, NO, make_sequences([], [], []), scale_length=1),
        "the attention 'triton' needs a CUDA device, got cpu; choose 'auto' or 'padded'",
    ),
    (
        lambda: lay_out(RANKED, OTHER, predicts_history=NONE),
        "...needs the feature 'country'; batches have user_id, ...",
    ),
    (
        lambda: make_ranking()(RANKED.replace(length_limits=LIMITS)),
        "samples can have 51 tokens by the batch's length_limits, but max_length is 50; raise it, or cut histories",
    ),
    (lambda: make_ranking()(RANKED.replace(labels=None)), "the batch has no labels; set max_num_candidates or num_..."),
    (lambda: DecoderConfig(codebook_sizes=(4, 0)), "DecoderConfig: codebook_sizes must be at least 1, got 0"),
    (lambda: DecoderConfig(codebook_sizes=(4,), hidden=20, heads=4), "...a multiple of 2 * heads, got 20 and 4"),
    (
        lambda: make_model((4, 5, 6, 2))(CODED),
        "the batch has 3 codes per item, codebook_sizes 4 levels; create the DecoderConfig with the ...CodeTable",
    ),
    (
        lambda: make_model(num_users=3)(CODED),
        "the model needs the feature 'user_id'; batches have semantic_id, candidate_id; see contextual of the "
        "DecoderConfig, user_id and candidate_feature of the LoaderConfig",
    ),
    (lambda: beam_search(make_model(), CODED, _codes(0), beams=0), "beams must be at least 1, got 0"),
    (
        lambda: beam_search(make_model(), CODED, _codes(0, (3, 4)), beams=2),
        "the catalogue has codebooks of [3, 4], the model of [3, 4, 2]; create both from the same CodeTable",
    ),
    (lambda: _codes(-1), "none of the 2 items of the table has a code; pass the data's table"),
    (
        lambda: make_pipeline("prefetch", torch.nn.Linear(1, 1), torch.optim.SGD([NO]), "cpu", loss=max),
        "the pipeline 'prefetch' needs a CUDA device, got cpu; use 'sparse-dist' or 'none'",
    ),
    (lambda: TrainConfig(heads=3), "hidden must be a multiple of heads, got hidden=64 and heads=3"),
    (lambda: TrainConfig(profile="7:7"), "profile must be START:STOP, ..., such as 100:110, got '7:7'"),
    (
        lambda: TrainConfig(balance="none", compare_every=5),
        "TrainConfig: compare_every=5 applies to options other than balance='none', not to ...; leave it out",
    ),
    (lambda: TrainConfig(crosses=("a=user_id,b",)), "crosses must be NAME=COLUMN,...:ROWS, ..., got 'a=user_id,b'"),
    (lambda: TrainConfig(crosses=("a=b:0",)), "crosses must be NAME=COLUMN,...:ROWS, ..., got 'a=b:0'"),
    (
        lambda: TrainConfig(target_features=("hour:24",)),
        "target_features must be NAME=EXPRESSION or NAME=EXPRESSION:ROWS, such as ..., got 'hour:24'",
    ),
    (lambda: TrainConfig(target_features=("h=a //:24",)), "'a //' is no expression; write one such as ..."),
    (lambda: TrainConfig(pools_within=9), "...pools_within=9 applies to pools=ACTION, not to pools=(); leave it out"),
    (
        lambda: TrainConfig(stochastic_newest=9),
        "...stochastic_newest=9 applies to stochastic_alpha, not to stochastic_alpha=None; leave it out",
    ),
    (lambda: TrainConfig(segment=0.5), "TrainConfig: segment=0.5 applies to within='shuffle', not to time_windows=..."),
    (lambda: TrainConfig(held_out=0.1), "TrainConfig: held_out=0.1 applies to time_windows, not to ...; leave it out"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:60])
def test_mistake_gives_one_line(row: tuple[Callable[[], Any], str]) -> None:
    call, line = row
    with pytest.raises(ConfigError, match=f"^{'.*'.join(map(re.escape, line.split('...')))}$"):
        call()


def test_a_model_of_nan_ranks_every_target_last(small_dataset: Path) -> None:
    model = own_model.NextItem(read_manifest(small_dataset).vocabulary_sizes["item_id"])
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    assert set(own_model.evaluate(model, small_dataset, 0, 1).values()) == {0}
