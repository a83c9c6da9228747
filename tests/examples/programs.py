"""Runs an example as its reader does, on processes of torchrun, and says what it must print."""

import os
import re
import shlex
import signal
import subprocess
import sys
from itertools import groupby, islice, repeat
from pathlib import Path
from subprocess import PIPE, TimeoutExpired

import pytest
import torch

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import read_manifest
from next_item import NextItem

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TUTORIALS = ROOT / "docs" / "tutorials"
# Losses are printed with 4 digits. A mean over each rank's tokens instead of all of them differs by 2e-4 and more.
TOLERANCE = 1e-4
_OUTPUT = re.compile(r'^``` \{ \.text title="Output[^"]*" \}\n(.*?)^```$', re.M | re.S)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def run(example: str, data: Path, cwd: Path, *arguments: object, num_ranks: int = 2) -> str:
    """Return what an example prints; it must succeed, and write nothing to standard error."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", str(num_ranks)]
    return run_command([*torchrun, str(EXAMPLES / f"{example}.py"), "--data", str(data), *map(str, arguments)], cwd)


def run_command(command: list[str], cwd: Path) -> str:
    """Return what a command prints; it must succeed in 280 seconds, and write nothing to standard error."""
    # Without the number of threads, torchrun says that it sets it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    for _ in range(2):
        with subprocess.Popen(command, cwd=cwd, env=environment, stdout=PIPE, stderr=PIPE, text=True) as process:
            try:
                out, err = process.communicate(timeout=280)
            except TimeoutExpired:
                ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                for pid in (*map(int, ranks), process.pid):
                    os.kill(pid, signal.SIGABRT)  # it says where it hangs
                out, err = process.communicate()
        # As in tests/ranks.py: before anything else, Gloo has found another program at a port of 127.0.0.1.
        if "connectFullMesh failed" not in err:
            break
    err = re.sub(r"^.*compiling, once per machine.*\n", "", err, flags=re.M)
    if process.returncode or err:
        pytest.fail(f"{shlex.join(command)} exits with {process.returncode}:\n{out}\n{err}")
    return out


def numbers_of(line: str) -> list[float]:
    """Return the numbers in a line, those next to letters, such as that of recall@10, left out."""
    words = line.replace("%", " ").replace(",", " ").split()
    return [float(word) for word in words if word.replace(".", "", 1).isdecimal()]


def losses_of(output: str) -> dict[int, float]:
    found = re.findall(r"^step (\d+) \| loss (\d+\.\d+)", output, re.M)
    assert len(found) == len(dict(found))  # one rank prints
    return {int(step): float(loss) for step, loss in found}


def losses_in_one_process(
    data: Path, num_steps: int, config: LoaderConfig, *, accumulated: int = 1
) -> dict[int, float]:
    """Return the losses by step of the model that predicts the next item, trained on unbalanced batches."""
    torch.manual_seed(0)
    model = NextItem(read_manifest(data).vocabulary_sizes["item_id"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses: dict[int, float] = {}
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


def check_tutorial(page: str, *outputs: str) -> None:
    """Fail unless a page shows these outputs, but for the numbers and how often a line is repeated."""
    shown = _OUTPUT.findall((TUTORIALS / f"{page}.md").read_text())
    kinds = [_kinds_of_lines(block) for block in shown]
    assert all(_kinds_of_lines(output) in kinds for output in outputs), page


def _kinds_of_lines(text: str) -> list[str]:
    return [line for line, _ in groupby(_NUMBER.sub("#", line) for line in text.splitlines())]
