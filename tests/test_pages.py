import contextlib
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, SelfAttentionCost, StepMetrics
from evenrank.datasets import read_manifest
from evenrank.datasets.distributions import Uniform
from evenrank.training import FiniteCheck, LossAverage, accumulate, scale_loss
from tests.checkpoints import resuming
from tests.checkpoints.resuming import ids_of
from tests.cli.programs import EVENRANK, run_program
from tests.conftest import make_small_dataset
from tests.pages import ROOT, blocks, torchrun
from tests.ranks import RankPool

OWN_LOADER = ROOT / "docs" / "how-to" / "own-loader.md"
CHECKPOINTS = ROOT / "docs" / "how-to" / "checkpoints.md"
TRAINING = ROOT / "docs" / "how-to" / "training.md"
LIMITS = ROOT / "docs" / "explanation" / "limits.md"
NO_EXCHANGE = ROOT / "docs" / "explanation" / "balanced-step.md"

# What the reader of the tutorial has: histories, a model, and a collate function. On 2 ranks all batches are full.
MY_PROJECT = """
import torch
import torch.distributed as dist

class Histories(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return {"item_id": [(index * i) % 50 for i in range(index * 5 % 17)], "bought": float(index % 3 == 0)}

def collate(samples):
    items = [torch.tensor(sample["item_id"], dtype=torch.int64) for sample in samples]
    offsets = torch.tensor([0] + [len(row) for row in items]).cumsum(0)
    bought = torch.tensor([sample["bought"] for sample in samples])
    return {"items": torch.cat(items), "offsets": offsets, "bought": bought}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.items = torch.nn.EmbeddingBag(50, 4, mode="sum", include_last_offset=True)
        self.score = torch.nn.Linear(4, 1)
        torch.manual_seed(dist.get_rank())  # of the order of samples
    def forward(self, items, offsets, bought):
        scores = self.score(self.items(items, offsets)).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, bought, reduction="none")
"""
# DistributedDataParallel keeps the group, of which a thread can abort the end of the interpreter, with and without us.
EPILOGUE = """
torch.save(model.module.state_dict(), f"{name}-{rank}.pt")
import os
os._exit(0)
"""


def test_a_dataloader_is_balanced_by_ten_changed_lines_and_trains_the_same(tmp_path: Path) -> None:
    (diff,) = blocks(OWN_LOADER, "diff")
    removed, added = (sum(line.startswith(sign) for line in diff.splitlines()) for sign in "-+")
    assert removed <= added <= 10
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    for name, left_out in (("before", "+"), ("after", "-")):
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(left_out)]
        (tmp_path / f"{name}.py").write_text("\n".join(lines) + f"\nname = {name!r}" + EPILOGUE)
        torchrun(tmp_path, f"{name}.py")
    weights = [torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("before", "after") for rank in range(2)]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])


RESUMING = """
import os

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader
from evenrank.dataloader import ElasticLoader, ElasticSampler, JaggedCollate, dense, jagged
from evenrank.dataloader.balance import BalanceConfig, Balancer, SelfAttentionCost
from my_project import Histories

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
histories = Histories()
collate = JaggedCollate({"item_id": jagged(), "bought": dense()})
cost = SelfAttentionCost(hidden=64, heads=4, head_dim=16, layers=2, ffn_multiplier=4)
"""
REPORT = """
counts = [None] * world_size
dist.all_gather_object(counts, sum(batch.num_real for batch in loader))
print(f"{rank} {sum(counts)}\\n", end="", flush=True)  # in one piece, beside the other rank
os._exit(0)
"""


@pytest.mark.parametrize("index", [0, 1])
def test_own_samples_resume_and_are_balanced_without_an_exchange(tmp_path: Path, index: int) -> None:
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "job.py").write_text(RESUMING + blocks(OWN_LOADER)[index] + REPORT)
    assert sorted(torchrun(tmp_path, "job.py").stdout.splitlines()) == ["0 48", "1 48"]


