"""What `evenrank simulate` promises beside what a job then measures, on 4 Gloo ranks whose steps take a known time.

    .venv/bin/python scripts/bench/promise.py [--steps 200] [--step-ms 100] [--jobs sum,padded,giant,half-fixed]

Each rank sleeps for the time that its samples cost instead of training, and joins an all-reduce. The jobs:

    sum         the cost of a rank is the sum of its samples' costs
    padded      each row of a rank costs as much as its longest sample; balanced by windows of 8 steps
    giant       one sample in 200 is so long that it sets the time of most steps
    half-fixed  as sum, but half of an unbalanced step is a time that balancing cannot change

A job trains the same epoch three times, and a StepTimer measures it: without sleeping, then with strategy `none`, then
balanced without exchange. The promise counts the time of a step without sleep as `evenrank simulate --fixed-ms` does.
Prints one JSON line per job: promised and measured speed-up and idle shares, and the ratio of the speed-ups.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evenrank.cli.reports.simulation import open_source, simulate, with_fixed_load
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import (
    BalanceConfig,
    Cost,
    LinearCost,
    MetricsSummary,
    PaddedCost,
    StepMetrics,
    summarize,
)
from evenrank.dataloader.random_batches import RandomData, draw_samples
from evenrank.training import StepTimer

RANKS, BATCH_SIZE, MAX_LENGTH, WINDOW = 4, 32, 4096, 8
_LINEAR = LinearCost(interleave_actions=False)


class Job(NamedTuple):
    """A job with known step costs."""

    cost: Cost = _LINEAR
    window: int = 1
    fixed_share: float = 0.0  # of the time of an unbalanced step
    giants: bool = False

    def lengths(self, num_samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Draw the lengths of histories: lognormal, or short ones with a few giants."""
        rng = np.random.default_rng(0)
        if self.giants:
            return np.where(rng.random(num_samples) < 1 / 200, MAX_LENGTH, rng.integers(20, 60, num_samples))
        return np.clip(rng.lognormal(5.9, 0.8, num_samples).astype(np.int64), 1, MAX_LENGTH)

    def balance(self, **options: Any) -> BalanceConfig:
        """Return how the job is balanced."""
        return BalanceConfig(cost=self.cost, window=self.window, **options)


JOBS = {
    "sum": Job(),
    "padded": Job(cost=PaddedCost(_LINEAR), window=WINDOW),
    "giant": Job(giants=True),
    "half-fixed": Job(fixed_share=0.5),
}


def promise(job: Job, path: Path, steps: int) -> list[StepMetrics]:
    """Return the simulated steps."""
    source = open_source(str(path), "train", MAX_LENGTH)
    return simulate(source, job.balance(), RANKS, batch_size=BATCH_SIZE, steps=steps)


def train(rank: int, job: Job, path: Path, store: str, *, is_balanced: bool, second: float, fixed: float) -> Any:
    """Train an epoch in which a load of 1 takes `second`; return the measured steps on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    lengths, measured = np.load(path), list[StepMetrics]()
    data = draw_samples(RandomData(), np.random.default_rng(0), len(lengths), min_length=1, split="train")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = {name: np.zeros(offsets[-1], dtype=values.dtype) for name, values in data.columns.items()}
    data = replace(data, offsets=offsets, columns={**columns, "user_id": data.columns["user_id"]})
    timer = StepTimer(measured.append, every=20)
    balance = job.balance() if is_balanced else BalanceConfig(cost=job.cost, strategy="none")
    config = LoaderConfig(batch_size=BATCH_SIZE, max_history_length=MAX_LENGTH, num_workers=1)
    loader = build_loader(data, config, rank=rank, world_size=RANKS, balance=replace(balance, on_step=timer))
    gradient = torch.zeros(1000)
    for batch in loader:
        load = rank_load(job, batch.features["item_id"].lengths().numpy())
        time.sleep(fixed + second * load)
        with timer.waiting():
            dist.all_reduce(gradient)
    timer.close()
    dist.destroy_process_group()
    return measured if rank == 0 else []


def rank_load(job: Job, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """Return the load of a rank by a formula of its own, so that it does not repeat an error of the planner."""
    return BATCH_SIZE * int(lengths.max()) if isinstance(job.cost, PaddedCost) else int(lengths.sum())


def run(job: Job, path: Path, **arguments: Any) -> MetricsSummary:
    """Train on all ranks, and return what was measured."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(RANKS) as pool:
        ranks = [
            pool.apply_async(train, (rank, job, path, f"file://{folder}/store"), arguments) for rank in range(RANKS)
        ]
        return summarize(ranks[0].get(timeout=900))


def measure(name: str, *, steps: int, step_ms: float) -> dict[str, Any]:
    """Return the row of a job."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        np.save(path, job.lengths(steps * RANKS * BATCH_SIZE))
        simulated = promise(job, path, steps)
        # The part of an unbalanced step that depends on its samples, and the rest.
        fixed = job.fixed_share * step_ms / 1e3
        second = (step_ms / 1e3 - fixed) / summarize(simulated).heaviest_before
        overhead = run(job, path, is_balanced=True, second=0.0, fixed=0.0).step_seconds
        load = round((fixed + overhead) / second)
        promised = summarize([with_fixed_load(step, load) for step in simulated])
        before, after = (run(job, path, is_balanced=balanced, second=second, fixed=fixed) for balanced in (False, True))
    speedup = before.step_seconds / after.step_seconds
    shares = {
        "idle_before": (promised.idle_before, before.measured_idle_after),
        "idle_after": (promised.idle_after, after.measured_idle_after),
        "speedup": (promised.speedup, speedup),
    }
    return {
        "job": name,
        "steps": steps,
        "overhead_ms": round(1e3 * overhead, 1),
        "step_ms": [round(1e3 * one.step_seconds, 1) for one in (before, after)],
        **{name: {"promised": round(one, 3), "measured": round(other, 3)} for name, (one, other) in shares.items()},
        "measured_over_promised": round(speedup / promised.speedup, 3),
    }


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--jobs", default=",".join(JOBS))
    options = parser.parse_args()
    for name in options.jobs.split(","):
        print(json.dumps(measure(name, steps=options.steps, step_ms=options.step_ms)), flush=True)


if __name__ == "__main__":
    main()
