"""The page "Replaying requests": its program, on a small dataset."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "requests.md"
MY_PROJECT = """
import torch

class Model(torch.nn.Module):
    def forward(self, batch):
        return torch.zeros(len(batch.labels.values()))
"""


def test_the_program_of_the_page_replays_what_its_command_has_written(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    (command,), (program,) = blocks(PAGE, "bash"), blocks(PAGE)
    command = command.replace("ml-latest-small", "synthetic --users 50").replace(
        "evenrank", f"{sys.executable} -m evenrank"
    )
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "evaluate.py").write_text(program)
    run = [sys.executable, "evaluate.py"]
    printed = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"p50 \d+\.\d ms, p99 \d+\.\d ms, lag \d+\.\d s\n", printed)
