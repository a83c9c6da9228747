"""The example of torch.distributed.checkpoint."""

from pathlib import Path

import pytest

from evenrank.dataloader import LoaderConfig
from evenrank.datasets import read_manifest
from tests.examples.next_item import TOLERANCE, losses_in_one_process, losses_of
from tests.examples.torchrun import run
from tests.examples.tutorial import check_tutorial

pytestmark = pytest.mark.examples


def test_an_epoch_is_finished_on_another_number_of_ranks_as_if_never_stopped(
    small_dataset: Path, tmp_path: Path
) -> None:
    options = ["--checkpoint", tmp_path / "checkpoint", "--global-batch-size", 24]
    first = run("checkpoint_resume", small_dataset, tmp_path, "--log-every", 1, *options, "--steps", 4)
    second = run("checkpoint_resume", small_dataset, tmp_path, "--log-every", 1, *options, num_ranks=3)

    uninterrupted = losses_in_one_process(small_dataset, 9, LoaderConfig(batch_size=24, max_history_length=100))
    assert [*losses_of(first)] == [1, 2, 3, 4]
    assert losses_of(first) | losses_of(second) == pytest.approx(uninterrupted, abs=TOLERANCE)
    num_samples = read_manifest(small_dataset).splits["train"].rows
    assert first.splitlines()[-1] == f"96 of {num_samples} samples were trained exactly once, 0 more often"
    assert second.splitlines()[0] == "resumed on 3 ranks; 5 of 9 steps are left"
    assert second.splitlines()[-1] == f"{num_samples} of {num_samples} samples were trained exactly once, 0 more often"
    check_tutorial("checkpoint-resume", first, second)
