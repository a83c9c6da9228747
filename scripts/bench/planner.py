"""Compare the partition strategies: heaviest load over the lower bound, tokens moved, and time.

    .venv/bin/python scripts/bench/planner.py [--draws 200] [--ranks 8,64,256,1024] [--batch-sizes 4,8,16,32,64,128]
    .venv/bin/python scripts/bench/planner.py --ranks 16384 --batch-sizes 32 --draws 5

All strategies of a distribution, a number of ranks and a batch size run on the same draws:

    ratio, worst       heaviest load over the lower bound, median and maximum over draws
    moved              fraction of tokens trained on another rank than the one that loaded them, median over draws
    ms, worst_ms       time, median and maximum over draws
    x_kk               time relative to karmarkar-karp with equal counts, on the same costs in the same run

Lengths: lognormal (mean 512, std 512), Zipf 1.2 truncated at 4096, and Zipf 1.2 with larger draws set to 4096. Cost of
a sample of s tokens: 10 s h^2 + 4 s^2 h, h = 1024. The tolerance is 0.01 for `min-move` and 0.001 for the others.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.partition.strategies import STRATEGIES, lower_bound, partition, warm_up
from evenrank.datasets.distributions import Lognormal, Zipf
from report import Row, emit, machine, show

Ints = NDArray[np.int64]

HIDDEN, MAX_LENGTH = 1024, 4096
LENGTHS: dict[str, Callable[[np.random.Generator, int], Ints]] = {
    "lognormal": lambda rng, size: Lognormal(mean=512, std=512).sample(rng, size),
    "zipf": Zipf(exponent=1.2).sample,
    "zipf-clipped": lambda rng, size: np.minimum(rng.zipf(1.2, size), MAX_LENGTH),
}


def compare(name: str, world_size: int, batch_size: int, draws: int) -> list[Row]:
    """Run all strategies on the same draws and return a row for each."""
    values_of: dict[str, dict[str, list[float]]] = {strategy: defaultdict(list) for strategy in STRATEGIES}
    for seed in range(draws):
        tokens = LENGTHS[name](np.random.default_rng(seed), world_size * batch_size).astype(np.int64)
        costs = 10 * tokens * HIDDEN**2 + 4 * tokens**2 * HIDDEN
        bound = lower_bound(costs, world_size)
        for strategy, values in values_of.items():
            options: Any = {"strategy": strategy, "tolerance": 0.01 if strategy == "min-move" else 0.001}
            # min-move needs the tokens to move few of them; the others are timed without relabelling.
            started = time.perf_counter()
            assignment = partition(costs, world_size, tokens=tokens if strategy == "min-move" else None, **options)
            values["ms"].append(1e3 * (time.perf_counter() - started))
            moved = partition(costs, world_size, tokens=tokens, **options).moved.reshape(-1)
            values["moved"].append(float(tokens[moved].sum() / max(tokens.sum(), 1)))
            values["ratio"].append(float(assignment.loads(costs).max()) / bound)
    kk_ms = float(np.median(values_of["karmarkar-karp"]["ms"]))
    shared = {"lengths": name, "ranks": world_size, "batch_size": batch_size}
    return [
        {
            **shared,
            "strategy": strategy,
            "ratio": round(float(np.median(values["ratio"])), 5),
            "worst": round(max(values["ratio"]), 5),
            "moved": round(float(np.median(values["moved"])), 4),
            "ms": round(float(np.median(values["ms"])), 4),
            "worst_ms": round(max(values["ms"]), 4),
            "x_kk": round(float(np.median(values["ms"])) / kk_ms, 2),
        }
        for strategy, values in values_of.items()
    ]


def main() -> None:
    """Print a row for each distribution, world size, batch size and strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="steps to draw for each row")
    parser.add_argument("--ranks", default="8,64,256,1024", help="world sizes, comma-separated")
    parser.add_argument("--batch-sizes", default="4,8,16,32,64,128", help="samples per rank, comma-separated")
    options = parser.parse_args()
    emit(machine())
    rows = list[Row]()
    for strategy in STRATEGIES:
        warm_up(strategy)
    for name in LENGTHS:
        for ranks in map(int, options.ranks.split(",")):
            for batch_size in map(int, options.batch_sizes.split(",")):
                rows += map(emit, compare(name, ranks, batch_size, options.draws))
    show(rows)


if __name__ == "__main__":
    main()
