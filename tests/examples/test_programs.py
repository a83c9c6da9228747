"""Programs of one file, as readers run them: they train like one process, resume, and print what tutorials show."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import groupby, islice, repeat
from pathlib import Path

import pytest
import torch

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import read_manifest
from next_item import NextItem

pytestmark = pytest.mark.examples
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, TUTORIALS = ROOT / "examples", ROOT / "docs" / "tutorials"
# Losses are printed with 4 digits. A mean over each rank's tokens instead of all of them differs by 2e-4 and more.
TOLERANCE = 1e-4


def _run(example: str, data: Path, cwd: Path, *arguments: object, num_ranks: int = 2) -> str:
    """Return what an example prints; it must succeed, and write nothing to standard error."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", str(num_ranks)]
    command = [*torchrun, str(EXAMPLES / f"{example}.py"), "--data", str(data), *map(str, arguments)]
    # Without the number of threads, torchrun says that it sets it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
        # As in tests/ranks.py: before anything else, Gloo has found another program at a port of 127.0.0.1.
        if "connectFullMesh failed" not in done.stderr:
            break
    err = re.sub(r"^.*compiling, once per machine.*\n", "", done.stderr, flags=re.M)
    assert (done.returncode, err) == (0, ""), f"{shlex.join(command)}:\n{done.stdout}"
    return done.stdout


def _numbers_of(line: str) -> list[float]:
    """Return the numbers in a line, those next to letters, such as that of recall@10, left out."""
    words = line.replace("%", " ").replace(",", " ").split()
    return [float(word) for word in words if word.replace(".", "", 1).isdecimal()]


def _losses_of(output: str) -> dict[int, float]:
    found = re.findall(r"^step (\d+) \| loss (\d+\.\d+)", output, re.M)
    assert len(found) == len(dict(found))  # one rank prints
    return {int(step): float(loss) for step, loss in found}


def _balanced_losses(lines: list[str]) -> list[float]:
    """Return the losses in lines that end with the load of the heaviest rank before and after balancing."""
    for line in lines:
        load_before, load_after = _numbers_of(line)[2:]
        assert 1 <= load_after < min(1.02, load_before)
    return [_numbers_of(line)[1] for line in lines]


