"""Users' mistakes with the models and the trainer: the call, the kind of error, and its one line."""

import re
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
from tests.errors.scene import Row, Scene
from tests.examples.hstu.samples import CONFIG, Sample, make_batch, make_ranking, make_sequences
from tests.examples.hstu.samples import random_samples as samples_of
from tests.examples.semantic_ids.test_semantic_ids import batch_of, make_model, random_samples
from trainer import TrainConfig, make_pipeline


def _search(beams: int, sizes: tuple[int, ...]) -> Any:
    table = CodeTable(codes=np.zeros((1, len(sizes)), dtype=np.int32), codebook_sizes=sizes)
    return beam_search(make_model(), batch_of(random_samples(2, max_history=1)), Catalogue(table), beams=beams)


def _attend() -> Any:
    values = torch.zeros(0, 1, 64)
    return ATTENTIONS["triton"](values, values, values, make_sequences([], [], []), scale_length=1)


LIMITS = {"user_id": 1, "tags": 3, "item_id": 24, "action": 23}
NONE = torch.tensor([False])
USER: Any = {"contextual": "user_id"}  # without a comma behind it
ROWS: list[tuple[Any, str]] = [
    (lambda s: HSTUConfig(max_length=9, **USER), "HSTUConfig: contextual must be of type tuple..., got 'user_id'"),
    (lambda s: HSTUConfig(max_length=0), "HSTUConfig: max_length must be at least 1, got 0"),
    (
        lambda s: HSTUConfig(max_length=9, attention="flash"),
        "...attention must be one of padded, triton, auto, got 'flash'...",
    ),
    (lambda s: tables({"item_id": 3}, CONFIG), "no vocabulary size of 'action'; known are those of item_id"),
    (lambda s: _attend(), "the attention 'triton' needs a CUDA device, got cpu; choose 'auto' or 'padded'"),
    (
        lambda s: lay_out(
            make_batch([Sample()]), HSTUConfig(max_length=9, contextual=("country",)), predicts_history=NONE
        ),
        "the model needs the feature 'country'; batches have user_id, tags, item_id, action",
    ),
    (
        lambda s: make_ranking()(make_batch(samples_of(1)).replace(length_limits=LIMITS)),
        "samples can have 51 tokens by the batch's length_limits, but max_length is 50; raise it, or cut histories",
    ),
    (
        lambda s: make_ranking()(make_batch(samples_of(1)).replace(labels=None)),
        "the batch has no labels; set max_num_candidates or num_tasks of its LoaderConfig",
    ),
    (lambda s: DecoderConfig(codebook_sizes=(4, 0)), "DecoderConfig: codebook_sizes must be at least 1, got 0"),
    (
        lambda s: DecoderConfig(codebook_sizes=(4,), hidden=20, heads=4),
        "hidden must be a multiple of 2 * heads, got 20 and 4",
    ),
    (
        lambda s: make_model((4, 5, 6, 2))(batch_of(random_samples(4, max_history=0))),
        "the batch has 3 codes per item, codebook_sizes 4 levels; create the DecoderConfig with the ...CodeTable",
    ),
    (
        lambda s: make_model(num_users=3)(batch_of(random_samples(2, max_history=1))),
        "the model needs the feature 'user_id'; batches have semantic_id, candidate_id; see contextual of the "
        "DecoderConfig, user_id and candidate_feature of the LoaderConfig",
    ),
    (lambda s: _search(0, (3, 4, 2)), "beams must be at least 1, got 0"),
    (
        lambda s: _search(2, (3, 4)),
        "the catalogue has codebooks of [3, 4], the model of [3, 4, 2]; create both from the same CodeTable",
    ),
    (
        lambda s: Catalogue(CodeTable(codes=np.full((2, 3), -1, dtype=np.int32), codebook_sizes=(3, 4, 2))),
        "none of the 2 items of the table has a code; pass the data's table",
    ),
    (
        lambda s: make_pipeline("prefetch", torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), "cpu", loss=max),
        "the pipeline 'prefetch' needs a CUDA device, got cpu; use 'sparse-dist' or 'none'",
    ),
    (lambda s: TrainConfig(heads=3), "hidden must be a multiple of heads, got hidden=64 and heads=3"),
    (
        lambda s: TrainConfig(profile="7:7"),
        "profile must be START:STOP, steps from 0 on, such as 100:110, got '7:7'",
    ),
    (
        lambda s: TrainConfig(balance="none", compare_every=5),
        "TrainConfig: compare_every=5 applies to options other than balance='none', not to ...; leave it out",
    ),
]


@pytest.mark.parametrize("row", [pytest.param(Row(call, ConfigError, line), id=line[:60]) for call, line in ROWS])
def test_mistake_gives_one_line(row: Row, tmp_path: Path, small_dataset: Path) -> None:
    with pytest.raises(row.kind) as caught:
        row.call(Scene(tmp_path, small_dataset))
    expected = ".*".join(map(re.escape, row.line.split("...")))
    assert re.fullmatch(expected, str(caught.value)), f"{str(caught.value)!r} is not {row.line!r}"


def test_a_model_of_nan_ranks_every_target_last(small_dataset: Path) -> None:
    model = own_model.NextItem(read_manifest(small_dataset).vocabulary_sizes["item_id"])
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    assert set(own_model.evaluate(model, small_dataset, 0, 1).values()) == {0}
