"""Small jobs on the ranks of the tests, what they trained, and their logs."""

import dataclasses
import json
import os
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed import collective_utils, comm

from trainer.config import TrainConfig
from trainer.job import train
from trainer.loop import Training
from trainer.monitors import Monitors
from trainer.world import World

SHARDED = {"embeddings": "sharded", "min_sharded_rows": 300, "pipeline": "sparse-dist"}
SETTINGS = {"hidden": 16, "heads": 2, "layers": 1, "max_history_length": 40, "log_every": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a rank trained in one run of a job."""

    samples: dict[int, list[int]] = field(default_factory=dict)
    """Per step, the ids of this rank's samples."""
    losses: dict[int, float] = field(default_factory=dict)
    """Per step, this rank's share of the loss; the mean over ranks is that of the step."""
    stopped_by: int | None = None
    """Number of the signal that ended it."""


class CrashError(Exception):
    """Stands for anything that ends a job in the middle of an epoch."""


def run(rank: int, world_size: int, options: dict[str, Any], crash_at: int = 0, signal_at: int = 0) -> Trained:
    """Run a job with options that differ from `SETTINGS` on this rank.

    After step `crash_at` it dies on all ranks; after step `signal_at` the last rank receives SIGTERM.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained = Trained()
    note = Monitors.note

    def record(monitors: Monitors, step: int, done: Any) -> None:
        note(monitors, step, done)
        trained.samples[step] = done.batch.sample_ids[: done.batch.num_real].tolist()
        trained.losses[step] = float(done.loss)
        if step == signal_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == crash_at:
            raise CrashError

    poll = Training._save

    def save(training: Training) -> None:
        poll(training)
        training.checkpoints.finish()  # so that a crash comes after it

    reset_torchrec()
    of_model = {} if options.get("model") == "semantic-ids" else {"embedding_dim": 8}
    config = TrainConfig(**SETTINGS | of_model | options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitors, "note", record)
        patch.setattr(Training, "_save", save)
        try:
            stopped_by = train(config, World(rank=rank, size=world_size, device=torch.device("cpu")))
        except CrashError:
            return trained
    return dataclasses.replace(trained, stopped_by=stopped_by)


def reset_torchrec() -> None:
    """Undo what TorchRec initializes once per process; the ranks of an earlier job would not take part again."""
    for module, name, value in (
        (comm, "_INTRA_PG", None),
        (comm, "_CROSS_PG", None),
        (collective_utils, "_INITIALIZED", False),
    ):
        setattr(module, name, value)


def together(parts: list[Trained]) -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return the samples of all ranks and the loss, per step."""
    steps = parts[0].samples.keys()
    samples = {step: sorted(sample for part in parts for sample in part.samples[step]) for step in steps}
    return samples, {step: sum(part.losses[step] for part in parts) / len(parts) for step in steps}


def settings(out: Path, data: Path, **options: Any) -> dict[str, Any]:
    """Return the options of a job."""
    return {"out": str(out), "data": str(data), **options}


def log_lines(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a kind in the log of a job."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
