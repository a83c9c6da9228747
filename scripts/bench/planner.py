"""Compare the partition strategies: heaviest load over the lower bound, tokens moved, and time.

    .venv/bin/python scripts/bench/planner.py [--draws 200] [--ranks 8,64,256,1024] [--batch-sizes 4,8,16,32,64,128]
    .venv/bin/python scripts/bench/planner.py --ranks 16384 --batch-sizes 32 --draws 5

Prints one JSON line per row; all strategies of a row run on the same draws:

    ratio, worst       heaviest load over the lower bound, median and maximum over draws
    simple_ratio       the same over a simpler bound: the largest of the mean, the largest cost with the B - 1 smallest,
                       and the W-th and (W+1)-th largest with the B - 2 smallest
    moved              fraction of tokens trained on another rank than the one that loaded them, median over draws
    least_moved        lower bound of `moved` for a ratio of 1.01: the excess of each rank, in its densest samples
    ms, worst_ms       time, median and maximum over draws
    x_argsort, x_kk    time relative to numpy.argsort and to our karmarkar-karp, on the same costs in the same run

Lengths: lognormal (mean 512, std 512), Zipf 1.2 truncated at 4096, and Zipf 1.2 with larger draws set to 4096. Cost of
a sample of s tokens: 10 s h^2 + 4 s^2 h, h = 1024. The tolerance is 0.01 for `min-move` and 0.001 for the others.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.strategies import STRATEGIES, Assignment, lower_bound, partition, warm_up
from evenrank.datasets.distributions import Lognormal, Zipf

Ints = NDArray[np.int64]

HIDDEN = 1024
MAX_LENGTH = 4096
ZIPF = Zipf(exponent=1.2)
LENGTHS: dict[str, Callable[[np.random.Generator, int], Ints]] = {
    "lognormal": lambda rng, size: Lognormal(mean=512, std=512).sample(rng, size),
    "zipf": lambda rng, size: ZIPF.sample(rng, size),
    "zipf-clipped": lambda rng, size: np.minimum(rng.zipf(1.2, size), MAX_LENGTH),
}
TOLERANCES: dict[str, float] = {"min-move": 0.01}


def draw(name: str, size: int, seed: int) -> tuple[Ints, Ints]:
    """Draw the tokens of a step's samples, and return them with their costs."""
    tokens = LENGTHS[name](np.random.default_rng(seed), size).astype(np.int64)
    return tokens, 10 * tokens * HIDDEN**2 + 4 * tokens**2 * HIDDEN


def simple_bound(costs: Ints, world_size: int) -> int:
    """Return the largest of the mean, c_1 + the B - 1 smallest, and c_W + c_(W+1) + the B - 2 smallest."""
    ascending = np.sort(costs)
    batch_size = len(ascending) // world_size
    bound = max(-(-int(ascending.sum()) // world_size), int(ascending[-1] + ascending[: batch_size - 1].sum()))
    if batch_size < 2:
        return bound
    return max(bound, int(ascending[-world_size] + ascending[-world_size - 1] + ascending[: batch_size - 2].sum()))


def least_moved(tokens: Ints, costs: Ints, world_size: int, target: float) -> float:
    """Return the fraction of tokens that must leave ranks above `target`: their excess, by most cost per token."""
    shape = (world_size, -1)
    by_density = np.argsort(-(costs / np.maximum(tokens, 1)).reshape(shape), axis=1)
    dense_costs = np.take_along_axis(costs.reshape(shape), by_density, axis=1).astype(np.float64)
    dense_tokens = np.take_along_axis(tokens.reshape(shape), by_density, axis=1).astype(np.float64)
    excess = np.maximum(dense_costs.sum(axis=1, keepdims=True) - target, 0)
    cumulative = np.cumsum(dense_costs, axis=1) - dense_costs
    fraction = np.clip((excess - cumulative) / np.maximum(dense_costs, 1), 0, 1)
    return float((fraction * dense_tokens).sum() / max(tokens.sum(), 1))


def timed(costs: Ints, world_size: int, strategy: str, tokens: Ints | None) -> tuple[Assignment, float]:
    """Run a strategy and return its assignment and its seconds."""
    tolerance = TOLERANCES.get(strategy, 0.001)
    started = time.perf_counter()
    assignment = partition(costs, world_size, strategy=strategy, tokens=tokens, tolerance=tolerance)
    return assignment, time.perf_counter() - started


def measure(name: str, world_size: int, batch_size: int, draws: int) -> list[dict[str, object]]:
    """Run all strategies on the same draws and return a row for each."""
    values_of: dict[str, dict[str, list[float]]] = {strategy: defaultdict(list) for strategy in STRATEGIES}
    sort_seconds, least = [], []
    for seed in range(draws):
        tokens, costs = draw(name, world_size * batch_size, seed)
        started = time.perf_counter()
        np.argsort(costs)
        sort_seconds.append(time.perf_counter() - started)
        bound, simple = lower_bound(costs, world_size), simple_bound(costs, world_size)
        least.append(least_moved(tokens, costs, world_size, 1.01 * bound))
        for strategy, values in values_of.items():
            # min-move needs the tokens to move few of them; the others are timed without relabelling.
            assignment, seconds = timed(costs, world_size, strategy, tokens if strategy == "min-move" else None)
            relabelled, _ = timed(costs, world_size, strategy, tokens)
            heaviest = float(assignment.loads(costs).max())
            values["ms"].append(1e3 * seconds)
            values["moved"].append(float(tokens[relabelled.moved.reshape(-1)].sum() / max(tokens.sum(), 1)))
            values["ratio"].append(heaviest / bound)
            values["simple_ratio"].append(heaviest / simple)
    baseline_ms = float(np.median(values_of["karmarkar-karp"]["ms"]))
    rows: list[dict[str, object]] = []
    for strategy, values in values_of.items():
        ms = float(np.median(values["ms"]))
        rows.append(
            {
                "lengths": name,
                "ranks": world_size,
                "batch_size": batch_size,
                "strategy": strategy,
                "ratio": round(float(np.median(values["ratio"])), 5),
                "worst": round(max(values["ratio"]), 5),
                "simple_ratio": round(float(np.median(values["simple_ratio"])), 5),
                "moved": round(float(np.median(values["moved"])), 4),
                "least_moved": round(float(np.median(least)), 4),
                "ms": round(ms, 4),
                "worst_ms": round(max(values["ms"]), 4),
                "x_argsort": round(ms / 1e3 / float(np.median(sort_seconds)), 2),
                "x_kk": round(ms / baseline_ms, 2),
            }
        )
    return rows


def main() -> None:
    """Print a row for each distribution, world size, batch size and strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="steps to draw for each row")
    parser.add_argument("--ranks", default="8,64,256,1024", help="world sizes, comma-separated")
    parser.add_argument("--batch-sizes", default="4,8,16,32,64,128", help="samples per rank, comma-separated")
    arguments = parser.parse_args()
    for strategy in STRATEGIES:
        warm_up(strategy)
    for name in LENGTHS:
        for world_size in map(int, arguments.ranks.split(",")):
            for batch_size in map(int, arguments.batch_sizes.split(",")):
                for row in measure(name, world_size, batch_size, arguments.draws):
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
