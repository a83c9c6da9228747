"""Measure windows of several steps: how even steps are, what that does to their samples, and what planning them costs.

    .venv/bin/python scripts/bench/window.py [--ranks 8,64,1024] [--batch-sizes 8,32] [--windows 1,2,4,8,16,32]
        [--planning-ranks 8,64,1024,16384] [--planning-windows 1,2,8,32] [--rounds 5]

Prints one JSON line per row, first about the steps of an epoch. All rows of a number of ranks, a batch size and a
distribution of lengths have the same samples; with window 1 their steps are a plain shuffle:

    heaviest           load of the heaviest rank over the mean load of a rank in the epoch, mean over steps: the time of
                       the epoch over that of a perfectly even one, if ranks wait for each other in every step
    heaviest_std       standard deviation over steps of the heaviest load, over its mean
    worst              maximum over steps of the heaviest load, over the mean load
    ratio              heaviest load over the step's own lower bound, mean over steps
    tokens_std         standard deviation over steps of the tokens of a step, over its mean
    loss_tokens_std    the same of the loss tokens, all items of a history but the first
    longest            samples at least as long as 99 % are, as a fraction of all: more than 1 % where lengths are equal
    dispersion         variance over steps of their number in a step, over that of a binomial distribution: 1 is chance
    weight             what a loss token of such a sample counts in the epoch, relative to all loss tokens: the loss of
                       a step is divided by the loss tokens of the step, so those of small steps count more
    cost_by_place      correlation between the cost of a sample and the place of its step in the window
    heaviest_by_place  the same of the heaviest load of a step, over steps; by chance it is within 2 / sqrt(steps)
    displacement       steps by which a sample is trained earlier or later than with window 1, mean

then about planning, for each number of ranks, with 32 samples per rank and lognormal lengths:

    ms                 one thread's time per step to sample a step, windows included
    x_window_1         ms relative to window 1, median over rounds
    first_ms           time until the first step of a window is sampled
    steps_per_second   of a whole loader with 4 workers
    state_bytes        what a state in the middle of a window adds to one between windows

Times are medians over rounds, in which all windows of a number of ranks take turns; each epoch is planned once. Windows
of more than 2^23 samples are left out. Only one rank's loader exists at a time, without a process group. The cost, and
the events in memory, are those of sampler.py.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from one_rank import COST, LENGTHS, Ints, OneRank, make_store
from sampler import Row, in_turns, median, ratio

from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.sampling.steps import Iteration
from evenrank.dataloader.state.resume_point import ResumePoint
from evenrank.datasets.distributions import ClippedZipf, Distribution

DISTRIBUTIONS: dict[str, Distribution] = {
    "lognormal": LENGTHS,
    "clipped-zipf": ClippedZipf(exponent=1.2, high=4096),
}
PLANNING_BATCH_SIZE = 32
_PLANNING_STEPS = 128  # of an epoch
_MAX_PLANNING_SAMPLES = 1 << 23  # of an epoch
_NUM_WORKERS = 4


def _config(batch_size: int) -> LoaderConfig:
    return LoaderConfig(batch_size=batch_size, max_history_length=4096)


def _balance(window: int) -> BalanceConfig:
    return BalanceConfig(cost=COST, window=window)


class Steps(NamedTuple):
    """The S steps of an epoch."""

    heaviest: Ints
    """[S]: load of the heaviest rank."""
    load: Ints
    """[S]: sum over ranks."""
    lower_bound: Ints
    """[S]: of the heaviest load."""
    tokens: Ints
    """[S]: of all ranks."""
    loss_tokens: Ints
    """[S]: of all ranks."""
    rows: Ints
    """[S, W * B]: the samples."""
    positions: Ints
    """[S, W * B]: of the samples in the shuffle, which window 1 trains in this order."""


def plan_epoch(rank: OneRank, window: int) -> Steps:
    """Return all steps of the first epoch."""
    sampler = rank.step_sampler(_balance(window))
    iteration = sampler.begin(rank.order, ResumePoint(), seed=0)
    num_steps = iteration.schedule.num_steps
    columns: list[tuple[int, ...]] = []
    rows = []
    for group in rank.groups(num_steps):
        for step in sampler.sample(iteration, group, is_measured=True):
            assert step.metrics is not None
            metrics, loads = step.metrics, step.metrics.after
            loss_tokens = step.fields["world_loss_tokens"]
            columns.append((int(loads.max()), int(loads.sum()), metrics.lower_bound, metrics.tokens, loss_tokens))
        rows.append(iteration.rows(iteration.schedule.positions_of_all(group)))
    of_row = np.empty(len(rank.store), dtype=np.int64)
    of_row[rank.order.rows(np.arange(len(of_row)), seed=0, epoch=0)] = np.arange(len(of_row))
    of_steps = np.concatenate(rows).reshape(num_steps, -1)
    heaviest, load, lower_bound, tokens, loss_tokens = np.array(columns, dtype=np.int64).T
    return Steps(heaviest, load, lower_bound, tokens, loss_tokens, of_steps, of_row[of_steps])


def relative_std(values: Ints) -> float:
    """Return the standard deviation over the mean."""
    return float(values.std() / values.mean())


def correlation(values: NDArray[np.integer], others: NDArray[np.integer]) -> float | None:
    """Return the correlation coefficient; None if either has one value only."""
    if values.min() == values.max() or others.min() == others.max():
        return None
    return float(np.corrcoef(values, others)[0, 1])


def rounded(value: float | None, digits: int) -> float | None:
    """Round a value, if there is one."""
    return None if value is None else round(value, digits)


def measure_steps(rank: OneRank, windows: Sequence[int]) -> list[Row]:
    """Return the columns of each window that follow from the steps of an epoch."""
    costs, lengths = rank.costs_and_tokens(np.arange(len(rank.store)))[0], rank.store.lengths
    is_long = lengths >= np.quantile(lengths, 0.99)
    loss_tokens = np.where(is_long, np.maximum(lengths - 1, 0), 0)
    rows = []
    for window in windows:
        steps = plan_epoch(rank, window)
        num_steps, samples_per_step = steps.rows.shape
        mean_load = float(steps.load.mean()) / rank.world_size
        place = np.arange(num_steps) % window
        num_long = is_long[steps.rows].sum(axis=1)
        fraction = float(is_long.mean())
        share = loss_tokens[steps.rows].sum(axis=1)
        weight = float((share / steps.loss_tokens).mean() / (share.sum() / steps.loss_tokens.sum()))
        moved = np.abs(steps.positions // samples_per_step - np.arange(num_steps)[:, np.newaxis])
        rows.append(
            {
                "window": window,
                "steps": num_steps,
                "heaviest": round(float(steps.heaviest.mean()) / mean_load, 4),
                "heaviest_std": round(relative_std(steps.heaviest), 4),
                "worst": round(float(steps.heaviest.max()) / mean_load, 4),
                "ratio": round(float((steps.heaviest / steps.lower_bound).mean()), 4),
                "tokens_std": round(relative_std(steps.tokens), 5),
                "loss_tokens_std": round(relative_std(steps.loss_tokens), 5),
                "longest": round(fraction, 4),
                "dispersion": round(float(num_long.var()) / (samples_per_step * fraction * (1 - fraction)), 3),
                "weight": round(weight, 4),
                "cost_by_place": rounded(correlation(costs[steps.rows].ravel(), place.repeat(samples_per_step)), 5),
                "heaviest_by_place": rounded(correlation(steps.heaviest, place), 3),
                "displacement": round(float(moved.mean()), 2),
            }
        )
    return rows


def measure_planning(world_size: int, windows: Sequence[int], rounds: int) -> list[Row]:
    """Return the rows of planning for a number of ranks."""
    samples_per_step = world_size * PLANNING_BATCH_SIZE
    windows = [window for window in windows if window * samples_per_step <= _MAX_PLANNING_SAMPLES]
    num_steps = min(_PLANNING_STEPS, _MAX_PLANNING_SAMPLES // samples_per_step)
    num_steps -= num_steps % max(windows)
    store = make_store(num_steps * samples_per_step)
    rank = OneRank(store=store, world_size=world_size, config=_config(PLANNING_BATCH_SIZE))
    prefetch = max(1, min(rank.config.prefetch, num_steps // (2 * _NUM_WORKERS)))  # several groups for each worker
    loaders = [rank.loader(_balance(window), num_workers=_NUM_WORKERS, prefetch=prefetch) for window in windows]

    def planning(window: int, groups: Sequence[range]) -> Callable[[], object]:
        sampler = rank.step_sampler(_balance(window))
        # Windows are planned once, so every call begins an epoch of its own.
        epochs = count()

        def plan() -> None:
            iteration: Iteration = sampler.begin(rank.order, ResumePoint(epoch=next(epochs)), seed=0)
            for group in groups:
                sampler.sample(iteration, group, is_measured=False)

        return plan

    of_all = [planning(window, rank.groups(max(windows))) for window in windows]
    of_first = [planning(window, [range(1)]) for window in windows]
    times = in_turns([*of_all, *of_first, *(lambda loader=loader: list(loader) for loader in loaders)], rounds)
    for loader in loaders:
        loader.close()
    planned, first, loaded = (times[begin : begin + len(windows)] for begin in range(0, len(times), len(windows)))
    return [
        {
            "planning_ranks": world_size,
            "window": window,
            "ms": round(1e3 * median(planned[i]) / max(windows), 3),
            "x_window_1": round(ratio(planned[i], planned[0]), 2),
            "first_ms": round(1e3 * median(first[i]), 2),
            "steps_per_second": round(num_steps / median(loaded[i]), 1),
            "state_bytes": state_bytes(rank, window),
        }
        for i, window in enumerate(windows)
    ]


def state_bytes(rank: OneRank, window: int) -> int:
    """Return the size of a state's window after the first half of a window."""
    loader = rank.loader(_balance(window), num_workers=0, prefetch=1)
    for _ in islice(loader, window // 2):
        pass
    return len(loader.state_dict()["pending"]) if window > 1 else 0


def whole_numbers(text: str) -> list[int]:
    """Parse numbers that are separated by commas; none if the text is empty."""
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,1024", help="world sizes whose steps are measured, comma-separated")
    parser.add_argument("--batch-sizes", default="8,32", help="samples per rank, comma-separated")
    parser.add_argument("--windows", default="1,2,4,8,16,32", help="steps of a window, comma-separated; 1 comes first")
    parser.add_argument("--samples", type=int, default=1 << 22, help="of an epoch, at most")
    parser.add_argument("--steps", type=int, default=2048, help="of an epoch, at most")
    parser.add_argument("--planning-ranks", default="8,64,1024,16384", help="world sizes to plan for, comma-separated")
    parser.add_argument(
        "--planning-windows", default="1,2,8,32", help="windows to plan, comma-separated; 1 comes first"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which the medians are taken")
    arguments = parser.parse_args()
    windows = whole_numbers(arguments.windows)
    for name, distribution in DISTRIBUTIONS.items():
        for world_size in whole_numbers(arguments.ranks):
            for batch_size in whole_numbers(arguments.batch_sizes):
                num_steps = min(arguments.steps, arguments.samples // (world_size * batch_size))
                num_steps -= num_steps % max(windows)  # whole windows
                store = make_store(num_steps * world_size * batch_size, distribution)
                setting: Row = {"lengths": name, "ranks": world_size, "batch_size": batch_size}
                rank = OneRank(store=store, world_size=world_size, config=_config(batch_size))
                for row in measure_steps(rank, windows):
                    print(json.dumps(setting | row), flush=True)
    for world_size in whole_numbers(arguments.planning_ranks):
        for row in measure_planning(world_size, whole_numbers(arguments.planning_windows), arguments.rounds):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
