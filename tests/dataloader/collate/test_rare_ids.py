"""Items that share the id 0 in a dataset, in its loaders."""

from collections import Counter
from pathlib import Path
from typing import Literal

import pytest

from evenrank.dataloader import LoaderConfig, Negatives, Targets, build_loader
from tests.preprocess.decoded import number, write_log

_LOG = [(user, item, user + place) for user in range(6) for place, item in enumerate([1, 1, 2, 3, 10 + user, 4, 1])]


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_rare_items_are_no_negatives_and_can_be_left_out_as_targets(
    tmp_path: Path, by: Literal["uniform", "popularity"]
) -> None:
    manifest = number(tmp_path / "out", write_log(tmp_path / "log.csv", _LOG), min_count="item=2")
    assert manifest.vocabulary_sizes["item_id"] == 5
    negatives = Negatives(count=3, by=by, exclude_own=False)
    order = Targets(where="item_id > 0")
    config = LoaderConfig(batch_size=4, max_num_candidates=1, order=order, negatives=negatives)
    drawn, targets, histories = Counter[int](), Counter[int](), Counter[int]()
    for batch in build_loader(tmp_path / "out", config, rank=0, world_size=1):
        assert batch.negatives is not None
        drawn.update(batch.negatives["item_id"].values().tolist())
        items = batch.features["item_id"]
        for row in range(batch.num_real):
            *history, target = items.values()[items.offsets()[row] : items.offsets()[row + 1]].tolist()
            targets[target] += 1
            histories.update(history)
    assert {*drawn} == {1, 2, 3, 4}
    assert sorted(targets.values()) == [6, 6, 6, 18]
    assert 0 not in targets
    assert histories[0] == 12  # before the two targets that follow each
