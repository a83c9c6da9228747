"""Measure how far batches hold up a training thread that is bound by the host: it only launches tiny kernels.

    .venv/bin/python scripts/bench/host.py [--steps 300] [--launches 5000]         on all GPUs of the host, over NCCL
    .venv/bin/python scripts/bench/host.py --device cpu --ranks 2                  on the CPU, over Gloo
    .venv/bin/python scripts/bench/host.py --only lpt-swap --omp-threads 4

A step takes a batch, reads one of its values, adds to one small tensor --launches times, and all-reduces 64 kB, as of
gradients. Batches have 32 samples with the int64 keys user_id, user_age, item_id, action and label, and lognormal
lengths (mean 512, std 512, 1..4096). They come from, in turns of up to 32 steps:

    prepared             batches that are on the device already, and the same again, which shows the noise
    loader               build_loader with one worker, which uploads batches too
    no exchange          the same with balance=BalanceConfig(...)
    none ... min-move    a Balancer with each strategy, over batches made before
    StatefulDataLoader   a Balancer with lpt-swap over torchdata's loader with 2 workers and a JaggedCollate

Prints one JSON line per row, from rank 0, then two tables:

    ms, p95_ms           median and 95th percentile of the steps, on the slowest rank
    x_prepared           ratio of the median to that of prepared batches: median over the turns, of which x_turns has
                         the smallest and the largest
    x_prepared_mean      ratio of the means over all steps, on the slowest rank
    training_ms          CPU time of the training thread per step, mean over ranks
    taking_ms            CPU time of the training thread to take a batch: median over the steps, mean over ranks
    other_ms             CPU time of all other threads of the process per step, mean over ranks, ended ones included
    other_ms_more        other_ms beyond that of prepared batches: gradients are reduced by threads too
    threads              other_ms by name of the thread
"""

import argparse
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from batch_sources import PREPARED, SOURCES, Batches, Rank
from cpu_time import CpuTime
from evenrank.dataloader import JaggedBatch
from local_ranks import add_options, run_ranks
from rendering import markdown_tables

STEPS_OF_TURN, WARMUP_STEPS = 32, 8
_GRADIENTS = 1 << 14  # float32


class Turn(NamedTuple):
    """What a rank measured in a turn of a source; CPU times are milliseconds per step."""

    ms: list[float]  # of each step
    taking_ms: list[float]  # CPU time of the training thread to take the batch of each step
    training_ms: float
    other_ms: float
    threads: dict[str, float]


