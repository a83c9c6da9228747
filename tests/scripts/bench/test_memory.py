import json
import sys
from typing import Any

import pytest
import torch

import memory
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Uniform
from memory import Memory, num_bytes, summarize, table
from tests.cli.programs import ROOT, run_program


def test_the_bytes_of_a_batch_are_those_of_its_tensors() -> None:
    data = RandomData(lengths=Uniform(low=5, high=5))
    config = LoaderConfig(batch_size=4, num_tasks=1, user_id=True)
    (batch,) = RandomBatches[Any](config, data, num_batches=1)
    values = 4 * (1 + 5 + 5 + 5)  # user_id, item_id, action, label
    lengths = 4 * 4
    assert num_bytes(batch) == 8 * (values + lengths + 4 + 4)  # num_candidates, sample_ids


def test_a_row_is_of_the_rank_with_the_highest_peak() -> None:
    plain = Memory(held=2_000_000, peak=4_000_000, active=4_000_000)
    most = Memory(held=10_000_000, peak=14_000_000, active=16_000_000)
    less = Memory(held=11_000_000, peak=13_000_000, active=13_000_000)
    row = summarize([(3e6, plain, less), (2e6, plain, most)], lookahead=2)
    assert row == {
        "batch_mb": 2.0,
        "held_mb": 10.0,
        "plain_held_mb": 2.0,
        "held_x": 4.0,
        "held_x_per_step": 2.0,
        "peak_mb": 14.0,
        "plain_peak_mb": 4.0,
        "peak_x": 5.0,
        "peak_x_per_step": 2.5,
        "active_mb": 16.0,
        "plain_active_mb": 4.0,
        "active_x": 6.0,
        "active_x_per_step": 3.0,
    }
    shown = table([{"samples": 32, "mean_length": 4096, "lookahead": 2, **row}]).splitlines()[-1]
    assert shown == "| 32 | 4096 | 2 | 2.0 | 10.0 | 2.0 | 4.0 | 2.0 | 14.0 | 4.0 | 5.0 | 2.5 | 16.0 | 4.0 | 6.0 | 3.0 |"


def test_a_host_without_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["memory.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        memory.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "memory.py measures the memory of GPUs, and runs on a host where PyTorch finds a CUDA device\n"
    )


@pytest.mark.gpu
def test_steps_in_flight_take_memory() -> None:
    script = ROOT / "scripts" / "bench" / "memory.py"
    ended = run_program(sys.executable, script, "--ranks", "1", "--steps", "3")
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [(row["samples"], row["lookahead"]) for row in rows] == [(32, 1), (32, 2), (512, 1), (512, 2)]
    for row in rows:
        assert row["device"] == torch.cuda.get_device_name()
        assert row["plain_held_mb"] == pytest.approx(row["batch_mb"], rel=0.05)
        assert row["plain_peak_mb"] == pytest.approx(2 * row["batch_mb"], rel=0.05)
        assert 1 <= row["held_x_per_step"] < 6
