"""Partition strategies side by side: heaviest rank over the lower bound, and time, with numpy.argsort beside them.

    .venv/bin/python scripts/bench/planner.py [--draws 20] [--ranks 8,64,256,1024]

One JSON line a row. Times are medians over draws, in milliseconds; `x_argsort` is a strategy's time over that of
numpy.argsort of the same costs.
"""

import argparse
import json
import time

import numpy as np

from evenrank.dataloader.balance.partition import STRATEGIES, lower_bound, partition
from evenrank.datasets.distributions import Distribution, Lognormal, Zipf

HIDDEN = 1024
BATCH_SIZE = 32
LENGTHS: dict[str, Distribution] = {"lognormal": Lognormal(mean=512, std=512), "zipf": Zipf(exponent=1.2)}


def draw_costs(lengths: Distribution, world_size: int, seed: int) -> np.ndarray:
    """Draw the costs of a step: 10 s h^2 + 4 s^2 h for a sample of s tokens."""
    tokens = lengths.sample(np.random.default_rng(seed), world_size * BATCH_SIZE)
    return 10 * tokens * HIDDEN**2 + 4 * tokens**2 * HIDDEN


def measure(strategy: str, lengths: Distribution, world_size: int, draws: int) -> dict[str, float]:
    """Run a strategy on several draws, with a sort of the same costs before each."""
    partition(draw_costs(lengths, world_size, 0), world_size, strategy=strategy)  # compiles
    ratios, times, sorts = [], [], []
    for seed in range(draws):
        costs = draw_costs(lengths, world_size, seed)
        begun = time.perf_counter()
        np.argsort(costs)
        sorted_at = time.perf_counter()
        assignment = partition(costs, world_size, strategy=strategy)
        times.append(time.perf_counter() - sorted_at)
        sorts.append(sorted_at - begun)
        ratios.append(int(assignment.loads(costs).max()) / lower_bound(costs, world_size))
    return {
        "ratio": round(float(np.median(ratios)), 5),
        "worst_ratio": round(max(ratios), 5),
        "ms": round(float(np.median(times)) * 1e3, 4),
        "x_argsort": round(float(np.median(times) / np.median(sorts)), 2),
    }


def main() -> None:
    """Print a line for each distribution, world size and strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--ranks", default="8,64,256,1024")
    arguments = parser.parse_args()
    for name, lengths in LENGTHS.items():
        for world_size in map(int, arguments.ranks.split(",")):
            for strategy in STRATEGIES:
                row = {"lengths": name, "ranks": world_size, "batch_size": BATCH_SIZE, "strategy": strategy}
                print(json.dumps({**row, **measure(strategy, lengths, world_size, arguments.draws)}), flush=True)


if __name__ == "__main__":
    main()
