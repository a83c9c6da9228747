"""`scripts/train.py` as its users run it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scripts import train
from tests.examples.trainer.jobs import log_lines
from trainer import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "train.py"
TORCHRUN = ["-P", "-m", "torch.distributed.run", "--nproc_per_node"]
SMALL = ["--hidden", "8", "--layers", "1", "--embedding-dim", "4", "--max-history-length", "16", "--log-every", "1"]
SHARDED = ["--embeddings", "sharded", "--min-sharded-rows", "300"]


def _environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "typings"), **variables}


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *([] if arguments[0] == "-P" else [str(SCRIPT)]), *arguments]
    return subprocess.run(command, env=_environment(**variables), capture_output=True, text=True, timeout=280)


def test_a_job_of_torchrun_that_is_terminated_is_continued_by_one_process(tmp_path: Path) -> None:
    """Without a dataset, which the first rank makes once."""
    arguments = ["--out", str(tmp_path), *SMALL]
    command = [sys.executable, *TORCHRUN, "2", str(SCRIPT), *arguments, "--batch-size", "16"]
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True) as job:
        while not log_lines(tmp_path, "train") and job.poll() is None:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=240)
    stopped = re.search(r"^stopped by SIGTERM after step (\d+); the same command continues$", output, re.M)
    assert stopped, output
    made = (tmp_path / "synthetic" / "manifest.json").stat().st_mtime_ns
    continued = _run(*arguments, "--batch-size", "32")
    assert (continued.returncode, continued.stderr) == (0, "")
    first, *_, last = continued.stdout.splitlines()
    assert first == f"resumed after step {stopped[1]}; another --out starts over"
    steps = [line["step"] for line in log_lines(tmp_path, "train")]
    assert steps == list(range(1, len(steps) + 1))  # each once, over both runs
    (evaluation,) = log_lines(tmp_path, "eval")
    names = ("auc", "gauc", "accuracy", "normalized_entropy")
    assert last == " | ".join([f"step {steps[-1]}", *(f"{name} {evaluation[name]:.4f}" for name in names)])
    assert (tmp_path / "synthetic" / "manifest.json").stat().st_mtime_ns == made


def test_a_mistake_is_one_line_of_the_first_rank_alone_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("batchsize = 8")
    failed = _run("--config", str(file))
    message = f"error: {file} has the unknown key 'batchsize'; did you mean batch_size"
    assert (failed.returncode, failed.stderr.startswith(message), failed.stderr.count("\n")) == (2, True, 1)
    other_rank = _run("--config", str(file), RANK="1")
    assert (other_rank.returncode, other_rank.stdout, other_rank.stderr) == (2, "", "")


def test_options_override_the_file_and_that_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "settings.toml", list[TrainConfig]()
    file.write_text("hidden = 32\nheads = 4\nlearning_rate = 1\n")
    monkeypatch.setattr("trainer.run_job", seen.append)
    app = typer.Typer()
    app.command()(train.train)
    given = "--profile 5:7 --heads 8 --max-steps 3 --recompute --attention padded --precision fp32"
    result = CliRunner().invoke(app, ["--config", str(file), *given.split()])
    assert result.exit_code == 0, result.output
    options = {"heads": 8, "max_steps": 3, "recompute": True, "attention": "padded", "profile": "5:7"}
    assert seen == [TrainConfig(hidden=32, learning_rate=1, precision="fp32", **options)]  # type: ignore[arg-type]
    assert seen[0].profile_window == (5, 7)
    for config in (ROOT / "examples" / "trainer" / "configs").glob("*.toml"):
        assert CliRunner().invoke(app, ["--config", str(config)]).exit_code == 0
    assert seen[-1].positive_action == 7


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", ["none", "sparse-dist", "prefetch"])
def test_a_job_on_a_gpu_trains_in_bfloat16_and_resumes(small_dataset: Path, tmp_path: Path, pipeline: str) -> None:
    arguments = ["--data", str(small_dataset), "--out", str(tmp_path), *SMALL[2:], "--heads", "1", "--hidden", "64"]
    for epochs in (1, 2):
        options = [*arguments, *SHARDED, "--pipeline", pipeline, "--epochs", str(epochs), "--profile", "1:3"]
        job = _run(*options)
        assert job.returncode == 0, job.stderr
    steps = [line["step"] for line in log_lines(tmp_path, "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert [line["step"] for line in log_lines(tmp_path, "eval")] == [len(steps) // 2, len(steps)]
    memory = log_lines(tmp_path, "memory")
    assert [line["step"] for line in memory] == steps
    assert all(0 < line["allocated"][0] <= line["reserved"][0] < line["total"][0] for line in memory)
    assert all(0 < line["mfu"] < 1 for line in log_lines(tmp_path, "train"))
