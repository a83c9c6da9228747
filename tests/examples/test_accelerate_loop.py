"""The example of Accelerate."""

from pathlib import Path

import pytest

from evenrank.dataloader import LoaderConfig
from tests.examples.next_item import TOLERANCE, losses_in_one_process, losses_of
from tests.examples.torchrun import run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples

pytest.importorskip("accelerate", reason="accelerate is not installed")


def test_the_same_command_resumes_in_the_middle_of_an_epoch(small_dataset: Path, tmp_path: Path) -> None:
    options = ["--checkpoints", tmp_path / "checkpoints", "--steps", 11, "--save-every", 9]  # epochs have 7 steps
    first = run("accelerate_loop", small_dataset, tmp_path, "--log-every", 1, *options)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-9"]
    partial = tmp_path / "checkpoints" / "partial"  # of a job that was killed while it saved
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    second = run("accelerate_loop", small_dataset, tmp_path, "--log-every", 1, *options)

    config = LoaderConfig(batch_size=32, max_history_length=200)
    in_one_process = losses_in_one_process(small_dataset, 11, config)
    assert losses_of(first) == pytest.approx(in_one_process, abs=TOLERANCE)
    assert losses_of(first)[11] < 0.95 * losses_of(first)[1]
    assert _reports(second) == _reports(first)[9:]  # the samples of these steps, and their losses, to the last digit
    assert "epoch 1, sample 96" in _reports(second)[0]
    check_tutorial("accelerate", first, second)


def _reports(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step")]
