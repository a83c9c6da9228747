from pathlib import Path

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.training import in_batch_mask
from tests.dataloader.batch_helpers import rows_of


@pytest.mark.parametrize("num_candidates", [0, 1, 3])
def test_the_mask_is_that_of_plain_loops(small_dataset: Path, num_candidates: int) -> None:
    config = LoaderConfig(batch_size=24, max_history_length=20, max_num_candidates=num_candidates)
    seen = set()
    for batch in build_loader(small_dataset, config, rank=0, world_size=1):
        rows = rows_of(batch.features, "item_id")
        targets = [
            (row, item)
            for row, items in enumerate(rows)
            for item in (items[len(items) - num_candidates :] if num_candidates and items else items[1:])
        ]
        mask = in_batch_mask(batch)
        assert mask.tolist() == [[other not in rows[row] for _, other in targets] for row, _ in targets]
        if num_candidates:  # of which some may be no loss tokens, because something else of them is missing
            assert torch.equal(in_batch_mask(batch.replace(loss_tokens=0)), mask)
            # The lengths of labels of floats are those of integers.
            assert torch.equal(in_batch_mask(batch.replace(labels=None, float_labels=batch.labels)), mask)
        seen |= {*mask.flatten().tolist()}
    assert seen == {True, False}


def test_a_batch_of_padding_has_an_empty_mask(small_dataset: Path) -> None:
    loader = build_loader(small_dataset, LoaderConfig(batch_size=4), rank=0, world_size=1)
    batch = next(iter(loader))
    assert in_batch_mask(batch.index_select([])).shape == (0, 0)


def test_ids_of_63_bits_have_the_mask_of_small_ones(small_dataset: Path) -> None:
    loader = build_loader(small_dataset, LoaderConfig(batch_size=24, max_num_candidates=2), rank=0, world_size=1)
    for batch in loader:
        features = batch.features
        items = features["item_id"].values()
        # Ids that differ by a multiple of 2^61, which times 24 rows is 0 in int64.
        large = KeyedJaggedTensor(["item_id"], items // 4 + (items % 4 << 61), lengths=features["item_id"].lengths())
        assert torch.equal(in_batch_mask(batch.replace(features=large)), in_batch_mask(batch))
