"""No dataset, whatever another program wrote there, crashes a process or gives an invalid batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.datasets.store import open_store


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small dataset whose eval split has numbers of targets."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    out = tmp_path_factory.mktemp("base") / "data"
    synthetic = SyntheticConfig(
        num_users=15, lengths=Lognormal(mean=5, std=5, low=0, high=20), items=Zipf(exponent=1.05, high=39)
    )
    preprocess(PreprocessConfig(dataset="synthetic", out=out, split="leave-last:2", synthetic=synthetic))
    assert open_store(out, "eval").num_targets is not None
    return out


@pytest.mark.parametrize(("first", "end"), [(0, 100), pytest.param(100, 5000, marks=pytest.mark.long)])
def test_crafted_datasets_give_errors_or_valid_batches(base: Path, tmp_path: Path, first: int, end: int) -> None:
    command = [sys.executable, "-m", "tests.dataloader.read_crafted", str(base), str(tmp_path), str(first), str(end)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    counts = json.loads(result.stdout)
    # Half of the changes are harmless or found; if all were one of these, nothing would be tested.
    assert counts["read"] > 0.1 * 5 * (end - first)
    assert counts["DataError"] > 0.3 * 5 * (end - first)
