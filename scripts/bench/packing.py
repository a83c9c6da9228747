"""Compare packed steps with batches of a fixed size that need the same memory: tokens per step, balance, and time.

    .venv/bin/python scripts/bench/packing.py [--samples 200000] [--ranks 8,64] [--budgets 8192,16384,65536]

Prints one JSON line per row. All rows of a number of ranks and a budget, the tokens of a rank that fit its memory, have
the same samples in the same order:

    way                  packed; balanced: the largest fixed batch size for which `max_tokens_per_rank` can be kept in
                         every step; unbalanced: the largest for which the ranks' shares of the order are within it
    batch_size           samples per rank, at most (packed) or exactly
    steps                of the epoch
    fill                 tokens per rank and step over the budget, mean over all steps but the last
    peak                 tokens of the fullest rank of any step over the budget
    ratio, worst_ratio   load of the heaviest rank over the mean of the ranks, median and maximum over steps
    samples_per_s        samples whose steps are planned in a second, best of 3 runs (packed)
    assign_ms            time to assign a step's samples to ranks, median over steps

Lengths: lognormal (mean 512, std 512, clipped to 1..4096). Cost of a sample of s tokens: 10 s h^2 + 4 s^2 h, h = 1024.
"""

import argparse
import json
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.packing import pack
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.balance.warmup import warm_up
from evenrank.datasets.distributions import Lognormal
from evenrank.datasets.order import EpochSchedule, StepSchedule

Ints = NDArray[np.int64]

HIDDEN = 1024
LENGTHS = Lognormal(mean=512, std=512)
ROOM = 4  # the batch size of packed steps over the mean number of samples that fit a rank


class Step(NamedTuple):
    """What a step does."""

    tokens: Ints
    """[W], of each rank."""
    loads: Ints
    """[W]: cost of each rank."""
    seconds: float
    """Time of the assignment."""


def assign(tokens: Ints, num_loaded: Ints, batch_size: int, budget: int) -> Step:
    """Balance a step, given the tokens of its samples, and how many of these each rank loads.

    Raises:
        ConfigError: no assignment is within the budget.

    """
    world_size = len(num_loaded)
    is_real = np.arange(batch_size) < num_loaded[:, np.newaxis]
    rows = np.zeros(is_real.shape, dtype=np.int64)
    rows[is_real] = tokens
    costs = 10 * rows * HIDDEN**2 + 4 * rows**2 * HIDDEN
    started = time.perf_counter()
    assignment = partition(costs, world_size, tokens=rows, num_real=num_loaded, max_tokens_per_rank=budget)
    seconds = time.perf_counter() - started
    return Step(assignment.loads(rows), assignment.loads(costs), seconds)


def share(tokens: Ints, num_loaded: Ints, budget: int) -> Step:
    """Leave a step as it is.

    Raises:
        ConfigError: a rank is above the budget.

    """
    rank_of = np.repeat(np.arange(len(num_loaded)), num_loaded)
    costs = 10 * tokens * HIDDEN**2 + 4 * tokens**2 * HIDDEN
    tokens_of_rank, loads = np.zeros((2, len(num_loaded)), dtype=np.int64)
    np.add.at(tokens_of_rank, rank_of, tokens)
    np.add.at(loads, rank_of, costs)
    if tokens_of_rank.max() > budget:
        raise ConfigError(f"a rank has {tokens_of_rank.max()} tokens, more than {budget}")
    return Step(tokens_of_rank, loads, 0.0)


def run(tokens: Ints, schedule: StepSchedule, batch_size: int, budget: int, *, balances: bool) -> list[Step]:
    """Return all steps of an epoch.

    Raises:
        ConfigError: a step is above the budget.

    """
    steps = []
    for step in range(schedule.num_steps):
        own, num_loaded = tokens[schedule.positions_of_all(range(step, step + 1))], schedule.num_loaded(step)
        steps.append(assign(own, num_loaded, batch_size, budget) if balances else share(own, num_loaded, budget))
    return steps


def run_largest(tokens: Ints, world_size: int, budget: int, *, balances: bool) -> tuple[int, list[Step]]:
    """Return the largest fixed batch size that is within the budget, by bisection, and the steps of an epoch."""
    best: tuple[int, list[Step]] = (0, [])
    low, high = 1, budget
    while low <= high:
        batch_size = (low + high) // 2
        schedule = EpochSchedule(num_samples=len(tokens), world_size=world_size, batch_size=batch_size)
        try:
            best = batch_size, run(tokens, schedule, batch_size, budget, balances=balances)
            low = batch_size + 1
        except ConfigError:
            high = batch_size - 1
    return best


def plan(tokens: Ints, world_size: int, batch_size: int, budget: int) -> StepSchedule:
    """Pack an epoch."""
    return pack(
        lambda positions: tokens[positions],
        num_samples=len(tokens),
        start=0,
        world_size=world_size,
        batch_size=batch_size,
        max_tokens=budget,
        drop_last=False,
    )


def describe(steps: list[Step], budget: int) -> dict[str, object]:
    """Return the columns that follow from the steps."""
    ratios = [float(step.loads.max() / step.loads.mean()) for step in steps[:-1]]
    return {
        "steps": len(steps),
        "fill": round(float(np.mean([step.tokens.mean() for step in steps[:-1]])) / budget, 4),
        "peak": round(max(int(step.tokens.max()) for step in steps) / budget, 4),
        "ratio": round(float(np.median(ratios)), 4),
        "worst_ratio": round(max(ratios), 4),
        "assign_ms": round(1e3 * float(np.median([step.seconds for step in steps])), 3),
    }


def measure(tokens: Ints, world_size: int, budget: int) -> list[dict[str, object]]:
    """Return the rows of a number of ranks and a budget."""
    setting: dict[str, object] = {"ranks": world_size, "budget": budget}
    batch_size = ROOM * budget // int(tokens.mean())
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        schedule = plan(tokens, world_size, batch_size, budget)
        seconds.append(time.perf_counter() - started)
    packed = run(tokens, schedule, batch_size, budget, balances=True)
    speed = {"samples_per_s": round(len(tokens) / min(seconds))}
    rows = [{**setting, "way": "packed", "batch_size": batch_size, **describe(packed, budget), **speed}]
    for way in ("balanced", "unbalanced"):
        fixed_size, steps = run_largest(tokens, world_size, budget, balances=way == "balanced")
        rows.append({**setting, "way": way, "batch_size": fixed_size, **describe(steps, budget)})
    return rows


def main() -> None:
    """Print the rows of each number of ranks and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000, help="of an epoch")
    parser.add_argument("--ranks", default="8,64", help="numbers of ranks, comma-separated")
    parser.add_argument("--budgets", default="8192,16384,65536", help="tokens per rank, comma-separated")
    arguments = parser.parse_args()
    warm_up()
    tokens = LENGTHS.sample(np.random.default_rng(0), arguments.samples).astype(np.int64)
    plan(tokens[:100], 2, 8, 8192)  # compiles it
    for world_size in map(int, arguments.ranks.split(",")):
        for budget in map(int, arguments.budgets.split(",")):
            for row in measure(tokens, world_size, budget):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
