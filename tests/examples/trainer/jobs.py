"""Small jobs on the ranks of the tests, what they trained, and their logs."""

import dataclasses
import json
import os
import signal
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torchrec.distributed import comm

from evenrank.core.errors import StateError
from trainer import command
from trainer.config import TrainConfig
from trainer.job import train
from trainer.loop import Training
from trainer.monitors import Monitors
from trainer.world import World

SHARDED = {"embeddings": "sharded", "min_sharded_rows": 300, "pipeline": "sparse-dist"}
SETTINGS = {"hidden": 16, "heads": 2, "layers": 1, "max_history_length": 40, "log_every": 4}


def read_config(file: Path | None, options: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of a command with a file and options."""
    arguments = [] if file is None else ["--config", str(file)]
    for name, value in options.items():
        flag = name.replace("_", "-")
        arguments += [f"--{'no-' * (value is False)}{flag}", *([] if isinstance(value, bool) else [str(value)])]
    app = typer.Typer(add_completion=False)
    app.command()(command.command_of(lambda config: None))
    return command.read_config(typer.main.get_command(app).make_context("train", arguments))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a rank trained in one run of a job."""

    samples: dict[int, list[int]] = field(default_factory=dict)  # per step, the ids of this rank's samples
    losses: dict[int, float] = field(default_factory=dict)  # per step, this rank's share; the mean over ranks counts
    stopped_by: int | None = None  # a signal


class CrashError(Exception):
    """Stands for anything that ends a job in the middle of an epoch."""


def run(rank: int, world_size: int, options: dict[str, Any], crash_at: int = 0, signal_at: int = 0) -> Trained:
    """Run a job with options that differ from `SETTINGS` on this rank.

    After step `crash_at` it dies on all ranks; after step `signal_at` the last rank receives SIGTERM.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained = Trained()
    note, poll = Monitors.note, Training._save

    def record(monitors: Monitors, step: int, done: Any) -> None:
        note(monitors, step, done)
        trained.samples[step] = done.batch.sample_ids[: done.batch.num_real].tolist()
        trained.losses[step] = float(done.loss)
        if step == signal_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == crash_at:
            raise CrashError

    def save(training: Training) -> None:
        poll(training)
        training.checkpoints.finish()  # so that a crash comes after it

    of_model = {} if options.get("model") == "semantic-ids" else {"embedding_dim": 8}
    config = TrainConfig(**SETTINGS | of_model | options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitors, "note", record)
        patch.setattr(Training, "_save", save)
        try:
            return dataclasses.replace(trained, stopped_by=train_on_cpu(rank, world_size, config))
        except CrashError:
            return trained


def train_on_cpu(rank: int, world_size: int, config: TrainConfig) -> int | None:
    # TorchRec keeps these for the life of a process; the ranks of an earlier job would not take part again.
    comm._INTRA_PG = comm._CROSS_PG = None
    return train(config, World(rank=rank, size=world_size, device=torch.device("cpu")))


def together(parts: list[Trained]) -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return the samples of all ranks and the loss, per step."""
    steps = parts[0].samples.keys()
    samples = {step: sorted(sample for part in parts for sample in part.samples[step]) for step in steps}
    return samples, {step: sum(part.losses[step] for part in parts) / len(parts) for step in steps}


def check_failures(failures: list[Any], *texts: str, kinds: Sequence[type[Exception]] = (StateError,)) -> None:
    """Check that all ranks have an error of one line with these texts."""
    for failure in failures:
        assert failure.type_name in [kind.__name__ for kind in kinds]
        assert all(text in failure.message for text in texts), failure.message
        assert "\n" not in failure.message


def settings(out: Path, data: Path, **options: Any) -> dict[str, Any]:
    return {"out": str(out), "data": str(data), **options}


def log_lines(out: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the complete lines in the log of a job, of all kinds or of some."""
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if not kinds or line["kind"] in kinds]