class Trainer:
    """The training thread of a rank."""

    def __init__(self, device: torch.device, launches: int) -> None:
        self._device = device
        self._launches = launches
        self._tiny = torch.zeros(1, device=device)
        self._gradients = torch.zeros(_GRADIENTS, device=device)

    def train(self, batches: Batches, steps: int) -> Turn:
        """Train on batches, after steps that are not measured."""
        for _ in range(WARMUP_STEPS):
            self._step(next(batches))
        self._meet()
        ms, taking_ms, before = [], [], CpuTime.now()
        own, last = time.thread_time_ns(), time.perf_counter()
        for _ in range(steps):
            begin = time.thread_time_ns()
            batch = next(batches)
            taking_ms.append(1e-6 * (time.thread_time_ns() - begin))
            self._step(batch)
            now = time.perf_counter()
            ms.append(1e3 * (now - last))
            last = now
        own, after = time.thread_time_ns() - own, CpuTime.now()
        self._meet()
        per_step = 1e-6 / steps
        return Turn(
            ms=ms,
            taking_ms=taking_ms,
            training_ms=per_step * own,
            other_ms=per_step * after.others_since(before),
            threads={name: per_step * ns for name, ns in after.by_name_since(before).items()},
        )

    def _step(self, batch: JaggedBatch) -> None:
        features: Any = dict(batch.tensors())["features"]
        tiny = self._tiny
        tiny.add_(features.values()[:1])
        for _ in range(self._launches):
            tiny.add_(1.0)
        dist.all_reduce(self._gradients)

    def _meet(self) -> None:
        """Wait for the device and for all ranks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.all_reduce(torch.zeros(1))


def turns_of(steps: int) -> list[int]:
    """Return the steps of each turn, of which none has more than STEPS_OF_TURN."""
    num_turns = -(-steps // STEPS_OF_TURN)
    return [steps * (turn + 1) // num_turns - steps * turn // num_turns for turn in range(num_turns)]


def measure(device: torch.device, names: Sequence[str], steps: int, launches: int) -> None:
    """Train on all sources in turns, on a rank; rank 0 prints rows and tables."""
    turns = turns_of(steps)
    measured: dict[str, list[Turn]] = {name: [] for name in names}
    with contextlib.ExitStack() as close:
        rank = Rank(
            device=device,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            num_batches=steps + (len(turns) + 1) * WARMUP_STEPS,
            close=close,
        )
        sources = {name: SOURCES[name](rank) for name in names}
        trainer = Trainer(device, launches)
        for number, steps_of_turn in enumerate(turns):
            first = number % len(names)  # so that none is always after the same one
            for name in (*names[first:], *names[:first]):
                measured[name].append(trainer.train(sources[name], steps_of_turn))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, measured)
    if dist.get_rank() == 0:
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        shared = {"ranks": len(of_ranks), "device": hardware, "omp_threads": torch.get_num_threads()}
        rows = [
            {"batches": name} | shared | summarize([own[name] for own in of_ranks], [own[PREPARED] for own in of_ranks])
            for name in names
        ]
        for row in rows:
            print(json.dumps(row), flush=True)
        print(f"\n{table(rows)}\n{table_of_threads(rows)}", end="", flush=True)


def summarize(of_ranks: Sequence[Sequence[Turn]], of_prepared: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """Return the row of a source, given the turns of each rank and those of prepared batches."""
    steps, prepared_steps = (
        [[ms for turn in turns for ms in turn.ms] for turns in of] for of in (of_ranks, of_prepared)
    )
    ratios = [own / other for own, other in zip(_medians(of_ranks), _medians(of_prepared), strict=True)]
    turns, prepared_turns = ([turn for turns in of for turn in turns] for of in (of_ranks, of_prepared))
    other_ms = fmean(turn.other_ms for turn in turns)
    names = sorted({name for turn in turns for name in turn.threads})
    threads = {name: round(fmean(turn.threads.get(name, 0.0) for turn in turns), 3) for name in names}
    return {
        "steps": len(steps[0]),
        "ms": round(max(map(median, steps)), 3),
        "p95_ms": round(max(float(np.percentile(of_rank, 95)) for of_rank in steps), 3),
        "x_prepared": round(median(ratios), 4),
        "x_turns": [round(min(ratios), 4), round(max(ratios), 4)],
        "x_prepared_mean": round(max(map(fmean, steps)) / max(map(fmean, prepared_steps)), 4),
        "training_ms": round(fmean(turn.training_ms for turn in turns), 3),
        "taking_ms": round(fmean(median(ms for turn in of_rank for ms in turn.taking_ms) for of_rank in of_ranks), 3),
        "other_ms": round(other_ms, 3),
        "other_ms_more": round(other_ms - fmean(turn.other_ms for turn in prepared_turns), 3),
        "threads": {name: ms for name, ms in threads.items() if ms},
    }


def _medians(of_ranks: Sequence[Sequence[Turn]]) -> list[float]:
    """Return the median of each turn, on its slowest rank."""
    return [max(median(turn.ms) for turn in turns) for turns in zip(*of_ranks, strict=True)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table."""
    columns = {
        "batches": "batches from",
        "ms": "median, ms",
        "p95_ms": "95 %, ms",
        "x_prepared": "over prepared",
        "x_turns": "in turns",
        "x_prepared_mean": "of means",
        "training_ms": "CPU: training thread, ms",
        "taking_ms": "to take a batch, ms",
        "other_ms": "other threads, ms",
        "other_ms_more": "beyond prepared, ms",
    }
    return markdown_tables.table(list(columns.values()), [[_cell(row[name]) for name in columns] for row in rows])


def table_of_threads(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the CPU time by name of the thread as a table."""
    names = sorted({name for row in rows for name in row["threads"]})
    cells = [[row["batches"], *(_cell(row["threads"].get(name, 0.0)) for name in names)] for row in rows]
    return markdown_tables.table(["CPU ms per step", *names], cells)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure the chosen sources."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=300, help="measured steps of each row")
    parser.add_argument("--launches", type=int, default=5000, help="kernels of a step")
    parser.add_argument("--only", help=f"rows, comma-separated, of: {', '.join(SOURCES)}; prepared is always there")
    options = parser.parse_args()
    chosen = list(SOURCES) if options.only is None else options.only.split(",")
    if unknown := [name for name in chosen if name not in SOURCES]:
        parser.error(f"--only has {unknown[0]!r}; known are {', '.join(SOURCES)}")
    if options.steps < 1 or options.launches < 0:
        parser.error(f"--steps must be at least 1 and --launches 0, got {options.steps} and {options.launches}")
    names = [name for name in SOURCES if name in (PREPARED, *chosen)]
    run_ranks(parser, options, measure, names, options.steps, options.launches)


if __name__ == "__main__":
    main()
