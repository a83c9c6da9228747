import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.examples.trainer.jobs import log_lines
from trainer.checkpoints import complete_checkpoints, step_of
from trainer.lock import FolderLock

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "train.py"
SMALL = ["--hidden", "8", "--layers", "1", "--embedding-dim", "4", "--max-history-length", "16", "--log-every", "1"]
SHARDED = ["--embeddings", "sharded", "--min-sharded-rows", "300"]


def _environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ("-P" if arguments[0] == "-m" else str(SCRIPT)), *arguments]
    return subprocess.run(command, env=_environment(**variables), capture_output=True, text=True, timeout=280)


def test_a_job_of_torchrun_that_is_terminated_is_continued_by_one_process(small_dataset: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(small_dataset), "--out", str(tmp_path / "out"), *SMALL]
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "2", str(SCRIPT)]
    torchrun += [*arguments, "--batch-size", "2"]
    with subprocess.Popen(torchrun, env=_environment(), stdout=subprocess.PIPE, text=True) as job:
        while not log_lines(tmp_path / "out") and job.poll() is None:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=240)
    stopped = re.search(r"^stopped by SIGTERM after step (\d+); the same command continues$", output, re.M)
    assert stopped, output
    step = int(stopped[1])
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{step:08}"

    continued = _run(*arguments, "--batch-size", "4", "--tensorboard")
    assert continued.returncode == 0, continued.stderr
    assert continued.stderr == ""  # there is no progress bar without a terminal
    first, *_, last = continued.stdout.splitlines()
    assert first == f"resumed from {checkpoint}; another --out starts over"
    steps = [line["step"] for line in log_lines(tmp_path / "out", "train")]
    assert steps == list(range(1, len(steps) + 1))  # each once, over both runs
    (evaluation,) = log_lines(tmp_path / "out", "eval")
    names = ("auc", "gauc", "accuracy", "normalized_entropy")
    assert last == " | ".join([f"step {steps[-1]}", *(f"{name} {evaluation[name]:.4f}" for name in names)])
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))
    assert sorted(path.name for path in (tmp_path / "out").glob("balance*")) == ["balance-2.jsonl", "balance.jsonl"]


def test_windows_of_a_job_of_torchrun_are_continued_by_one_process(small_dataset: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(small_dataset), "--out", str(tmp_path), "--time-windows", "1w", "--keep", "99", *SMALL]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", str(SCRIPT)]
    stopped = _run(*torchrun, *arguments, "--batch-size", "8", "--max-steps", "9", PYTHONPATH=str(ROOT / "typings"))
    assert stopped.returncode == 0, stopped.stderr
    evaluated = log_lines(tmp_path, "eval")
    (tmp_path / "windows.png").unlink()
    continued = _run(*arguments, "--batch-size", "16")
    assert continued.returncode == 0, continued.stderr
    steps = [line["step"] for line in log_lines(tmp_path, "train")]
    assert steps == list(range(1, len(steps) + 1))  # each once, over both runs
    lines = log_lines(tmp_path, "eval")
    assert lines[: len(evaluated)] == evaluated
    last_of_run = len(evaluated) - 1  # at the end of the first run, within a window
    windows = [line["window"] for line in lines[:last_of_run] + lines[last_of_run + 1 :]]
    assert windows == list(range(1, windows[-1] + 1))
    *_, shown = continued.stdout.splitlines()
    expected = (
        f"step {steps[-1]} | window {windows[-1]} | begin {lines[-1]['begin']} | end {lines[-1]['end']} | targets "
    )
    assert shown.startswith(f"{expected}{lines[-1]['targets']} | auc {lines[-1]['auc']:.4f} | gauc ")
    assert {step_of(path) for path in complete_checkpoints(tmp_path / "checkpoints")} == {
        line["step"] for line in lines
    }
    assert (tmp_path / "windows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", ["none", "sparse-dist", "prefetch"])
