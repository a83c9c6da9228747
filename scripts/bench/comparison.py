"""Compare what decides who trains which sample: random batches, length grouping, sequence-length balancing, evenrank.

    .venv/bin/python scripts/bench/comparison.py [--ranks 8,64,1024] [--lengths DISTRIBUTION]... [--rounds 3]

Prints one JSON line per row, then a table for each number of ranks and distribution of lengths. All methods of a table
get the same samples in the same random order; balancing_methods.py says what each method does. Nothing is trained:
loads are costs of an HSTU model (8 layers, 1,024 wide, interleaved actions) and of a self-attention model (4 layers,
256 wide).

    hstu, attention        heaviest load over the mean load of the step's ranks, mean over steps
    hstu_worst             the same, maximum over steps
    hstu_epoch, attention_epoch
                           sum over steps of the heaviest load, over that of the mean load: the time of the epoch over
                           that of a perfectly even one, if ranks wait for each other in every step
    padding                fraction of padding if each rank pads its samples to the longest of them
    padded_epoch           attention_epoch of a model that computes on this padding, over the same even epoch without it
    x_chance               variance over steps of the mean length of a step's samples, over that of random batches: 1 is
                           chance, within 2 * sqrt(2 / steps); null if all samples are equally long
    most, fewest           samples of a rank in a step
    moved                  fraction of tokens that are trained on another rank than the one that loaded them; null if
                           ranks load what they train
    all_to_all_mb          what a rank receives per step if just those are sent, in megabytes (10^6 bytes)
    all_gather_mb          what it receives if every rank gets all samples
    ms                     CPU time to plan a step for the HSTU model, in one thread, median over rounds
    x_lpt_swap             ms relative to lpt-swap, median over rounds

A sample has two int64 values per event, its item and its action.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
from balancing_methods import AFTER_LOADING, METHODS, MODELS, WINDOW, Epoch, Ints, Plan, home
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance.warmup import warm_up
from evenrank.datasets.distributions import parse_distribution
from rendering.markdown_tables import table

Row = dict[str, int | float | str | None]

LENGTHS = ("lognormal:mean=512,std=512,high=4096", "clipped-zipf:exponent=1.2,high=4096")
BATCH_SIZE = 32
_BYTES_PER_EVENT = 16
_NAMES = {"hstu": "HSTU", "attention": "self-attention"}


def per_rank(plan: Plan, values: NDArray[np.integer], world_size: int) -> NDArray[np.float64]:
    """Return the sum of values of each rank's samples: float64 [S, W]."""
    num_steps = len(plan.samples)
    slots = plan.rank_of + world_size * np.arange(num_steps)[:, np.newaxis]
    sums = np.bincount(slots.reshape(-1), values[plan.samples].reshape(-1), num_steps * world_size)
    return sums.reshape(num_steps, world_size).astype(np.float64)


def longest_per_rank(plan: Plan, lengths: Ints, world_size: int) -> Ints:
    """Return the length of each rank's longest sample: int64 [S, W]."""
    longest = np.zeros((len(plan.samples), world_size), dtype=np.int64)
    np.maximum.at(longest, (np.arange(len(longest))[:, np.newaxis], plan.rank_of), lengths[plan.samples])
    return longest


def epoch_time(loads: NDArray[np.float64]) -> float:
    """Return the sum over steps of the heaviest load [S, W], over that of the mean load."""
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def padding(plan: Plan, epoch: Epoch) -> Row:
    """Return the columns about ranks that pad their samples to the longest of them."""
    counts = per_rank(plan, np.ones_like(epoch.lengths), epoch.world_size)
    longest = longest_per_rank(plan, epoch.lengths, epoch.world_size)
    padded_load = counts * epoch.model.costs(longest)
    even_load = epoch.model.costs(epoch.lengths).sum() / counts.size
    return {
        "padding": round(float(1 - epoch.lengths.sum() / (counts * longest).sum()), 4),
        "padded_epoch": round(float(padded_load.max(axis=1).mean() / even_load), 3),
        "most": int(counts.max()),
        "fewest": int(counts.min()),
    }


def measure_steps(plan: Plan, epoch: Epoch, *, is_loaded: bool) -> Row:
    """Return the columns about what is in a step, and what has to be sent if ranks have loaded its samples."""
    lengths, world_size = epoch.lengths, epoch.world_size
    samples_per_step = world_size * epoch.batch_size
    mean_lengths = lengths[plan.samples].mean(axis=1)
    even = lengths.sum() / (len(plan.samples) * world_size)
    by_chance = float(lengths.var() / samples_per_step)
    row: Row = {
        "x_chance": round(float(mean_lengths.var()) / by_chance, 3) if by_chance else None,
    }
    all_gathered = even * (world_size - 1) * _BYTES_PER_EVENT / 1e6
    if not is_loaded:
        return row | {"moved": None, "all_to_all_mb": None, "all_gather_mb": None}
    moved = lengths[plan.samples[plan.rank_of != home(epoch)]].sum() / lengths.sum()
    return row | {
        "moved": round(float(moved), 4),
        "all_to_all_mb": round(float(moved * even) * _BYTES_PER_EVENT / 1e6, 3),
        "all_gather_mb": round(float(all_gathered), 3),
    }


