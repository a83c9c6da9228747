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
from typer.testing import CliRunner, Result

from scripts import train
from tests.examples.trainer.test_job import log_lines
from trainer import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "train.py"
SMALL = ["--hidden", "8", "--layers", "1", "--embedding-dim", "4", "--max-history-length", "16", "--log-every", "1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "typings")}


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, str(SCRIPT), *arguments], ENVIRONMENT | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def _invoke(*arguments: str) -> Result:
    """Run the script in this process, which has imported torch."""
    app = typer.Typer()
    app.command()(train.train)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result


def test_a_job_of_torchrun_that_is_terminated_is_continued_by_one_process(tmp_path: Path) -> None:
    """Without a dataset, which the first rank makes once."""
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command = [*torchrun, str(SCRIPT), "--out", str(tmp_path), *SMALL, "--batch-size", "16"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as job:
        while not log_lines(tmp_path, "train") and job.poll() is None:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=240)
    stopped = re.search(r"^stopped by SIGTERM after step (\d+); the same command continues$", output, re.M)
    assert stopped, output
    made = (tmp_path / "synthetic" / "manifest.json").stat().st_mtime_ns
    limits = ["--max-steps", str(int(stopped[1]) + 2), "--eval-steps", "1"]
    first, *_, last = _invoke("--out", str(tmp_path), *SMALL, "--batch-size", "32", *limits).output.splitlines()
    assert first == f"resumed after step {stopped[1]}; another --out starts over"
    steps = [line["step"] for line in log_lines(tmp_path, "train")]
    assert steps == list(range(1, int(stopped[1]) + 3))  # each once, over both runs
    (evaluation,) = log_lines(tmp_path, "eval")
    names = ("auc", "gauc", "accuracy", "normalized_entropy")
    assert last == " | ".join([f"step {steps[-1]}", *(f"{name} {evaluation[name]:.4f}" for name in names)])
    assert (tmp_path / "synthetic" / "manifest.json").stat().st_mtime_ns == made


def test_a_mistake_is_one_line_of_the_first_rank_alone_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("batchsize = 8")
    failed, other_rank = _run("--config", str(file)), _run("--config", str(file), RANK="1")
    message = f"error: {file} has the unknown key 'batchsize'; did you mean batch_size"
    assert (failed.returncode, failed.stderr.startswith(message), failed.stderr.count("\n")) == (2, True, 1)
    assert (other_rank.returncode, other_rank.stdout, other_rank.stderr) == (2, "", "")


def test_options_override_the_file_and_that_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "settings.toml", list[TrainConfig]()
    file.write_text("hidden = 32\nheads = 4\nlearning_rate = 1\n")
    monkeypatch.setattr("trainer.run_job", seen.append)
    given = "--profile 5:7 --heads 8 --max-steps 3 --recompute --attention padded --precision fp32"
    _invoke("--config", str(file), *given.split())
    options = {"heads": 8, "max_steps": 3, "recompute": True, "attention": "padded", "profile": "5:7"}
    assert seen == [TrainConfig(hidden=32, learning_rate=1, precision="fp32", **options)]  # type: ignore[arg-type]
    assert seen[0].profile_window == (5, 7)
    _invoke("--config", str(ROOT / "examples" / "trainer" / "configs" / "ml-20m.toml"))
    assert seen[-1].positive_action == 7


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", ["none", "sparse-dist", "prefetch"])
def test_a_job_on_a_gpu_trains_in_bfloat16_and_resumes(small_dataset: Path, tmp_path: Path, pipeline: str) -> None:
    sharded = ["--embeddings", "sharded", "--min-sharded-rows", "300", "--pipeline", pipeline, "--profile", "1:3"]
    arguments = ["--data", str(small_dataset), "--out", str(tmp_path), *SMALL[2:], "--heads", "1", "--hidden", "64"]
    for epochs in ("1", "2"):
        job = _run(*arguments, *sharded, "--epochs", epochs)
        assert job.returncode == 0, job.stderr
    steps = [line["step"] for line in log_lines(tmp_path, "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert [line["step"] for line in log_lines(tmp_path, "eval")] == [len(steps) // 2, len(steps)]
    memory = log_lines(tmp_path, "memory")
    assert [line["step"] for line in memory] == steps
    assert all(0 < line["allocated"][0] <= line["reserved"][0] < line["total"][0] for line in memory)
    assert all(0 < line["mfu"] < 1 for line in log_lines(tmp_path, "train"))
