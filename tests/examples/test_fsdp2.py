"""The example of FSDP2 on a device mesh."""

from pathlib import Path

import pytest

from evenrank.dataloader import LoaderConfig
from tests.examples.next_item import TOLERANCE, losses_in_one_process, losses_of
from tests.examples.torchrun import run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples


def test_a_model_divided_along_both_dimensions_trains_like_one_process(small_dataset: Path, tmp_path: Path) -> None:
    output = run("fsdp2", small_dataset, tmp_path, "--log-every", 1, "--steps", 14, num_ranks=4)  # two epochs
    config = LoaderConfig(batch_size=32, max_history_length=200)
    in_one_process = losses_in_one_process(small_dataset, 14, config)
    assert losses_of(output) == pytest.approx(in_one_process, abs=TOLERANCE)
    assert losses_of(output)[14] < 0.95 * losses_of(output)[1]
    assert output.splitlines()[-1] == "tensor-parallel peers had equal samples in 14 of 14 steps"
    check_tutorial("fsdp2", output)