def _names(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Return the names that the page's pieces of code refer to."""
    own = {"config": LoaderConfig(batch_size=12), "cost": resuming.COST, "model": resuming.Model(), "path": path}
    known = (BalanceConfig, Balancer, build_loader, fully_shard, init_device_mesh)
    return {**own, "rank": rank, "world_size": world_size, "dist": dist, **{each.__name__: each for each in known}}


def _run_on_meshes(rank: int, world_size: int, path: Path) -> list[list[int]]:
    """Run both pieces of code on meshes; return the samples of an epoch with each."""
    warnings.simplefilter("ignore")
    seen: list[list[int]] = []
    for code in blocks(OWN_LOADER)[2:4]:
        names = _names(path, rank, world_size)
        exec(code, names)
        seen.append([])
        with names["balancer"] as balancer:
            for batch in balancer:
                if "replicate" in code:
                    names["model"](batch).backward()
                seen[-1] += ids_of(batch)
    return seen


def _check_each_trained_once(parts: Iterable[list[int]], path: Path) -> None:
    ids = [sample for part in parts for sample in part]
    assert len(ids) == len(set(ids)) == read_manifest(path).splits["train"].rows


def test_the_meshes_of_the_page_train_each_sample_once(ranks: RankPool, small_dataset: Path) -> None:
    tensor_parallel, hybrid = zip(*ranks.run(4, _run_on_meshes, small_dataset), strict=True)
    assert tensor_parallel[::2] == tensor_parallel[1::2]
    for parts in (tensor_parallel[::2], hybrid):
        _check_each_trained_once(parts, small_dataset)


def _model_and_adam() -> tuple[resuming.Model, torch.optim.Adam]:
    torch.manual_seed(0)  # the same on both ranks
    model = resuming.Model()
    return model, torch.optim.Adam(model.parameters())


def _save_and_load(rank: int, world_size: int, path: Path, folder: Path) -> tuple[list[int], list[int]]:
    """Save a job by the code of the page, and load it into a new one, which has never stepped; return the samples."""
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    recipe, code = blocks(CHECKPOINTS)[:2]
    names = _names(path, rank, world_size) | {"dcp": dcp, "folder": folder}
    exec(recipe, names)
    job, save, load = code.splitlines()
    model, adam = _model_and_adam()

    def step(batch: Any) -> None:
        torch.stack([weight.square().sum() for weight in model.parameters()]).sum().backward()  # on both ranks the same
        adam.step()

    with resuming.balance(path, rank, world_size) as balancer:
        steps = iter(balancer)
        trained = resuming.train(steps, step, 3)
        exec(f"{job}\n{save}", names | {"model": model, "optimizer": adam, "loader": balancer})
        steps.close()  # type: ignore[attr-defined]
    new_model, new_adam = _model_and_adam()
    with resuming.balance(path, rank, world_size) as balancer:
        exec(f"{job}\n{load}", names | {"model": new_model, "optimizer": new_adam, "loader": balancer})
        rest = [sample for batch in balancer for sample in ids_of(batch)]
    torch.testing.assert_close(new_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert adam.state_dict()["state"]
    torch.testing.assert_close(new_adam.state_dict()["state"], adam.state_dict()["state"], rtol=0, atol=0)
    return trained, rest


def test_the_checkpoint_of_the_page_has_each_sample_once(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    trained, rest = zip(*ranks.run(2, _save_and_load, small_dataset, tmp_path), strict=True)
    _check_each_trained_once((*trained, *rest), small_dataset)


def test_the_nodes_of_the_page_compose(small_dataset: Path) -> None:
    from torchdata.nodes import Loader, Mapper, Prefetcher

    trained: list[Any] = []
    names = _names(small_dataset, 0, 1) | {"Loader": Loader, "Mapper": Mapper, "Prefetcher": Prefetcher}
    exec(blocks(OWN_LOADER)[4], names | {"augment": lambda batch: batch, "train": trained.append})
    expected = build_loader(small_dataset, LoaderConfig(batch_size=12), rank=0, world_size=1)
    assert [sorted(ids_of(batch)) for batch in trained] == [sorted(ids_of(batch)) for batch in expected]


def _train_with_no_exchange(rank: int, world_size: int, path: Path) -> list[int]:
    trained: list[int] = []

    def model(batch: Any) -> torch.Tensor:
        trained.extend(ids_of(batch))
        return torch.ones((), requires_grad=True)

    names = _names(path, rank, world_size) | {"BalanceConfig": BalanceConfig, "scale_loss": scale_loss}
    steps: list[StepMetrics] = []
    exec(blocks(NO_EXCHANGE)[0], names | {"device": "cpu", "log_step": steps.append, "model": model})
    assert all(step.ratio_after <= step.ratio_before for step in steps)
    return trained


def test_the_loop_with_no_exchange_trains_each_sample_once(ranks: RankPool, small_dataset: Path) -> None:
    _check_each_trained_once(ranks.run(2, _train_with_no_exchange, small_dataset), small_dataset)


COST = SelfAttentionCost(hidden=64, heads=4, head_dim=16, layers=2, ffn_multiplier=4)
CONFIG = LoaderConfig(batch_size=4, max_history_length=20, max_num_candidates=1)
DATA = RandomData(lengths=Uniform(low=2, high=20), num_real=Uniform(low=0, high=4))
NUM_BATCHES = 6


class _Model(torch.nn.Module):
    """Its first task has the number of items as its loss, its second twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, batch: SequenceBatch) -> Tensor:
        return self.weight * len(batch.features["item_id"].values())


def _train(rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]
    model = DistributedDataParallel(_Model(), process_group=dp.get_group())
    loader = RandomBatches(CONFIG, DATA, num_batches=NUM_BATCHES, rank=dp.get_local_rank(), world_size=2)
    printed: list[Any] = []
    with Balancer(loader, BalanceConfig(cost=COST), group=dp) as balancer:
        known = (FiniteCheck, LossAverage, accumulate, contextlib, scale_loss)
        names = {each.__name__: each for each in known} | {"loader": balancer, "device": "cpu", "mesh": mesh}
        names |= {"model": model, "num_tasks": 2, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
        section = TRAINING.read_text().split("\n## Losses\n")[1].split("\n## ")[0]
        (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
        exec(code, names | {"print": printed.append})
    return printed


def test_the_loop_prints_the_mean_loss_of_each_task_over_all_batches(ranks: RankPool) -> None:
    num_items, num_tokens = 0, 0
    for rank in range(2):
        for batch in RandomBatches(CONFIG, DATA, num_batches=NUM_BATCHES, rank=rank, world_size=2):
            num_items += len(batch.features["item_id"].values())
            num_tokens += batch.loss_tokens
    for printed in ranks.run(4, _train):
        assert printed == [[pytest.approx(num_items / num_tokens), pytest.approx(2 * num_items / num_tokens)]]


def test_the_page_on_limits_shows_what_simulate_prints(tmp_path: Path) -> None:
    run = run_program(EVENRANK, *blocks(LIMITS, "bash")[0].split()[1:], cwd=tmp_path)
    shown = blocks(LIMITS, "text")[0]
    assert " ".join(shown.split()) in " ".join(run.stdout.split())


README_PRELUDE = """
import evenrank.training

def scale_recorded(loss, batch, scale_loss=evenrank.training.scale_loss):
    seen.extend(batch.sample_ids[: batch.num_real].tolist())
    return scale_loss(loss, batch)

seen = []
evenrank.training.scale_loss = scale_recorded
"""
README_EPILOGUE = """
import json
import warnings
if rank == 0:
    warnings.warn("warning of the job")
    torch.fx._symbolic_trace.log.warning("warning of PyTorch")
with open(f"rank-{rank}", "w") as file:
    json.dump(seen, file)
"""


def test_the_program_of_the_readme_trains_on_every_sample_once_and_prints_its_gain(tmp_path: Path) -> None:
    (program,) = blocks(ROOT / "README.md")
    assert len([line for line in program.splitlines() if line.strip()]) <= 26
    path = make_small_dataset(tmp_path / "out" / "demo" / "data", seed=0)
    (tmp_path / "train.py").write_text(README_PRELUDE + program + README_EPILOGUE)
    run = torchrun(tmp_path, "train.py")
    before, after = map(float, re.findall(r"[\d.]+(?=%)", run.stdout))
    assert before > 5 > after
    shown = re.search("prints `(.*?)`", (ROOT / "README.md").read_text())
    assert shown
    assert re.sub(r"\d+\.\d", "#", shown[1]) == re.sub(r"\d+\.\d", "#", run.stdout.strip())
    # What the job warns of at its end is shown, and nothing else.
    warned = run.stderr.splitlines()
    assert [line.rpartition(": ")[2] for line in warned[:1]] == ["warning of the job"]
    assert warned[1:2] == ['  warnings.warn("warning of the job")']
    assert [line.rpartition("] ")[2] for line in warned[2:]] == ["warning of PyTorch"]
    parts = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert all(parts)
    _check_each_trained_once(parts, path)
