"""The README's own code, run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

ROOT = Path(__file__).resolve().parent.parent

# What a reader has already: a device, a model, an optimizer.
PRELUDE = """
import torch
device = torch.device("cpu")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(60_000, 1)
    def forward(self, batch):
        self.seen = getattr(self, "seen", 0) + batch.num_real
        return self.embedding(batch.features["item_id"].values()).sum()
model = Model()
optimizer = torch.optim.SGD(model.parameters())
"""
EPILOGUE = """
import warnings
if dist.get_rank() == 0:
    warnings.warn("warning of the job")
    torch.fx._symbolic_trace.log.warning("warning of PyTorch")
seen = torch.tensor(model.seen)
dist.all_reduce(seen)
with open(f"rank-{dist.get_rank()}", "w") as file:
    file.write(f"{seen.item()} of {loader.num_samples}")
dist.destroy_process_group()
"""


def test_the_training_loop_of_the_readme_trains_every_sample(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 15
    preprocess(
        PreprocessConfig(dataset="synthetic", out=tmp_path / "out" / "ml-20m", synthetic=SyntheticConfig(num_users=400))
    )
    (tmp_path / "train.py").write_text(PRELUDE + snippet + EPILOGUE)
    torchrun = Path(sys.executable).parent / "torchrun"
    run = subprocess.run(
        [torchrun, "--nproc_per_node", "2", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    # What the job warns of at its end is shown, and nothing else.
    shown = run.stderr.splitlines()
    assert [line.rpartition(": ")[2] for line in shown[:1]] == ["warning of the job"]
    assert shown[1:2] == ['  warnings.warn("warning of the job")']
    assert [line.rpartition("] ")[2] for line in shown[2:]] == ["warning of PyTorch"]
    said = {path.name: path.read_text().split(" of ") for path in tmp_path.glob("rank-*")}
    assert sorted(said) == ["rank-0", "rank-1"]
    for seen, total in said.values():
        assert seen == total
