"""Editors, here Pyright, find the package of an editable install through `typings/`, with its types."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """\
import evenrank
from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost, partition
from evenrank.datasets import open_store
from evenrank.preprocess import PreprocessConfig, preprocess
from evenrank.training import scale_loss

loader = build_loader("data", LoaderConfig(batch_size=8), rank=0, world_size=1)
cost = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
for batch in Balancer(loader, BalanceConfig(cost=cost)):
    reveal_type(batch)
reveal_type(evenrank.__version__)
LoaderConfig(batch_size=8, order="random")
LoaderConfig(batchsize=8)
"""


def test_pyright_knows_the_types_of_public_names(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / "typings")]}))
    pyright = Path(sys.executable).parent / "pyright"
    command = [str(pyright), "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    found = [
        (entry["range"]["start"]["line"] + 1, entry["severity"], entry["message"].splitlines()[0])
        for entry in json.loads(run.stdout)["generalDiagnostics"]
    ]
    lines = {text: number for number, text in enumerate(PROGRAM.splitlines(), 1)}
    invalid_order, unknown_option = (
        lines['LoaderConfig(batch_size=8, order="random")'],
        lines["LoaderConfig(batchsize=8)"],
    )
    information = {number: message for number, severity, message in found if severity == "information"}
    assert information == {
        lines["    reveal_type(batch)"]: 'Type of "batch" is "SequenceBatch"',
        lines["reveal_type(evenrank.__version__)"]: 'Type of "evenrank.__version__" is "str"',
    }
    errors = [(number, message) for number, severity, message in found if severity == "error"]
    assert {number for number, _ in errors} == {invalid_order, unknown_option}, errors
    assert any("random" in message for _, message in errors)
    assert any("batchsize" in message for _, message in errors)
