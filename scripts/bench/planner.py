"""Compare the partition strategies, and time how one rank plans the steps of all ranks.

    .venv/bin/python scripts/bench/planner.py [--draws 200] [--ranks 8,64,256,1024] [--batch-sizes 4,8,16,32,64,128]
    .venv/bin/python scripts/bench/planner.py --ranks 16384 --batch-sizes 32 --draws 5
    .venv/bin/python scripts/bench/planner.py --part no-exchange [--ranks 8,64,512,1024,4096,16384] [--rounds 5]

Strategies: all of a row's distribution, number of ranks and batch size run on the same draws.

    ratio, worst       heaviest load over the lower bound, median and maximum over draws
    moved              fraction of tokens trained on another rank than the one that loaded them, median over draws
    ms, worst_ms       time, median and maximum over draws
    x_kk               time relative to karmarkar-karp with equal counts, on the same costs in the same run

Lengths: lognormal (mean 512, std 512), Zipf 1.2 truncated at 4096, and Zipf 1.2 with larger draws set to 4096. Cost of
a sample of s tokens: 10 s h^2 + 4 s^2 h, h = 1024. The tolerance is 0.01 for `min-move` and 0.001 for the others.

No exchange: one rank's loader, without a process group; 32 samples per rank, lognormal lengths, an HSTU model of 8
layers, 1,024 wide. All events of the store are one element in memory, so that an epoch of 16,384 ranks fits.

    ms                 one thread's time per step to find this rank's samples: order, lengths, costs, partition
    with_metrics_ms    the same for a loader with `on_step`, which has every step measured
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.dataloader.balance.partition.strategies import STRATEGIES, lower_bound, partition, warm_up
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.random_batches import RandomData, draw_samples
from evenrank.dataloader.sampling.balanced_steps import make_step_sampler
from evenrank.dataloader.sampling.steps import StepShape, StoredSamples
from evenrank.dataloader.state.resume_point import ResumePoint
from evenrank.datasets import SequenceStore
from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.datasets.order import RowOrder, Samples
from report import Row, emit, machine, show

Ints = NDArray[np.int64]

HIDDEN, MAX_LENGTH = 1024, 4096
LENGTHS: dict[str, Callable[[np.random.Generator, int], Ints]] = {
    "lognormal": lambda rng, size: Lognormal(mean=512, std=512).sample(rng, size),
    "zipf": Zipf(exponent=1.2).sample,
    "zipf-clipped": lambda rng, size: np.minimum(rng.zipf(1.2, size), MAX_LENGTH),
}
COST = HSTUCost(hidden=HIDDEN, heads=4, head_dim=256, layers=8, interleave_actions=True)
_CONFIG = LoaderConfig(batch_size=32, max_history_length=4095, max_num_candidates=1)
_MIN_STEPS, _MIN_SAMPLES = 8, 1 << 17  # of an epoch of the most ranks, and of few


def compare(name: str, world_size: int, batch_size: int, draws: int) -> list[Row]:
    """Run all strategies on the same draws and return a row for each."""
    values_of: dict[str, dict[str, list[float]]] = {strategy: defaultdict(list) for strategy in STRATEGIES}
    for seed in range(draws):
        tokens = LENGTHS[name](np.random.default_rng(seed), world_size * batch_size).astype(np.int64)
        costs = 10 * tokens * HIDDEN**2 + 4 * tokens**2 * HIDDEN
        bound = lower_bound(costs, world_size)
        for strategy, values in values_of.items():
            options = {"strategy": strategy, "tolerance": 0.01 if strategy == "min-move" else 0.001}
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


def make_store(num_rows: int) -> SequenceStore:
    """Return rows of drawn lengths, whose events are all the same element in memory."""
    store = draw_samples(RandomData(), np.random.default_rng(0), 1, min_length=1, split="train")
    lengths = Lognormal(mean=512, std=512, low=1, high=MAX_LENGTH).sample(np.random.default_rng(0), num_rows)
    offsets: Ints = np.concatenate([[0], np.cumsum(lengths)])
    columns = {name: np.broadcast_to(values[:1], offsets[-1:]) for name, values in store.columns.items()}
    return replace(store, offsets=offsets, columns={**columns, "user_id": np.arange(num_rows)})


def plan_alone(world_size: int, rounds: int) -> Row:
    """Return the row of the rank in the middle of so many, which plans for all of them."""
    samples_per_step = world_size * _CONFIG.batch_size
    num_steps = max(_MIN_SAMPLES // samples_per_step, _MIN_STEPS)
    store = make_store(num_steps * samples_per_step)
    samples = StoredSamples([store], Collate.create(_CONFIG, store.manifest), _CONFIG.batch_size)
    shape = StepShape(rank=world_size // 2, world_size=world_size, batch_size=_CONFIG.batch_size, drop_last=False)
    sampler = make_step_sampler(samples, shape, BalanceConfig(cost=COST))
    order = RowOrder(samples=Samples(num_rows=len(store), left_out=np.empty(0, dtype=np.int64)), shuffle=True)
    iteration = sampler.begin(order, ResumePoint(), seed=0)
    ms: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for is_measured, of_rounds in ms.items():
            started = time.perf_counter()
            planned = sampler.sample(iteration, range(_MIN_STEPS), is_measured=is_measured)
            of_rounds += [1e3 * (time.perf_counter() - started) / len(planned)] if number else []
    metrics = [step.metrics for step in planned if step.metrics is not None]
    return {
        "ranks": world_size,
        "before": round(statistics.median(step.ratio_before for step in metrics), 3),
        "after": round(statistics.median(step.ratio_after for step in metrics), 4),
        "worst": round(max(step.ratio_after for step in metrics), 4),
        "ms": ms[False],
        "with_metrics_ms": ms[True],
    }


def main() -> None:
    """Print the rows of the strategies, or of planning with no exchange."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["strategies", "no-exchange"], default="strategies")
    parser.add_argument("--draws", type=int, default=200, help="steps to draw for each row")
    parser.add_argument("--ranks", help="world sizes, comma-separated")
    parser.add_argument("--batch-sizes", default="4,8,16,32,64,128", help="samples per rank, comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="of timing, with no exchange")
    options = parser.parse_args()
    emit(machine())
    is_alone, rows = options.part == "no-exchange", list[Row]()
    default = "8,64,512,1024,4096,16384" if is_alone else "8,64,256,1024"
    for strategy in STRATEGIES:
        warm_up(strategy)
    all_ranks = [int(ranks) for ranks in (options.ranks or default).split(",")]
    if is_alone:
        rows = [emit(plan_alone(ranks, options.rounds)) for ranks in all_ranks]
    else:
        for name in LENGTHS:
            for ranks in all_ranks:
                for batch_size in map(int, options.batch_sizes.split(",")):
                    rows += map(emit, compare(name, ranks, batch_size, options.draws))
    show(rows)


if __name__ == "__main__":
    main()
