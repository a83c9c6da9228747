"""The page "Production retraining": its commands, on the logs of two days, and what they leave."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import StateError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import read_manifest
from tests.pages import ROOT, blocks, torchrun

PAGE = ROOT / "docs" / "how-to" / "retraining.md"
DAYS = ("2026-03-02", "2026-03-03")
MY_PROJECT = """
import torch

class Model(torch.nn.Module):
    def __init__(self, num_items):
        super().__init__()
        torch.manual_seed(0)
        self.items = torch.nn.Embedding(num_items, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))
    def forward(self, batch):
        return (self.items(batch.features["item_id"].values()) * self.scale).square().sum()
"""


def _write_log(path: Path, day: int) -> None:
    """Write a day of events; the second day has customers and products that the first one lacks."""
    rng = np.random.default_rng(day)
    with path.open("w", newline="") as file:
        log = csv.writer(file)
        log.writerow(["customer", "product", "time", "bought"])
        for customer in rng.choice(200 + 100 * day, size=150, replace=False):
            for _ in range(rng.integers(1, 20)):
                time = 1_772_409_600 + 86_400 * day + rng.integers(86_400)
                log.writerow([f"c{customer}", f"p{rng.integers(50 + 20 * day)}", time, rng.integers(2)])


def _run(command: str, folder: Path) -> str:
    """Run a command of the page in a folder, and return what it prints."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        return torchrun(folder, *words[3:]).stdout
    run = [sys.executable, "-m", *words]
    return subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True).stdout


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def test_a_day_continues_the_one_before_and_trains_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    for number, day in enumerate(DAYS):
        _write_log(tmp_path / "logs" / f"{day}.csv", number)
    (settings,) = blocks(PAGE, "toml")
    program, check = blocks(PAGE)
    for name, text in (("shop.toml", settings), ("my_project.py", MY_PROJECT), ("retrain.py", program)):
        (tmp_path / name).write_text(text)
    commands = "".join(blocks(PAGE, "bash")).replace("\\\n", " ").splitlines()
    printed = [_run(command, tmp_path) for command in commands]
    for line in blocks(PAGE, "text")[0].splitlines():
        assert re.sub(r"\d+", "#", line) in re.sub(r"\d[\d,]*", "#", printed[2])

    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    first, second = (_load(out / f"{day}.pt") for day in DAYS)
    old, new = (read_manifest(out / day).vocabulary_sizes["item_id"] for day in DAYS)
    assert old < new
    assert [len(saved["model"]["items.weight"]) for saved in (first, second)] == [old, new]
    moments = second["optimizer"]["state"][1]
    assert len(moments["exp_avg"]) == new  # of the table, the second parameter
    assert moments["step"] > first["optimizer"]["state"][1]["step"]
    assert (first["loader"]["epoch"], second["loader"]["epoch"]) == (0, 1)
    with pytest.raises(AssertionError):  # a third of the products are new
        exec(check.replace("0.2", "0.1"), {"read_manifest": read_manifest})

    # The days trade places: ids of the second dataset are not those of the first one.
    loader = build_loader(out / DAYS[0], LoaderConfig(batch_size=8), rank=0, world_size=1)
    with pytest.raises(StateError, match="vocabulary"):
        loader.begin_after(second["loader"])

    (options,) = re.findall(r"`LoaderConfig\((split=.*?)\)`", PAGE.read_text())
    config = eval(f"LoaderConfig(batch_size=8, {options})", {"LoaderConfig": LoaderConfig})
    batches: Any = build_loader(out / f"to-{DAYS[1]}", config, rank=0, world_size=1)
    num_candidates = sum(len(batch.labels["label"].values()) for batch in batches)
    assert num_candidates == len((tmp_path / "logs" / f"{DAYS[1]}.csv").read_text().splitlines()) - 1
