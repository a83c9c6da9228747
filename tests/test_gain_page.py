"""The page "What it will gain, and what it gained": its commands in their order, and what they print.

The job sleeps in place of computing, as the page says. Nothing here depends on how long it takes.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenrank.cli.reports.simulation import open_source, simulate
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, LinearCost, MeasuredCost, StepMetrics, summarize
from evenrank.dataloader.balance.metrics.log import BalanceLog, read_json_lines
from evenrank.training import StepTimer, scale_loss
from tests.pages import ROOT, blocks, torchrun
from tests.ranks import RankPool

GAIN = ROOT / "docs" / "how-to" / "gain.md"
MY_PROJECT = """
import time
import numpy as np
import torch
import torch.distributed as dist

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rng = np.random.default_rng(dist.get_rank())
    def forward(self, batch):
        events = len(batch.features["item_id"].values())
        time.sleep((20e-3 + 100e-6 * events) * self.rng.normal(1, 0.05))
        return self.weight * batch.loss_tokens
"""


def _without_numbers(text: str) -> list[str]:
    """Return the lines with their words, and a # for each number."""
    return [" ".join(re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", line).split()) for line in text.splitlines() if line.strip()]


def _check_shown(printed: str, shown: str) -> None:
    """Check that the lines of the page are among those printed, in their order, whatever the numbers."""
    lines = iter(_without_numbers(printed))
    for line in _without_numbers(shown):
        if "\N{BOX DRAWINGS LIGHT HORIZONTAL}" not in line:
            assert line in lines, f"{line!r} is not in {printed}"


def _is_measured(log: BalanceLog) -> bool:
    """Return whether each step but the first has a time of both ranks."""
    times = [record.compute_seconds for record in log.records]
    return times[0] is None and all(of_ranks is not None and len(of_ranks) == 2 for of_ranks in times[1:])


def test_the_walkthrough_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "train.py").write_text(blocks(GAIN)[0])
    shown = iter(blocks(GAIN, "text"))
    for block in blocks(GAIN, "bash"):
        printed = ""
        for command in block.splitlines():
            words = shlex.split(command.replace("--users 3000", "--users 1000"))
            if words[0] == "torchrun":
                torchrun(tmp_path, *words[3:])
            else:
                run = [sys.executable, "-m", words[0], *words[1:]]
                printed = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        if "preprocess" not in block:
            _check_shown(printed, next(shown))
    assert next(shown, None) is None

    cost = MeasuredCost.load(tmp_path / "out" / "cost.json")
    assert cost.of_tokens(torch.tensor([100]).numpy(), torch.tensor([0]).numpy())[0] > 0
    recorded, balanced = (read_json_lines(tmp_path / "out" / f"{name}.jsonl") for name in ("record", "balanced"))
    assert _is_measured(recorded)
    assert _is_measured(balanced)
    assert recorded.run is not None
    assert balanced.run is not None
    assert recorded.run.id != balanced.run.id
    assert [log.run.options["strategy"] for log in (recorded, balanced) if log.run] == ["none", "lpt-swap"]
    assert str(cost) == balanced.run.options["cost"]
    for before, after in zip(recorded.records, balanced.records, strict=True):
        assert before.before.tolist() == before.after.tolist()
        assert before.rank_tokens.sum() == after.rank_tokens.sum()
        assert after.ratio_after <= after.ratio_before


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.weight * batch.loss_tokens
        return loss


def _train_with_own_collectives(rank: int, world_size: int, path: Path) -> list[StepMetrics]:
    measured: list[StepMetrics] = []
    known = (BalanceConfig, StepTimer, build_loader, scale_loss)
    names: dict[str, Any] = {each.__name__: each for each in known} | {"dist": dist, "device": "cpu", "path": path}
    names |= {"cost": LinearCost(interleave_actions=False), "config": LoaderConfig(batch_size=8)}
    names |= {"rank": rank, "world_size": world_size, "writers": [measured.append] if rank == 0 else []}
    model = _Model()
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    exec(blocks(GAIN)[1].replace("compare_every=100", "compare_every=2"), names)
    return measured


def test_a_loop_with_own_collectives_measures_balanced_and_unbalanced_steps(
    ranks: RankPool, small_dataset: Path
) -> None:
    measured, none = ranks.run(2, _train_with_own_collectives, small_dataset)
    assert none == []
    assert [step.is_balanced for step in measured] == [number % 2 == 0 for number in range(len(measured))]
    summary = summarize(measured)
    assert summary.measured_steps == summary.steps - 1  # the first step has no time
    assert summary.compared_steps == len(measured) - summary.steps
    assert summary.measured_speedup == summary.compared_step_seconds / summary.step_seconds > 0
    for step in measured:
        if not step.is_balanced:
            assert step.before.tolist() == step.after.tolist()


def _fit_while_training(rank: int, world_size: int, path: Path, out: Path) -> list[StepMetrics]:
    measured: list[StepMetrics] = []
    known = (BalanceConfig, StepTimer, build_loader, scale_loss)
    names: dict[str, Any] = {each.__name__: each for each in known} | {"device": "cpu", "path": path}
    names |= {"cost": LinearCost(interleave_actions=False), "config": LoaderConfig(batch_size=2)}
    names |= {"rank": rank, "world_size": world_size, "writers": [measured.append] if rank == 0 else []}
    model = DistributedDataParallel(_Model())
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    exec(blocks(GAIN)[3].replace("refit_every=200", "refit_every=20").replace('"out/cost', f'"{out}/cost'), names)
    fitted = names["timer"].cost
    assert rank > 0 or fitted == (MeasuredCost.load(out / "cost.json") if fitted else None)
    return measured


def test_a_job_fits_its_cost_while_it_trains(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    measured, none = ranks.run(2, _fit_while_training, small_dataset, tmp_path)
    assert none == []
    assert summarize(measured).measured_steps == len(measured) - 1 > 40


def test_the_writers_of_the_page_take_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names_logged: list[str] = []
    run = SimpleNamespace(log=names_logged.extend)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: run))
    names: dict[str, Any] = {}
    exec(blocks(GAIN)[2], names)
    source = open_source("uniform:low=1,high=60", "train", 60)
    balance = BalanceConfig(cost=LinearCost(interleave_actions=False))
    for step in simulate(source, balance, 2, batch_size=4, steps=100):
        for writer in names["writers"]:
            writer(step)
    for writer in names["writers"]:
        writer.close()
    assert len(read_json_lines(Path("out/balance.jsonl")).records) == 1
    assert next(Path("out/tensorboard").iterdir()).stat().st_size > 0
    assert {"balance/idle_after", "balance/step"} <= set(names_logged)
