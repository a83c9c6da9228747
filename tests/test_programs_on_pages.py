"""The programs and commands of the pages, and what they print."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import StateError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import MeasuredCost
from evenrank.dataloader.balance.metrics.log import read_json_lines
from evenrank.datasets import read_manifest
from tests.cli.programs import printed as evenrank
from tests.conftest import make_small_dataset
from tests.pages import blocks, code_of, commands, page, run_program, section, torchrun
from tests.ranks import RankPool

OWN_LOADER = page("how-to/own-loader.md")


def _without_numbers(text: str) -> list[str]:
    """Return the lines with their words, and a # for each number."""
    lines = (" ".join(re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", line).split()) for line in text.splitlines())
    return [line for line in lines if line and "\N{BOX DRAWINGS LIGHT HORIZONTAL}" not in line]


# The program of the page on a small dataset, and around it what records its samples, and warns when it has trained.
RECORD = """
import evenrank.training

def scale_recorded(loss, batch, scale_loss=evenrank.training.scale_loss):
    seen.extend(batch.sample_ids[: batch.num_real].tolist())
    return scale_loss(loss, batch)

seen = []
evenrank.training.scale_loss = scale_recorded
"""
REPORT = """
import json
import warnings
if rank == 0:
    warnings.warn("warning of the job")
    torch.fx._symbolic_trace.log.warning("warning of PyTorch")
with open(f"rank-{rank}", "w") as file:
    json.dump(seen, file)
"""


def test_the_program_to_start_from_trains_every_sample_once_and_prints_its_gain(tmp_path: Path) -> None:
    text = section(page("start.md"), "In your own training loop")
    (program,) = code_of(text)
    assert len([line for line in program.splitlines() if line.strip()]) <= 26
    path = make_small_dataset(tmp_path / "out" / "demo" / "data", seed=0)
    (tmp_path / "train.py").write_text(RECORD + program + REPORT)
    run = torchrun(tmp_path, "train.py")
    before, after = map(float, re.findall(r"[\d.]+(?=%)", run.stdout))
    assert before > 5 > after
    (shown,) = re.findall("prints `(.*?)`", text)
    assert _without_numbers(shown) == _without_numbers(run.stdout)
    # What the job warns of at its end is shown, and nothing else.
    shown_warnings = r'.*: warning of the job\n  warnings.warn\("warning of the job"\)\n.*] warning of PyTorch\n'
    assert re.fullmatch(shown_warnings, run.stderr), run.stderr
    parts = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert all(parts)
    ids = [sample for part in parts for sample in part]
    assert len(ids) == len(set(ids)) == read_manifest(path).splits["train"].rows


# What the reader has: histories, a model, and a collate function. On 2 ranks all batches are full.
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


def test_a_dataloader_is_balanced_by_ten_changed_lines_and_trains_the_same(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (diff,) = blocks(OWN_LOADER, "diff")
    removed, added = (sum(line.startswith(sign) for line in diff.splitlines()) for sign in "-+")
    assert removed <= added <= 10
    for name, left_out in (("before", "+"), ("after", "-")):
        program = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(left_out))
        program += f"\ntorch.save(model.module.state_dict(), f'{name}-{{rank}}.pt')"
        ranks.run(2, run_program, tmp_path, program)
    weights = [torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("before", "after") for rank in range(2)]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])


NAMES = """
import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader
from evenrank.dataloader import ElasticLoader, ElasticSampler, JaggedCollate, LoaderConfig, dense, jagged
from evenrank.dataloader.balance import BalanceConfig, Balancer, SelfAttentionCost
from my_project import Histories

rank, world_size = dist.get_rank(), dist.get_world_size()
histories = Histories()
collate = JaggedCollate({"item_id": jagged(), "bought": dense()})
cost = SelfAttentionCost(hidden=64, heads=4, head_dim=16, layers=2, ffn_multiplier=4)
"""
COUNT = "print(sum(batch.num_real for batch in loader))"
IDS = "print([id for batch in balancer for id in batch.sample_ids[: batch.num_real].tolist()])"


