"""Time balancing with no exchange: one rank's loader plans the steps of all ranks, and reads what it trains.

    .venv/bin/python scripts/bench/no_exchange.py [--ranks 8,64,512,1024,4096,16384] [--reading-ranks 8,64] [--rounds 5]

Prints one JSON line per row, first about planning, for each number of ranks:

    before, after, worst    heaviest load over the lower bound: medians over steps, and the maximum after balancing
    ms                      one thread's time per step to find this rank's samples: order, lengths, costs, partition
    partition_ms            the partition's own part of it, on the same costs
    x_partition             ms / partition_ms, median over rounds
    steps_per_second        of a whole loader with 4 workers; unbalanced_steps_per_second of one without balance
    cores                   that the balanced one had: its CPU time / its time
    with_metrics_ms         `ms` for a loader with `on_step`, which has every step measured

then about reading, with no workers:

    us, unbalanced_us       time per sample of a whole loader, planning included, and of one without balance
    x_unbalanced            us / unbalanced_us, median over rounds
    x_reading               the same of reading alone: making the batches of samples that are known already

Values are medians over rounds; each round times everything in a row in turn. Only one rank's loader exists at a time,
without a process group. 32 samples per rank, lognormal lengths (mean 512, std 512, 1..4096), an HSTU model of 8 layers,
1,024 wide, with interleaved actions. For planning, all events of the store are one element in memory, so that an epoch
of 16,384 ranks fits; the lengths are drawn, and planning reads nothing else. For reading, all events are drawn.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.dataloader.balance.costs.cost import count_tokens, scaled_costs
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.batches.batch import name_keys
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.random_batches import RandomData, draw_samples
from evenrank.dataloader.sampling.balanced_steps import make_step_sampler
from evenrank.dataloader.sampling.steps import StepSampler, StepShape, StoredSamples
from evenrank.dataloader.state.resume_point import ResumePoint
from evenrank.datasets import SequenceStore
from evenrank.datasets.distributions import Distribution, Lognormal, Uniform
from evenrank.datasets.order import RowOrder, Samples

LENGTHS = Lognormal(mean=512, std=512, low=1, high=4096)
COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=True)

Ints = NDArray[np.int64]
_CONFIG = LoaderConfig(batch_size=32, max_history_length=4095, max_num_candidates=1)
_MIN_STEPS = 8  # of an epoch of the most ranks
_MIN_SAMPLES = 1 << 17  # of an epoch of few ranks
_READING_SAMPLES = 1 << 16
_NUM_WORKERS = 4

Row = dict[str, int | float | str]


def make_store(num_rows: int, distribution: Distribution = LENGTHS) -> SequenceStore:
    """Return rows of drawn lengths, whose events are all the same element in memory."""
    store = draw_samples(RandomData(), np.random.default_rng(0), 1, min_length=1, split="train")
    lengths = distribution.sample(np.random.default_rng(0), num_rows)
    offsets: Ints = np.concatenate([[0], np.cumsum(lengths)])
    columns = {name: np.broadcast_to(values[:1], offsets[-1:]) for name, values in store.columns.items()}
    return replace(store, offsets=offsets, columns={**columns, "user_id": np.arange(num_rows)})


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRank:
    """The rank in the middle of all."""

    store: SequenceStore
    """All samples."""
    world_size: int
    """Number of ranks."""
    config: LoaderConfig
    """The settings of its loader."""

    @property
    def rank(self) -> int:
        """Its number."""
        return self.world_size // 2

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step of all ranks."""
        return self.world_size * self.config.batch_size

    @property
    def order(self) -> RowOrder:
        """The order of its loader."""
        samples = Samples(num_rows=len(self.store), left_out=np.empty(0, dtype=np.int64))
        return RowOrder(samples=samples, shuffle=True)

    @property
    def collate(self) -> Collate:
        """What makes its batches."""
        return Collate.create(self.config, self.store.manifest)

    @property
    def samples(self) -> StoredSamples:
        """The samples of its loader."""
        return StoredSamples([self.store], self.collate, self.config.batch_size)

    def step_sampler(self, balance: BalanceConfig | None) -> StepSampler:
        """Return its step sampler."""
        shape = StepShape(
            rank=self.rank, world_size=self.world_size, batch_size=self.config.batch_size, drop_last=False
        )
        return make_step_sampler(self.samples, shape, balance)

    def loader(self, balance: BalanceConfig | None, *, num_workers: int, prefetch: int) -> Loader[SequenceBatch]:
        """Return its loader."""
        config = replace(self.config, num_workers=num_workers, prefetch=prefetch, persistent_workers=True)
        return build_loader(self.store, config, rank=self.rank, world_size=self.world_size, balance=balance)

    def groups(self, num_steps: int) -> list[range]:
        """Return the steps that its loader samples together."""
        prefetch = self.config.prefetch
        return [range(first, min(first + prefetch, num_steps)) for first in range(0, num_steps, prefetch)]

    def costs_and_tokens(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the costs, scaled as those of a step, and the tokens of these rows: int64 [n] both."""
        lengths = self.collate.lengths(group_by_store([self.store], rows), len(rows))
        by_key = dict(zip(name_keys(tuple(lengths.of_keys)), lengths.of_keys.values(), strict=True))
        costs = scaled_costs(COST, by_key, lengths.num_candidates, samples_per_step=self.samples_per_step)
        return costs, count_tokens(COST, by_key, len(rows))


class Times(NamedTuple):
    """The seconds of a call."""

    wall: float
    """From its start to its end."""
    cpu: float
    """Of this process, over all threads."""


def timed(function: Callable[[], object]) -> Times:
    """Return the seconds of a call."""
    started, cpu_started = time.perf_counter(), time.process_time()
    function()
    return Times(time.perf_counter() - started, time.process_time() - cpu_started)


def in_turns(functions: Sequence[Callable[[], object]], rounds: int) -> list[list[Times]]:
    """Return the seconds of each function in each round, after one that is not timed."""
    for function in functions:
        function()
    seconds = [[timed(function) for function in functions] for _ in range(rounds)]
    return [list(of_function) for of_function in zip(*seconds, strict=True)]


def median(times: list[Times]) -> float:
    """Return the median wall time over rounds."""
    return statistics.median(of_round.wall for of_round in times)


def ratio(numerators: list[Times], denominators: list[Times]) -> float:
    """Return the median over rounds of the ratio of two wall times."""
    return statistics.median(a.wall / b.wall for a, b in zip(numerators, denominators, strict=True))


def measure_planning(world_size: int, rounds: int) -> Row:
    """Return the row of planning for a number of ranks."""
    num_steps = max(_MIN_SAMPLES // (world_size * _CONFIG.batch_size), _MIN_STEPS)
    rank = OneRank(store=make_store(num_steps * world_size * _CONFIG.batch_size), world_size=world_size, config=_CONFIG)
    prefetch = max(1, min(_CONFIG.prefetch, num_steps // (2 * _NUM_WORKERS)))  # several groups for each worker
    steps = range(prefetch)
    balance = BalanceConfig(cost=COST)

    sampler = rank.step_sampler(balance)
    iteration = sampler.begin(rank.order, ResumePoint(), seed=0)
    positions_of = iteration.schedule.positions_of_all
    costs = [rank.costs_and_tokens(iteration.rows(positions_of(range(step, step + 1)))) for step in steps]
    loaders = [rank.loader(way, num_workers=_NUM_WORKERS, prefetch=prefetch) for way in (balance, None)]
    planning, partitioning, measuring, *loading = in_turns(
        [
            lambda: sampler.sample(iteration, steps, is_measured=False),
            lambda: [partition(of_step, world_size, tokens=tokens) for of_step, tokens in costs],
            lambda: sampler.sample(iteration, steps, is_measured=True),
            *(lambda loader=loader: list(loader) for loader in loaders),
        ],
        rounds,
    )
    for loader in loaders:
        loader.close()
    steps_of_epoch = sampler.sample(iteration, range(num_steps), is_measured=True)
    metrics = [step.metrics for step in steps_of_epoch if step.metrics is not None]
    ms, partition_ms, measured_ms = (1e3 * median(times) / len(steps) for times in (planning, partitioning, measuring))
    rates = [num_steps / median(times) for times in loading]
    return {
        "ranks": world_size,
        "steps": num_steps,
        "before": round(statistics.median(step.ratio_before for step in metrics), 3),
        "after": round(statistics.median(step.ratio_after for step in metrics), 4),
        "worst": round(max(step.ratio_after for step in metrics), 4),
        "ms": round(ms, 3),
        "partition_ms": round(partition_ms, 3),
        "x_partition": round(ratio(planning, partitioning), 2),
        "with_metrics_ms": round(measured_ms, 3),
        "steps_per_second": round(rates[0], 1),
        "cores": round(statistics.median(of_round.cpu / of_round.wall for of_round in loading[0]), 2),
        "unbalanced_steps_per_second": round(rates[1], 1),
    }


def measure_reading(store: SequenceStore, world_size: int, rounds: int) -> Row:
    """Return the row of reading for a number of ranks."""
    rank = OneRank(store=store, world_size=world_size, config=_CONFIG)
    ways = (BalanceConfig(cost=COST), None)
    loaders = [rank.loader(way, num_workers=0, prefetch=_CONFIG.prefetch) for way in ways]
    num_steps = len(loaders[0])

    def read(way: BalanceConfig | None) -> Callable[[], object]:
        sampler, samples = rank.step_sampler(way), rank.samples
        iteration = sampler.begin(rank.order, ResumePoint(), seed=0)
        sampled = [sampler.sample(iteration, steps, is_measured=False) for steps in rank.groups(num_steps)]
        return lambda: [len(samples.batches(of_group)) for of_group in sampled]

    functions = [*(lambda loader=loader: sum(1 for _ in loader) for loader in loaders), *map(read, ways)]
    balanced, unbalanced, reading, reading_unbalanced = in_turns(functions, rounds)
    num_samples = num_steps * _CONFIG.batch_size
    return {
        "reading_ranks": world_size,
        "us": round(1e6 * median(balanced) / num_samples, 2),
        "unbalanced_us": round(1e6 * median(unbalanced) / num_samples, 2),
        "x_unbalanced": round(ratio(balanced, unbalanced), 2),
        "x_reading": round(ratio(reading, reading_unbalanced), 2),
    }


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,512,1024,4096,16384", help="world sizes to plan for, comma-separated")
    parser.add_argument("--reading-ranks", default="8,64", help="world sizes to read for, comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="of which the medians are taken")
    arguments = parser.parse_args()
    for world_size in map(int, arguments.ranks.split(",")):
        print(json.dumps(measure_planning(world_size, arguments.rounds)), flush=True)
    data = RandomData(lengths=LENGTHS, items=Uniform(low=0, high=999_999))
    store = draw_samples(data, np.random.default_rng(0), _READING_SAMPLES, min_length=1, split="train")
    for world_size in map(int, arguments.reading_ranks.split(",")):
        print(json.dumps(measure_reading(store, world_size, arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