def test_a_job_on_a_gpu_trains_in_bfloat16_and_resumes(small_dataset: Path, tmp_path: Path, pipeline: str) -> None:
    arguments = ["--data", str(small_dataset), "--out", str(tmp_path), *SMALL[2:], "--heads", "1", "--hidden", "64"]
    for epochs in (1, 2):
        options = [*arguments, *SHARDED, "--pipeline", pipeline, "--epochs", str(epochs), "--profile", "1:3"]
        job = _run(*options, PYTHONPATH=str(ROOT / "typings"))
        assert job.returncode == 0, job.stderr
    steps = [line["step"] for line in log_lines(tmp_path, "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert [line["step"] for line in log_lines(tmp_path, "eval")] == [len(steps) // 2, len(steps)]
    memory = log_lines(tmp_path, "memory")
    assert [line["step"] for line in memory] == steps
    assert all(0 < line["allocated"][0] <= line["reserved"][0] < line["total"][0] for line in memory)
    caches = log_lines(tmp_path, "embedding_cache")
    assert [line["step"] for line in caches] == (steps if pipeline == "prefetch" else [])
    if caches:
        assert caches[0]["misses"] > 0
        assert sum(line["hits"] for line in caches) > 0
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        f"steps-{first}-{first + 1}.{kind}"
        for first in (2, len(steps) // 2 + 2)
        for kind in ("trace.json", "memory.pickle")
    }


def _losses_on_gpus(data: Path, out: Path, num_ranks: int, *arguments: str) -> list[float]:
    options = ["--data", str(data), "--out", str(out), *SMALL, "--precision", "fp32", *arguments]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), str(SCRIPT)]
    job = _run(*torchrun, *options, PYTHONPATH=str(ROOT / "typings"))
    assert job.returncode == 0, job.stderr
    return [line["loss"] for line in log_lines(out, "train")]


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("num_ranks", "tensor_parallel", "pipeline"),
    [(2, 1, None), (2, 2, None), (2, 2, "none"), (2, 2, "prefetch"), (4, 2, "sparse-dist")],
)
def test_jobs_on_several_gpus_have_the_losses_of_one_gpu_and_their_checkpoints_resume_there(
    small_dataset: Path, tmp_path: Path, num_ranks: int, tensor_parallel: int, pipeline: str | None
) -> None:
    """Without a pipeline tables are replicated; on four GPUs, the rows of sharded tables are divided too."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices, there are {torch.cuda.device_count()}")
    sharded = [*SHARDED, "--pipeline", pipeline] if pipeline else []
    alone = [*sharded, "--batch-size", "32"]
    batch_size = 32 * tensor_parallel // num_ranks
    divided = [*sharded, "--batch-size", str(batch_size), "--tensor-parallel", str(tensor_parallel)]
    whole = _losses_on_gpus(small_dataset, tmp_path / "whole", 1, "--balance", "none", *alone)
    parts = _losses_on_gpus(small_dataset, tmp_path / "parts", num_ranks, *divided, "--max-steps", "5")
    assert parts == pytest.approx(whole[:5], rel=1e-3)
    assert _losses_on_gpus(small_dataset, tmp_path / "parts", 1, *alone) == pytest.approx(whole, rel=1e-3)


def test_a_second_job_on_a_folder_ends_on_all_ranks_and_names_the_first(small_dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--data", str(small_dataset), "--out", str(out), "--batch-size", "2"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with FolderLock(out):
        jobs = [
            subprocess.Popen(command, env=_environment(RANK=rank, **variables), stderr=subprocess.PIPE, text=True)
            for rank in "01"
        ]
        errors = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [2, 2]
    holder = f"process {os.getpid()} on host {socket.gethostname()}"
    assert errors == [f"error: {out} is in use by {holder}; wait for it, or choose another folder\n", ""]


def test_a_mistake_is_one_line_of_the_first_rank_alone_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("batchsize = 8")
    arguments = ["--config", str(tmp_path / "settings.toml")]
    failed = _run(*arguments)
    message = f"error: {tmp_path / 'settings.toml'} has the unknown key 'batchsize'; did you mean batch_size"
    assert (failed.returncode, failed.stderr.startswith(message), failed.stderr.count("\n")) == (2, True, 1)
    other_rank = _run(*arguments, RANK="1")
    assert (other_rank.returncode, other_rank.stdout, other_rank.stderr) == (2, "", "")
