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
        rows, features = rows_of(batch.features, "item_id"), batch.features["item_id"]
        targets = [
            (row, item)
            for row, items in enumerate(rows)
            for item in (items[len(items) - num_candidates :] if num_candidates and items else items[1:])
        ]
        mask = in_batch_mask(batch)
        assert mask.tolist() == [[other not in rows[row] for _, other in targets] for row, _ in targets]
        # Ids that differ by a multiple of 2^61, which times 24 rows is 0 in int64.
        items = features.values()
        large = KeyedJaggedTensor(["item_id"], items // 4 + (items % 4 << 61), lengths=features.lengths())
        others = [batch.replace(features=large)]
        if num_candidates:  # of which some may be no loss tokens; the lengths of labels of floats are those of integers
            others += [batch.replace(loss_tokens=0), batch.replace(labels=None, float_labels=batch.labels)]
        assert all(torch.equal(in_batch_mask(other), mask) for other in others)
        seen |= {*mask.flatten().tolist()}
    assert seen == {True, False}
    assert in_batch_mask(batch.index_select([])).shape == (0, 0)
