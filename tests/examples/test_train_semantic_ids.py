import math
from pathlib import Path

import pytest

from tests.examples.torchrun import numbers_of, run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples


def test_codes_of_the_next_item_are_learned(small_dataset: Path, tmp_path: Path) -> None:
    output = run("train_semantic_ids", small_dataset, tmp_path, "--steps", "40")
    before, *steps, after = output.splitlines()
    losses = [numbers_of(line)[1] for line in steps]
    assert losses[1] < losses[0] < math.log(8)  # of 8 codes, all equally likely
    assert losses[1] < 1.6
    for line in steps:
        load_before, load_after = numbers_of(line)[2:]
        assert 1 <= load_after < 1.02 < load_before
    assert numbers_of(before)[1] < 0.15 < 0.3 < numbers_of(after)[1]  # Recall@10 of 500 items
    check_tutorial("semantic-ids", output)