def measure(lengths: Ints, world_size: int, rounds: int) -> list[Row]:
    """Return a row for each method, all of the same samples."""
    epochs = {name: Epoch(lengths, model, world_size, BATCH_SIZE) for name, model in MODELS.items()}
    rows: list[Row] = []
    for method, plan_epoch in METHODS.items():
        row: Row = {"method": method}
        for name, epoch in epochs.items():
            plan = plan_epoch(epoch)
            loads = per_rank(plan, epoch.model.costs(lengths), world_size)
            imbalance = loads.max(axis=1) / loads.mean(axis=1)
            row[name] = round(float(imbalance.mean()), 4)
            row[f"{name}_worst"] = round(float(imbalance.max()), 4)
            row[f"{name}_epoch"] = round(epoch_time(loads), 4)
            if name == "hstu":
                row |= measure_steps(plan, epoch, is_loaded=method in AFTER_LOADING)
            else:
                row |= padding(plan, epoch)
        rows.append(row)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, plan_epoch in METHODS.items():
            started = time.thread_time()
            plan_epoch(epochs["hstu"])
            seconds[method].append(time.thread_time() - started)
    num_steps = len(lengths) // (world_size * BATCH_SIZE)
    for row, of_method in zip(rows, seconds.values(), strict=True):
        relative = [one / other for one, other in zip(of_method, seconds["lpt-swap"], strict=True)]
        row["ms"] = round(1e3 * statistics.median(of_method) / num_steps, 4)
        row["x_lpt_swap"] = round(statistics.median(relative), 2)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table."""

    def percent(value: object) -> str:
        return "" if value is None else f"{100 * float(str(value)):.0f}%"

    columns = ["method", *(f"{name}, {what}" for name in _NAMES.values() for what in ("mean (worst)", "epoch"))]
    columns += ["padding", "padded epoch", "x chance", "samples", "moved", "all-to-all MB", "ms", "x lpt-swap"]
    cells = []
    for row in rows:
        of_row = [str(row["method"])]
        for name in _NAMES:
            of_row += [f"{row[name]:.3f} ({row[f'{name}_worst']:.3f})", f"{row[f'{name}_epoch']:.3f}"]
        samples = f"{row['most']}" if row["most"] == row["fewest"] else f"{row['fewest']} to {row['most']}"
        chance = "" if row["x_chance"] is None else f"{row['x_chance']:.2f}"
        sent = "" if row["all_to_all_mb"] is None else f"{row['all_to_all_mb']:.2f}"
        of_row += [percent(row["padding"]), f"{row['padded_epoch']:.2f}", chance, samples]
        cells.append([*of_row, percent(row["moved"]), sent, f"{row['ms']:.3f}", f"{row['x_lpt_swap']:.2f}"])
    return table(columns, cells)


def main() -> None:
    """Print all rows, and their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,1024", help="world sizes, comma-separated")
    parser.add_argument(
        "--lengths",
        action="append",
        help="a distribution of events per sample, as for `evenrank simulate`; may be repeated. Default: a lognormal "
        "and a clipped Zipf distribution",
    )
    parser.add_argument("--samples", type=int, default=1 << 21, help="of an epoch, at most")
    parser.add_argument("--steps", type=int, default=256, help="of an epoch, at most")
    parser.add_argument("--rounds", type=int, default=3, help="in which the methods take turns to be timed")
    arguments = parser.parse_args()
    warm_up()
    try:
        distributions = {text: parse_distribution(text) for text in arguments.lengths or LENGTHS}
        world_sizes = [int(text) for text in arguments.ranks.split(",")]
    except (ConfigError, DataError, ValueError) as error:
        parser.error(str(error))
    tables = []
    for text, distribution in distributions.items():
        for world_size in world_sizes:
            num_steps = min(arguments.steps, arguments.samples // (world_size * BATCH_SIZE)) // WINDOW * WINDOW
            if not num_steps:
                parser.error(
                    f"an epoch of {arguments.samples} samples and {arguments.steps} steps has no window of {WINDOW} "
                    f"steps of {world_size} ranks; raise --samples or --steps"
                )
            lengths = distribution.sample(np.random.default_rng(0), num_steps * world_size * BATCH_SIZE)
            setting: Row = {"lengths": text, "ranks": world_size, "steps": num_steps}
            rows = [setting | row for row in measure(lengths, world_size, arguments.rounds)]
            for row in rows:
                print(json.dumps(row), flush=True)
            all_gather = f"{rows[0]['all_gather_mb']:,} MB per rank and step"
            caption = f"{text}, {world_size:,} ranks, {num_steps:,} steps; an all-gather brings {all_gather}"
            tables.append(f"\n{caption}\n\n{markdown(rows)}")
    print("".join(tables), end="")


if __name__ == "__main__":
    main()
