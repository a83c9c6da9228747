"""Small jobs on the ranks of the tests: what they trained and evaluated, and their logs."""

import contextlib
import json
import os
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed import comm

from evenrank.training import BinaryAUC
from trainer import TrainConfig, World
from trainer.job import Training, train
from trainer.monitors import Monitors

SHARDED = {"embeddings": "sharded", "min_sharded_rows": 300, "pipeline": "sparse-dist"}
SETTINGS = {"hidden": 16, "heads": 2, "layers": 1, "embedding_dim": 8, "max_history_length": 40, "log_every": 4}
Evaluated = tuple[Tensor, Tensor, Tensor]  # logits, targets, users


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a rank did in one run of a job."""

    samples: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by step, epoch and id of its samples
    losses: dict[int, float] = field(default_factory=dict)  # by step, this rank's share; the mean over ranks counts
    evaluated: list[list[Evaluated]] = field(default_factory=list)  # by evaluation, its steps
    stopped_by: list[int | None] = field(default_factory=list)


class CrashError(Exception):
    """Stands for anything that ends a job in the middle of an epoch."""


def run(rank: int, world_size: int, options: dict[str, Any], crash_at: int = 0, signal_at: int = 0) -> Trained:
    """Run a job with options that differ from `SETTINGS` on this rank.

    After step `crash_at` it dies on all ranks; after step `signal_at` the last rank receives SIGTERM.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained = Trained()
    note, evaluate, update = Monitors.note, Training._evaluate, BinaryAUC.update

    def note_step(monitors: Monitors, step: int, done: Any) -> None:
        note(monitors, step, done)
        trained.samples[step] = [
            (done.batch.epoch, one) for one in done.batch.sample_ids[: done.batch.num_real].tolist()
        ]
        trained.losses[step] = float(done.loss)
        if step == signal_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == crash_at:
            raise CrashError

    def note_evaluation(training: Training) -> None:
        trained.evaluated.append([])
        evaluate(training)

    def note_evaluated(metric: BinaryAUC, scores: Tensor, targets: Tensor, *, groups: Tensor) -> None:
        trained.evaluated[-1].append((scores.clone(), targets, groups))
        update(metric, scores, targets, groups=groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitors, "note", note_step)
        patch.setattr(Training, "_evaluate", note_evaluation)
        patch.setattr(BinaryAUC, "update", note_evaluated)
        with contextlib.suppress(CrashError):
            trained.stopped_by.append(train_on_cpu(rank, world_size, TrainConfig(**SETTINGS | options)))
    return trained


def train_on_cpu(rank: int, world_size: int, config: TrainConfig) -> int | None:
    # TorchRec keeps these for the life of a process; the ranks of an earlier job would not take part again.
    comm._INTRA_PG = comm._CROSS_PG = None
    return train(config, World(rank=rank, size=world_size, device=torch.device("cpu")))


def together(parts: list[Trained]) -> tuple[dict[int, list[tuple[int, int]]], dict[int, float]]:
    """Return the samples of all ranks and the loss, by step."""
    steps = parts[0].samples.keys()
    samples = {step: sorted(sample for part in parts for sample in part.samples[step]) for step in steps}
    return samples, {step: sum(part.losses[step] for part in parts) / len(parts) for step in steps}


def settings(out: Path, data: Path, **options: Any) -> dict[str, Any]:
    return {"out": str(out), "data": str(data), **options}


def log_lines(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return the complete lines of a kind in the log of a job."""
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [line for line in lines if line["kind"] == kind]