def _in_one_process(data: Path, num_steps: int, max_history_length: int, accumulated: int = 1) -> dict[int, float]:
    """Return the losses by step of the model that predicts the next item, trained on unbalanced batches."""
    torch.manual_seed(0)
    model, losses = NextItem(read_manifest(data).vocabulary_sizes["item_id"]), dict[int, float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    config = LoaderConfig(batch_size=24, max_history_length=max_history_length)
    loader = build_loader(data, config, rank=0, world_size=1)
    epochs = (iter(loader) for _ in repeat(None))
    steps = (batches for epoch in epochs for batches in iter(lambda: list(islice(epoch, accumulated)), []))  # noqa: B023
    for step, batches in enumerate(islice(steps, num_steps), start=1):
        optimizer.zero_grad()
        loss = torch.stack([model(batch) for batch in batches]).sum() / sum(batch.loss_tokens for batch in batches)
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


def _check_tutorial(page: str, *outputs: str) -> None:
    """Fail unless a page shows these outputs, but for the numbers and how often a line is repeated."""

    def kinds(text: str) -> list[str]:
        return [line for line, _ in groupby(re.sub(r"\d+(?:[.,]\d+)*", "#", line) for line in text.splitlines())]

    text = (TUTORIALS / f"{page}.md").read_text()
    shown = [
        kinds(block) for block in re.findall(r'^``` \{ \.text title="Output[^"]*" \}\n(.*?)^```$', text, re.M | re.S)
    ]
    assert all(kinds(output) in shown for output in outputs), page


@pytest.mark.parametrize(
    ("library", "example", "accumulated"),
    [
        ("lightning", "lightning_fit", 1),
        ("transformers", "transformers_trainer", 1),
        ("transformers", "transformers_trainer", 2),
    ],
)
def test_a_trainer_resumes_within_an_epoch_on_another_number_of_ranks(
    small_dataset: Path, tmp_path: Path, library: str, example: str, accumulated: int
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    # Epochs have 9 batches; with two in a step, 5 steps.
    options = [
        "--log-every",
        1,
        "--checkpoints",
        tmp_path / "checkpoints",
        "--global-batch-size",
        24,
        "--save-every",
        3,
    ]
    options += ["--accumulate", accumulated] if accumulated > 1 else []
    first = _run(example, small_dataset, tmp_path, *options, "--steps", 7)
    if library == "transformers":
        (tmp_path / "checkpoints" / "checkpoint-9").mkdir()  # of a job that was killed while it saved
        shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-7")
    second = _run(example, small_dataset, tmp_path, *options, "--steps", 11, num_ranks=3)
    uninterrupted = _in_one_process(small_dataset, 11, 200, accumulated)
    assert [[*_losses_of(output)] for output in (first, second)] == [[*range(1, 8)], [*range(7, 12)]]
    for losses in (_losses_of(first), _losses_of(second)):
        assert losses == pytest.approx({step: uninterrupted[step] for step in losses}, abs=TOLERANCE)
    if accumulated == 1:
        _check_tutorial("trainers", first, second)


def test_an_epoch_is_finished_on_another_number_of_ranks(small_dataset: Path, tmp_path: Path) -> None:
    options = ["--log-every", 1, "--checkpoint", tmp_path / "checkpoint", "--global-batch-size", 24]
    first = _run("checkpoint_resume", small_dataset, tmp_path, *options, "--steps", 4)
    second = _run("checkpoint_resume", small_dataset, tmp_path, *options, num_ranks=3)
    assert [*_losses_of(first)] == [1, 2, 3, 4]
    uninterrupted = _in_one_process(small_dataset, 9, 100)
    assert _losses_of(first) | _losses_of(second) == pytest.approx(uninterrupted, abs=TOLERANCE)
    num_samples = read_manifest(small_dataset).splits["train"].rows
    ends = f"of {num_samples} samples were trained on exactly once, 0 more often"
    assert first.splitlines()[-1] == f"96 {ends}"
    resumed, *_, end = second.splitlines()
    assert (resumed, end) == ("resumed on 3 ranks; 5 of 9 steps are left", f"{num_samples} {ends}")
    _check_tutorial("checkpoint-resume", first, second)


def test_sasrec_learns_what_is_popular_with_either_attention(small_dataset: Path, tmp_path: Path) -> None:
    output = _run("ddp_sasrec", small_dataset, tmp_path, "--steps", "24", "--attention", "jagged")
    before, attentions, *steps, after = output.splitlines()
    padded, jagged = _numbers_of(attentions)
    assert 0 < padded == pytest.approx(jagged, rel=1e-4)
    # A model that knows nothing has log(1 + 128 negatives) per event.
    losses = _balanced_losses(steps)
    assert losses[-1] < 3.6 < losses[0] < math.log(129)
    # Of the last items of other users, among the first 10 of 500 items, and 100. A model whose labels are not shifted
    # has as low a loss, but recommends what a user has just had.
    assert all(value <= limit for value, limit in zip(_numbers_of(before), (0.1, 0.4), strict=True))
    assert all(value > limit for value, limit in zip(_numbers_of(after), (0.3, 0.6), strict=True))
    _check_tutorial("ddp-sasrec", output)


def test_a_job_with_its_own_dataloader_is_balanced_and_resumes_bit_for_bit(small_dataset: Path, tmp_path: Path) -> None:
    # An epoch has 7 steps: the checkpoint after step 10 is in the middle of the second.
    output = _run("own_dataloader", small_dataset, tmp_path, "--steps", "20")
    first, second, resuming, resumed, same = output.splitlines()
    assert resuming == "resuming after step 10"
    assert same == "the 10 losses after the checkpoint are the same, bit for bit"
    losses = _balanced_losses([first, second])
    assert losses[1] < losses[0] < math.log(501)
    assert losses[1] < 5.2
    assert _numbers_of(resumed)[:2] == _numbers_of(second)[:2]
    assert not list(tmp_path.iterdir())
    _check_tutorial("own-dataloader", output)


def test_a_table_sharded_by_rows_trains_on_balanced_batches_and_resumes(small_dataset: Path, tmp_path: Path) -> None:
    options = ["--log-every", 1, "--steps", 21, "--save-every", 16, "--checkpoint", tmp_path / "checkpoint"]
    output = _run("torchrec_dmp", small_dataset, tmp_path, *options)  # three epochs
    losses, untrained = _losses_of(output), 2 * math.log(2)  # of scores of 0
    assert losses[1] == pytest.approx(untrained, abs=0.1)
    assert losses[21] < 0.8 * untrained
    before, after = zip(*re.findall(r"(\d+\.\d+) before balancing, (\d+\.\d+) after", output), strict=True)
    assert float(max(after)) < 1.05 < 1.1 < float(max(before))
    num_items = read_manifest(small_dataset).vocabulary_sizes["item_id"]
    assert output.splitlines()[-1] == f"rank 0 has {-(-num_items // 2)} of the {num_items} rows of the table"
    again = _run("torchrec_dmp", small_dataset, tmp_path, *options)
    assert again.splitlines()[0] == "resumed after step 16"
    assert _losses_of(again) == {step: losses[step] for step in range(17, 22)}
    _check_tutorial("torchrec-dmp", output, again)


def test_an_own_model_learns_and_continues_from_its_checkpoint(small_dataset: Path, tmp_path: Path) -> None:
    def train(steps: int, checkpoint: str) -> tuple[dict[int, float], str]:
        output = _run("own_model", small_dataset, tmp_path, "--steps", steps, "--checkpoint", tmp_path / checkpoint)
        return _losses_of(output), output.splitlines()[-1]

    (first, _), (second, scores) = train(20, "parts"), train(40, "parts")
    assert [*first, *second] == [20, 40]
    assert second[40] < first[20] < math.log(501)
    assert train(40, "whole") == (first | second, scores)
    assert _numbers_of(scores)[0] > 0.02  # recall@10 of 500 items


def test_codes_of_the_next_item_are_learned(small_dataset: Path, tmp_path: Path) -> None:
    output = _run("train_semantic_ids", small_dataset, tmp_path, "--steps", "40")
    before, *steps, after = output.splitlines()
    losses = _balanced_losses(steps)
    assert losses[1] < losses[0] < math.log(8)  # of 8 codes, all equally likely
    assert losses[1] < 1.6
    assert _numbers_of(before)[1] < 0.15 < 0.3 < _numbers_of(after)[1]  # Recall@10 of 500 items
    _check_tutorial("semantic-ids", output)


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
    remedy = "make one with `evenrank preprocess --dataset NAME --out missing`"
    line = f"error: missing is not a dataset: no such folder; {remedy}"
    assert done.stdout.split() == ["2"] * len(paths), done.stderr
    assert [found for found in done.stderr.splitlines() if found.startswith("error")] == [line] * len(paths)
    assert "Traceback" not in done.stderr
