"""The example of FSDP2 on a device mesh."""

from pathlib import Path

import pytest

from evenrank.dataloader import LoaderConfig
from tests.examples.next_item import TOLERANCE, check_error_without_data, losses_in_one_process, losses_of, run


def test_a_model_divided_along_both_dimensions_trains_like_one_process(small_dataset: Path) -> None:
    output = run("fsdp2", 4, small_dataset, "--steps", 14)  # two epochs
    config = LoaderConfig(batch_size=32, max_history_length=200)
    in_one_process = losses_in_one_process("fsdp2", small_dataset, 14, config)
    assert losses_of(output) == pytest.approx(in_one_process, abs=TOLERANCE)
    assert losses_of(output)[14] < 0.95 * losses_of(output)[1]
    assert output.splitlines()[-1] == "tensor-parallel peers had equal samples in 14 of 14 steps"


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_error_without_data("fsdp2", tmp_path, capsys)
