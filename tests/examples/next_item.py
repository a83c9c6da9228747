"""Running the one-file examples as their users do, and the losses that they must print."""

import importlib
import re
import subprocess
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import pytest
import torch

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import read_manifest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Losses are printed with 4 digits. A mean over each rank's tokens instead of all of them differs by 2e-4 and more.
TOLERANCE = 1e-4


def run(name: str, num_ranks: int, data: Path, *arguments: object) -> str:
    """Return what an example prints on so many ranks; it must succeed, and write nothing to standard error."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", str(num_ranks)]
    command = [*torchrun, str(EXAMPLES / f"{name}.py"), "--data", str(data), "--log-every", "1", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    # What PyTorch logs about a function of its own that TorchRec calls.
    assert [line for line in done.stderr.splitlines() if "is_fx_tracing will return true" not in line] == []
    return done.stdout


def losses_of(output: str) -> dict[int, float]:
    """Return the printed losses by step."""
    found = re.findall(r"^step (\d+) \| loss (\d+\.\d+)", output, re.M)
    assert len(found) == len(dict(found))  # one rank prints
    return {int(step): float(loss) for step, loss in found}


def losses_in_one_process(name: str, data: Path, num_steps: int, config: LoaderConfig) -> dict[int, float]:
    """Return the losses by step of an example's model, trained on unbalanced batches as large as those of all ranks."""
    torch.manual_seed(0)
    model = importlib.import_module(name).NextItem(read_manifest(data).vocabulary_sizes["item_id"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = {}
    batches = chain.from_iterable(repeat(build_loader(data, config, rank=0, world_size=1)))
    for step, batch in enumerate(islice(batches, num_steps), start=1):
        optimizer.zero_grad()
        loss = model(batch) / batch.loss_tokens
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


def check_error_without_data(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that an example says in one line that there is no dataset."""
    missing = folder / "missing"
    example = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, "--data", str(missing)])
        with pytest.raises(SystemExit) as caught:
            example.main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {missing} is not a dataset: no such folder; make one with `evenrank preprocess")
