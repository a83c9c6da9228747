"""The script reports on a file without a device, and refuses to time without one."""

import dataclasses
from pathlib import Path

import balanced_attention
import pytest
import torch

from attention_bench.balanced import Draw, save
from evenrank.core.errors import ConfigError, DataError


def test_a_report_is_made_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Draw(
        device="a GPU",
        lengths="lognormal",
        attention="triton",
        strategy="none",
        draw=0,
        rank_ms=(1.0, 3.0),
        rank_tflops=(100.0, 300.0),
        equal_ms=2.0,
        equal_tflops=300.0,
        least_imbalance=1.0,
        runs=50,
    )
    save([before, dataclasses.replace(before, strategy="lpt-swap")], tmp_path / "balanced.jsonl")
    balanced_attention.main(out=tmp_path, report_only=True)
    assert {path.name for path in tmp_path.iterdir()} == {"balanced.jsonl", "balanced.md", "balanced.png"}
    table = (tmp_path / "balanced.md").read_text()
    assert "| lognormal | triton | none | 3.00 |" in table
    assert table in capsys.readouterr().out


def test_a_report_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run it again without --report-only"):
        balanced_attention.main(out=tmp_path, report_only=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run it on a host with a GPU"):
        balanced_attention.main(out=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
