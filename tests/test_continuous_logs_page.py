"""The page "Continuous logs": its program, while files are added, killed and resumed."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.datasets.logs import add_file, end_log
from tests.pages import ROOT, blocks, torchrun

PAGE = ROOT / "docs" / "how-to" / "continuous-logs.md"
# Its checkpoints have how often each record was trained, on all ranks.
MY_PROJECT = """
import torch
import torch.distributed as dist

class Model(torch.nn.Module):
    def __init__(self, num_items):
        super().__init__()
        torch.manual_seed(0)
        self.items = torch.nn.Embedding(num_items, 4)
        self.register_buffer("trained", torch.zeros(1000, dtype=torch.int64))
    def forward(self, batch):
        ids = torch.bincount(batch.sample_ids[: batch.num_real], minlength=1000)
        dist.all_reduce(ids)
        self.trained += ids
        return self.items(batch.features["item_id"].values()).square().sum()
"""


def test_a_job_that_is_killed_while_files_are_added_trains_each_record_once(tmp_path: Path) -> None:
    (program,) = blocks(PAGE)
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "follow.py").write_text(program)
    log = tmp_path / "log"
    for number in range(20):
        add_file(log, f"{number:05}.parquet", range(number * 10, number * 10 + 10))
    alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-P", "follow.py", "log", "saved.pt"]
    environment = {**alone, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "saved after record 20\n"
        job.kill()
    for number in range(20, 30):
        add_file(log, f"{number:05}.parquet", range(number * 10, number * 10 + 10))
    end_log(log)
    assert torchrun(tmp_path, "follow.py", "log", "saved.pt").stdout.endswith("saved after record 300\n")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert saved["loader"]["position"] == 300
    assert saved["model"]["trained"].tolist() == [1] * 300 + [0] * 700
