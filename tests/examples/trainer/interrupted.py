"""Random jobs that are interrupted again and again: what a round is, and one of its ranks."""

import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# The fork server, which imports this module once for all ranks, knows nothing of pytest's settings.
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

from trainer.config import TrainConfig
from trainer.job import train
from trainer.world import World

TIMEOUT = timedelta(seconds=200)
_WAYS = ("none", "no-exchange", "all-to-all", "all-gather")
_STRATEGIES = ("lpt-swap", "min-move", "karmarkar-karp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruption:
    """A signal that ends a run of the job, once it has written some lines of its log and seconds have passed."""

    kills: bool
    """SIGKILL, rather than SIGTERM."""
    rank: int
    """The rank that receives it; -1: all."""
    after_lines: int
    delay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A job, and how it is interrupted."""

    ranks: int
    options: dict[str, Any]
    interruptions: tuple[Interruption, ...]


def draw_round(seed: int, number: int) -> Round:
    """Return a round that depends on the arguments alone."""
    rng = np.random.default_rng([seed, number])

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    ranks = pick(1, 2)
    task = pick("ranking", "ranking", "retrieval", "semantic-ids")
    options: dict[str, Any] = {"model": "semantic-ids"} if task == "semantic-ids" else {"task": task}
    options |= {"hidden": 8, "heads": 2, "layers": pick(1, 2), "max_history_length": 40, "user_id": pick(False, True)}
    if task == "semantic-ids":
        options |= {"code_levels": pick(2, 3), "codebook_size": 8, "k": 4}
    else:
        options |= {"embedding_dim": 8, "recompute": pick(False, True)}
        if pick(False, True):
            options |= {"embeddings": "sharded", "min_sharded_rows": pick(1, 300)}
            options |= {"routing": pick("continuous", "roundrobin", "hash_roundrobin")}
    if task == "ranking":
        options |= pick({"num_tasks": 2}, {"positive_action": 1})
        if "embeddings" in options:  # TorchRec's pipelines need sharded tables
            options |= {"pipeline": pick("none", "sparse-dist")}
        if ranks == 2:
            options |= {"tensor_parallel": pick(1, 1, 2)}
    options |= {"balance": pick(*_WAYS), "num_workers": pick(0, 1, 2), "batch_size": pick(8, 12) // ranks}
    if options["balance"] != "none":
        options |= {"strategy": pick(*_STRATEGIES)}
    if options["balance"] == "no-exchange":
        options |= {"window": pick(1, 3, 4)}
    options |= {"dropout": pick(0.0, 0.2), "warmup_steps": pick(0, 5), "weight_decay": pick(0.0, 0.1)}
    options |= {"learning_rate": 0.01, "precision": pick("fp32", "fp32", "bf16"), "seed": pick(0, 7)}
    options |= {"epochs": 2, "log_every": 1, "keep": pick(1, 2)}
    options |= {"checkpoint_every": pick(1, 2, 5, None), "eval_every": pick(3, 7, None)}
    interruptions = tuple(
        Interruption(
            kills=pick(False, True),
            rank=pick(-1, *range(ranks)),
            after_lines=pick(0, 1, 2, 5, 9, 14),
            delay=float(rng.random() * pick(0.0, 0.05, 1.0)),
        )
        for _ in range(pick(2, 3, 4))
    )
    return Round(ranks=ranks, options=options, interruptions=interruptions)


def run_rank(rank: int, world_size: int, options: dict[str, Any], store: Path) -> None:
    """Run a job on this rank; the exit code is 0, 128 + a signal, or 1 after an error, which is printed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT)
    config = TrainConfig(**options)
    try:
        stopped_by = train(config, World(rank=rank, size=world_size, device=torch.device("cpu")))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # its groups may wait for ranks that are gone
    dist.destroy_process_group()
    os._exit(0 if stopped_by is None else 128 + stopped_by)
