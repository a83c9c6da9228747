"""The script reports on a file without a device, and refuses to time without one."""

from pathlib import Path

import attention_sweep
import pytest
import torch

from attention_bench.sweep import DIRECTIONS, Cell, Speed, Sweep
from evenrank.core.errors import ConfigError, DataError


def test_a_report_is_drawn_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed = Speed(ms=1.0, runs=50, tflops=12.345, mfu=0.5)
    Sweep(
        attention="triton",
        heads=4,
        head_dim=256,
        dtype="bfloat16",
        device="a GPU",
        torch="2.13",
        peak_tflops=989.4,
        seconds_per_pass=3.0,
        batch_sizes=(1,),
        lengths=(64,),
        cells=(Cell(batch_size=1, length=64, speeds=dict.fromkeys(DIRECTIONS, speed)),),
    ).save(tmp_path / "sweep.json")
    attention_sweep.main(out=tmp_path, report_only=True)
    assert {path.name for path in tmp_path.glob("*.png")} == {"forward.png", "backward.png", "both.png"}
    assert "sweep.json" in capsys.readouterr().out


def test_a_report_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run it again without --report-only"):
        attention_sweep.main(out=tmp_path, report_only=True)


def test_an_unknown_attention_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'flash'; known are padded, triton, triton-by-sample"):
        attention_sweep.main(attention="flash", out=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run it on a host with a GPU"):
        attention_sweep.main(out=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
