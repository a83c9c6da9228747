"""Programs of one file train like one process, resume, and print what their tutorials show."""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evenrank.dataloader import LoaderConfig
from evenrank.datasets import read_manifest
from tests.examples.programs import (
    EXAMPLES,
    TOLERANCE,
    check_tutorial,
    losses_in_one_process,
    losses_of,
    numbers_of,
    run,
)

pytestmark = pytest.mark.examples


def _losses_of_balanced(lines: list[str]) -> list[float]:
    """Return the losses in lines that end with the load of the heaviest rank before and after balancing."""
    for line in lines:
        load_before, load_after = numbers_of(line)[2:]
        assert 1 <= load_after < min(1.02, load_before)
    return [numbers_of(line)[1] for line in lines]


@pytest.mark.parametrize(
    ("library", "example", "options", "page"),
    [
        ("lightning", "lightning_fit", [], "trainers"),
        ("transformers", "transformers_trainer", [], "trainers"),
        ("transformers", "transformers_trainer", ["--accumulate", 2], None),
    ],
)
def test_a_trainer_resumes_within_an_epoch_on_another_number_of_ranks(
    small_dataset: Path, tmp_path: Path, library: str, example: str, options: list[object], page: str | None
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    # Epochs have 9 batches; with two in a step, 5 steps.
    fixed = ["--log-every", 1, "--checkpoints", tmp_path / "checkpoints", "--global-batch-size", 24, "--save-every", 3]
    first = run(example, small_dataset, tmp_path, *fixed, *options, "--steps", 7)
    if library == "transformers":
        (tmp_path / "checkpoints" / "checkpoint-9").mkdir()  # of a job that was killed while it saved
        shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-7")
    second = run(example, small_dataset, tmp_path, *fixed, *options, "--steps", 11, num_ranks=3)
    config = LoaderConfig(batch_size=24, max_history_length=200)
    uninterrupted = losses_in_one_process(small_dataset, 11, config, accumulated=2 if options else 1)
    assert [[*losses_of(output)] for output in (first, second)] == [[*range(1, 8)], [*range(7, 12)]]
    for losses in (losses_of(first), losses_of(second)):
        assert losses == pytest.approx({step: uninterrupted[step] for step in losses}, abs=TOLERANCE)
    if page is not None:
        check_tutorial(page, first, second)


def test_an_epoch_is_finished_on_another_number_of_ranks(small_dataset: Path, tmp_path: Path) -> None:
    options = ["--log-every", 1, "--checkpoint", tmp_path / "checkpoint", "--global-batch-size", 24]
    first = run("checkpoint_resume", small_dataset, tmp_path, *options, "--steps", 4)
    second = run("checkpoint_resume", small_dataset, tmp_path, *options, num_ranks=3)
    uninterrupted = losses_in_one_process(small_dataset, 9, LoaderConfig(batch_size=24, max_history_length=100))
    assert [*losses_of(first)] == [1, 2, 3, 4]
    assert losses_of(first) | losses_of(second) == pytest.approx(uninterrupted, abs=TOLERANCE)
    num_samples = read_manifest(small_dataset).splits["train"].rows
    assert first.splitlines()[-1] == f"96 of {num_samples} samples were trained on exactly once, 0 more often"
    assert second.splitlines()[0] == "resumed on 3 ranks; 5 of 9 steps are left"
    of_all = f"{num_samples} of {num_samples} samples were trained on exactly once, 0 more often"
    assert second.splitlines()[-1] == of_all
    check_tutorial("checkpoint-resume", first, second)


def test_sasrec_learns_what_is_popular_with_either_attention(small_dataset: Path, tmp_path: Path) -> None:
    output = run("ddp_sasrec", small_dataset, tmp_path, "--steps", "24", "--attention", "jagged")
    before, attentions, *steps, after = output.splitlines()
    padded, jagged = numbers_of(attentions)
    assert 0 < padded == pytest.approx(jagged, rel=1e-4)
    # A model that knows nothing has log(1 + 128 negatives) per event.
    losses = _losses_of_balanced(steps)
    assert losses[-1] < 3.6 < losses[0] < math.log(129)
    # Of the last items of other users, among the first 10 of 500 items, and 100. A model whose labels are not shifted
    # has as low a loss, but recommends what a user has just had.
    assert all(value <= limit for value, limit in zip(numbers_of(before), (0.1, 0.4), strict=True))
    assert all(value > limit for value, limit in zip(numbers_of(after), (0.3, 0.6), strict=True))
    check_tutorial("ddp-sasrec", output)


def test_a_job_with_its_own_dataloader_is_balanced_and_resumes_bit_for_bit(small_dataset: Path, tmp_path: Path) -> None:
    # An epoch has 7 steps: the checkpoint after step 10 is in the middle of the second.
    output = run("own_dataloader", small_dataset, tmp_path, "--steps", "20")
    first, second, resuming, resumed, same = output.splitlines()
    assert resuming == "resuming after step 10"
    assert same == "the 10 losses after the checkpoint are the same, bit for bit"
    losses = _losses_of_balanced([first, second])
    assert losses[1] < losses[0] < math.log(501)
    assert losses[1] < 5.2
    assert numbers_of(resumed)[:2] == numbers_of(second)[:2]
    assert not list(tmp_path.iterdir())
    check_tutorial("own-dataloader", output)


def test_a_table_sharded_by_rows_trains_on_balanced_batches_and_resumes(small_dataset: Path, tmp_path: Path) -> None:
    options = ["--log-every", 1, "--steps", 21, "--save-every", 16, "--checkpoint", tmp_path / "checkpoint"]
    output = run("torchrec_dmp", small_dataset, tmp_path, *options)  # three epochs
    losses = losses_of(output)
    untrained = 2 * math.log(2)  # of scores of 0
    assert losses[1] == pytest.approx(untrained, abs=0.1)
    assert losses[21] < 0.8 * untrained
    loads = re.findall(r"(\d+\.\d+) before balancing, (\d+\.\d+) after", output)
    before, after = zip(*loads, strict=True)
    assert float(max(before)) > 1.1
    assert float(max(after)) < 1.05
    num_items = read_manifest(small_dataset).vocabulary_sizes["item_id"]
    assert output.splitlines()[-1] == f"rank 0 has {-(-num_items // 2)} of the {num_items} rows of the table"
    again = run("torchrec_dmp", small_dataset, tmp_path, *options)
    assert again.splitlines()[0] == "resumed after step 16"
    assert losses_of(again) == {step: losses[step] for step in range(17, 22)}
    check_tutorial("torchrec-dmp", output, again)


def test_an_own_model_learns_and_continues_from_its_checkpoint(small_dataset: Path, tmp_path: Path) -> None:
    def train(steps: int, checkpoint: str) -> tuple[dict[int, float], str]:
        output = run("own_model", small_dataset, tmp_path, "--steps", steps, "--checkpoint", tmp_path / checkpoint)
        return losses_of(output), output.splitlines()[-1]

    (first, _), (second, scores) = train(20, "parts"), train(40, "parts")
    assert [*first, *second] == [20, 40]
    assert second[40] < first[20] < math.log(501)
    assert train(40, "whole") == (first | second, scores)
    assert numbers_of(scores)[0] > 0.02  # recall@10 of 500 items


def test_codes_of_the_next_item_are_learned(small_dataset: Path, tmp_path: Path) -> None:
    output = run("train_semantic_ids", small_dataset, tmp_path, "--steps", "40")
    before, *steps, after = output.splitlines()
    losses = _losses_of_balanced(steps)
    assert losses[1] < losses[0] < math.log(8)  # of 8 codes, all equally likely
    assert losses[1] < 1.6
    assert numbers_of(before)[1] < 0.15 < 0.3 < numbers_of(after)[1]  # Recall@10 of 500 items
    check_tutorial("semantic-ids", output)


# All in one process, because each would import torch.
WITHOUT_DATA = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))  # as Python does for a program
for path in sys.argv[1:]:
    sys.argv = [path, "--data", "missing"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exit:
        print(exit.code)
"""


def test_without_a_dataset_the_examples_say_how_to_make_one_and_exit_with_2(tmp_path: Path) -> None:
    paths = sorted(str(path) for path in EXAMPLES.glob("*.py") if path.name != "next_item.py")  # which is no program
    command = [sys.executable, "-c", WITHOUT_DATA, *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.stdout.split() == ["2"] * len(paths), done.stderr
    remedy = "make one with `evenrank preprocess --dataset NAME --out missing`"
    line = f"error: missing is not a dataset: no such folder; {remedy}"
    assert [found for found in done.stderr.splitlines() if found.startswith("error")] == [line] * len(paths)
    assert "Traceback" not in done.stderr
