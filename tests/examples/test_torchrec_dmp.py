"""The example of TorchRec's DistributedModelParallel."""

import math
import re
from pathlib import Path

import pytest

from evenrank.datasets import read_manifest
from tests.examples.next_item import losses_of
from tests.examples.torchrun import run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples


def test_a_table_sharded_by_rows_trains_on_balanced_batches(small_dataset: Path, tmp_path: Path) -> None:
    output = run("torchrec_dmp", small_dataset, tmp_path, "--log-every", 1, "--steps", 21)  # three epochs
    losses = losses_of(output)
    assert [*losses] == [*range(1, 22)]
    untrained = 2 * math.log(2)  # of scores of 0
    assert losses[1] == pytest.approx(untrained, abs=0.1)
    assert losses[21] < 0.8 * untrained
    loads = re.findall(r"(\d+\.\d+) before balancing, (\d+\.\d+) after", output)
    before, after = ([float(load) for load in loads_of_steps] for loads_of_steps in zip(*loads, strict=True))
    assert max(before) > 1.1
    assert max(after) < 1.05
    num_items = read_manifest(small_dataset).vocabulary_sizes["item_id"]
    assert output.splitlines()[-1] == f"rank 0 has {-(-num_items // 2)} of the {num_items} rows of the table"
    check_tutorial("torchrec-dmp", output)
