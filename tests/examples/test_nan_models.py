"""What examples say of a model whose weights are NaN: never that it ranks well."""

from pathlib import Path

import own_model
import pytest
import torch
import train_semantic_ids

from evenrank.core.errors import DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import read_manifest


def _diverged(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)


def test_a_search_of_codes_is_an_error(small_dataset: Path) -> None:
    table = train_semantic_ids.make_codes(read_manifest(small_dataset).vocabulary_sizes["item_id"])
    model = train_semantic_ids.CodePredictor(table.codebook_sizes[0])
    _diverged(model)
    batch = next(iter(build_loader(small_dataset, LoaderConfig(codes=table, batch_size=4), rank=0, world_size=1)))
    with pytest.raises(DataError, match="the scores of the model are NaN; "):
        model.beam_search(batch, 10)


def test_a_ranking_of_all_items_has_the_target_last(small_dataset: Path) -> None:
    model = own_model.NextItem(read_manifest(small_dataset).vocabulary_sizes["item_id"])
    _diverged(model)
    assert set(own_model.evaluate(model, small_dataset, 0, 1).values()) == {0}
