"""Partition strategies side by side: heaviest rank over the lower bound, tokens moved, and time.

    .venv/bin/python scripts/bench/planner.py [--draws 200] [--ranks 8,64,256,1024] [--batch-sizes 4,8,16,32,64,128]
    .venv/bin/python scripts/bench/planner.py --ranks 16384 --batch-sizes 32 --draws 5

One JSON line a row, of the same draws for every strategy:

    ratio, worst       heaviest rank over the lower bound, median and largest over draws
    simple_ratio       the same over a simpler bound: mean, largest with the B - 1 smallest, W-th and next with B - 2
    moved              tokens that are trained on another rank than the one that loaded them, median, parts named
    least_moved        what no strategy can be below to reach 1.01: the excess of each rank, in its densest samples
    ms, worst_ms       time, median and largest over draws
    x_argsort, x_kk    time over that of numpy.argsort, and of our karmarkar-karp, for the same costs in the same run

Lengths: lognormal (mean 512, std 512), Zipf 1.2 cut off at 4096, and Zipf 1.2 with what is above 4096 set to 4096.
Cost of a sample of s tokens: 10 s h^2 + 4 s^2 h, h = 1024. `min-move` has a tolerance of 0.01, the others 0.001.
"""

import argparse
import json
import time
from collections import defaultdict

import numpy as np

from evenrank.dataloader.balance.partition.strategies import STRATEGIES, Assignment, lower_bound, partition
from evenrank.dataloader.balance.warmup import compile_ahead
from evenrank.datasets.distributions import Lognormal, Zipf

HIDDEN = 1024
LONGEST = 4096
LENGTHS = {
    "lognormal": lambda rng, size: Lognormal(mean=512, std=512).sample(rng, size),
    "zipf": lambda rng, size: ZIPF.sample(rng, size),
    "zipf-clipped": lambda rng, size: np.minimum(rng.zipf(1.2, size), LONGEST),
}
ZIPF = Zipf(exponent=1.2)
TOLERANCES = {"min-move": 0.01}


def draw(name: str, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the tokens of a step and what they cost."""
    tokens = LENGTHS[name](np.random.default_rng(seed), size).astype(np.int64)
    return tokens, 10 * tokens * HIDDEN**2 + 4 * tokens**2 * HIDDEN


def simple_bound(costs: np.ndarray, world_size: int) -> int:
    """The largest of the mean, c_1 + the B - 1 smallest, and c_W + c_(W+1) + the B - 2 smallest."""
    ascending = np.sort(costs)
    batch_size = len(ascending) // world_size
    bound = max(-(-int(ascending.sum()) // world_size), int(ascending[-1] + ascending[: batch_size - 1].sum()))
    if batch_size < 2:
        return bound
    return max(bound, int(ascending[-world_size] + ascending[-world_size - 1] + ascending[: batch_size - 2].sum()))


def least_moved(tokens: np.ndarray, costs: np.ndarray, world_size: int, target: float) -> float:
    """Part of the tokens that must leave ranks above `target`: their excess in the samples of most cost a token."""
    shape = (world_size, -1)
    order = np.argsort(-(costs / np.maximum(tokens, 1)).reshape(shape), axis=1)
    dense = np.take_along_axis(costs.reshape(shape), order, axis=1).astype(np.float64)
    sizes = np.take_along_axis(tokens.reshape(shape), order, axis=1).astype(np.float64)
    excess = np.maximum(dense.sum(axis=1, keepdims=True) - target, 0)
    before = np.cumsum(dense, axis=1) - dense
    part = np.clip((excess - before) / np.maximum(dense, 1), 0, 1)
    return float((part * sizes).sum() / max(tokens.sum(), 1))


def timed(costs: np.ndarray, world_size: int, strategy: str, sizes: np.ndarray | None) -> tuple[Assignment, float]:
    """Run a strategy and take its seconds."""
    tolerance = TOLERANCES.get(strategy, 0.001)
    begun = time.perf_counter()
    found = partition(costs, world_size, strategy=strategy, sizes=sizes, tolerance=tolerance)
    return found, time.perf_counter() - begun


def measure(name: str, world_size: int, batch_size: int, draws: int) -> list[dict[str, object]]:
    """Run all strategies on the same draws."""
    found: dict[str, dict[str, list[float]]] = {strategy: defaultdict(list) for strategy in STRATEGIES}
    sorts, least = [], []
    for seed in range(draws):
        tokens, costs = draw(name, world_size * batch_size, seed)
        begun = time.perf_counter()
        np.argsort(costs)
        sorts.append(time.perf_counter() - begun)
        bound, simple = lower_bound(costs, world_size), simple_bound(costs, world_size)
        least.append(least_moved(tokens, costs, world_size, 1.01 * bound))
        for strategy, values in found.items():
            # min-move needs the tokens to know what is little; the others are timed without naming the parts.
            bare, seconds = timed(costs, world_size, strategy, tokens if strategy == "min-move" else None)
            named, _ = timed(costs, world_size, strategy, tokens)
            heaviest = float(bare.loads(costs).max())
            values["ms"].append(1e3 * seconds)
            values["moved"].append(float(tokens[named.moved.reshape(-1)].sum() / max(tokens.sum(), 1)))
            values["ratio"].append(heaviest / bound)
            values["simple_ratio"].append(heaviest / simple)
    kk = float(np.median(found["karmarkar-karp"]["ms"]))
    rows = []
    for strategy, values in found.items():
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
                "x_argsort": round(ms / 1e3 / float(np.median(sorts)), 2),
                "x_kk": round(ms / kk, 2),
            }
        )
    return rows


def main() -> None:
    """Print a line for each distribution, world size, batch size and strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--batch-sizes", default="4,8,16,32,64,128")
    arguments = parser.parse_args()
    compile_ahead()
    for name in LENGTHS:
        for world_size in map(int, arguments.ranks.split(",")):
            for batch_size in map(int, arguments.batch_sizes.split(",")):
                for row in measure(name, world_size, batch_size, arguments.draws):
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