def test_own_samples_are_balanced_with_and_without_an_exchange_and_peers_on_a_mesh_get_the_same(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    *balanced, on_mesh = (code.replace("workers=2", "workers=0") for code in blocks(OWN_LOADER)[:3])
    for code in balanced:
        counts = [int(text) for text in ranks.run(2, run_program, tmp_path, NAMES + code + COUNT)]
        assert sum(counts) == 48
        assert min(counts) > 12
    names = f"{NAMES}\npath, config = {str(small_dataset)!r}, LoaderConfig(batch_size=12)\n"
    ids = [ast.literal_eval(text) for text in ranks.run(4, run_program, tmp_path, names + on_mesh + IDS)]
    assert ids[::2] == ids[1::2]  # of tensor-parallel peers
    assert sorted(ids[0] + ids[2]) == sorted({*ids[0], *ids[2]})
    assert len(ids[0] + ids[2]) == read_manifest(small_dataset).splits["train"].rows


DAYS = ("2026-03-02", "2026-03-03")
RETRAINED = """
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
    rows = [
        (f"c{customer}", f"p{rng.integers(50 + 20 * day)}", 1_772_409_600 + 86_400 * day + rng.integers(86_400), 1)
        for customer in rng.choice(200 + 100 * day, size=150, replace=False)
        for _ in range(rng.integers(1, 20))
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["customer,product,time,bought", *(",".join(map(str, row)) for row in rows)]))


def test_a_day_continues_the_one_before_with_larger_tables(ranks: RankPool, here: Path) -> None:
    text = section(page("how-to/continuous-logs.md"), "A dataset per day")
    for number, day in enumerate(DAYS):
        _write_log(here / "logs" / f"{day}.csv", number)
    (here / "shop.toml").write_text(code_of(text, "toml")[0])
    (here / "my_project.py").write_text(RETRAINED)
    for words in map(shlex.split, commands(text)):
        if words[0] == "evenrank":
            evenrank(*words[1:])
        else:
            ranks.run(2, run_program, here, code_of(text)[0], words[4:])
    first, second = (torch.load(here / "out" / f"{day}.pt", weights_only=True) for day in DAYS)
    old, new = (read_manifest(here / "out" / day).vocabulary_sizes["item_id"] for day in DAYS)
    assert old < new
    assert [len(saved["model"]["items.weight"]) for saved in (first, second)] == [old, new]
    moments = second["optimizer"]["state"][1]  # of the table
    assert len(moments["exp_avg"]) == new
    assert moments["step"] > first["optimizer"]["state"][1]["step"]
    assert (first["loader"]["epoch"], second["loader"]["epoch"]) == (0, 1)
    # The days trade places: ids of the second dataset are not those of the first one.
    loader: Any = build_loader(here / "out" / DAYS[0], LoaderConfig(batch_size=8), rank=0, world_size=1)
    with pytest.raises(StateError, match="vocabulary"):
        loader.begin_after(second["loader"])


# It sleeps in place of computing, as the page says. Nothing here depends on how long it takes.
SLEEPER = """
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
        time.sleep((4e-3 + 20e-6 * events) * self.rng.normal(1, 0.05))
        return self.weight * batch.loss_tokens
"""


def test_the_walk_through_a_gain_prints_what_the_page_shows(ranks: RankPool, here: Path) -> None:
    path, printed = page("how-to/gain.md"), ""
    (here / "my_project.py").write_text(SLEEPER)
    shown = iter(blocks(path, "text"))
    for block in blocks(path, "bash"):
        for words in map(shlex.split, block.replace("--users 3000", "--users 1000").splitlines()):
            if words[0] == "evenrank":
                printed = evenrank(*words[1:])
            else:
                ranks.run(2, run_program, here, blocks(path)[0], words[4:])
        lines = iter(_without_numbers(printed))
        for line in _without_numbers(next(shown)) if "preprocess" not in block else ():
            assert line in lines, f"{line!r} is not in {printed}, in this order"
    assert next(shown, None) is None
    recorded, balanced = (read_json_lines(here / "out" / f"{name}.jsonl") for name in ("record", "balanced"))
    for log, strategy in ((recorded, "none"), (balanced, "lpt-swap")):
        times = [record.compute_seconds for record in log.records]
        assert [of_ranks is not None and len(of_ranks) for of_ranks in times] == [False, *[2] * (len(times) - 1)]
        assert log.run is not None
        assert log.run.options["strategy"] == strategy
    assert balanced.run is not None
    assert str(MeasuredCost.load(here / "out" / "cost.json")) == balanced.run.options["cost"]
    for before, after in zip(recorded.records, balanced.records, strict=True):
        assert before.before.tolist() == before.after.tolist()
        assert before.rank_tokens.sum() == after.rank_tokens.sum()
        assert after.ratio_after <= after.ratio_before


def test_tables_of_predictions_are_those_of_simulate() -> None:
    path = page("explanation/limits.md")
    printed = evenrank(*shlex.split(blocks(path, "bash")[0])[1:])
    assert " ".join(blocks(path, "text")[0].split()) in " ".join(printed.split())
    text = page("explanation/fits-my-model.md").read_text()
    ((source, ranks),) = re.findall(r"\| `evenrank simulate (\S+) --ranks (\d+)`", text)
    rows = re.findall(r"^\| `--cost (\S+)(?: --window (\d+))?` \| (\S+) \| (\S+) \| (\S+)x \|$", text, re.M)
    assert len(rows) == 4
    for cost, window, *shown in rows:
        options = ("--ranks", ranks, "--cost", cost, "--window", window or 1, "--strategy", "lpt-swap")
        printed = evenrank("simulate", source, *options)
        assert re.findall(rf"^ +{ranks}  \S+ +(\S+) +(\S+) +(\S+)x", printed, re.M) == [tuple(shown)]


# What each tool says of the variables of its piece of code: user and raw item of each event.
TOOLS = {
    "polars": 'events.select("user_id", "value").rows()',
    "pandas": 'events[["user_id", "value"]].values.tolist()',
    "duckdb": "events.fetchall()",
}
EVENTS = [(1, "red"), (1, "blue"), (2, "red"), (2, "green"), (1, "red")]


def test_other_tools_read_the_rows_and_get_back_raw_ids_by_one_join(here: Path) -> None:
    lines = ["user_id,item_id,time", *(f"{user},{item},{time}" for time, (user, item) in enumerate(EVENTS))]
    (here / "log.csv").write_text("\n".join(lines))
    columns = "--user-column user_id --item-column item_id --timestamp-column time --allow-empty"
    evenrank(*f"preprocess --dataset custom --events log.csv {columns} --split none --out out/mine".split())
    pieces = [code for path in page("reference").glob("*.md") for code in blocks(path)]
    for tool, events in TOOLS.items():
        (piece,) = (each for each in pieces if each.startswith(f"import {tool}"))
        names: dict[str, Any] = {}
        exec(piece, names)
        assert sorted(map(tuple, eval(events, names))) == sorted(EVENTS)
        assert len(names["rows"]) == 2
