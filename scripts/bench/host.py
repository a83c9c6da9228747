"""Measure how far batches hold up a training thread that is bound by the host: it only launches tiny kernels.

    .venv/bin/python scripts/bench/host.py [--steps 300] [--launches 5000]         on all GPUs of the host, over NCCL
    .venv/bin/python scripts/bench/host.py --device cpu --ranks 2                  on the CPU, over Gloo
    .venv/bin/python scripts/bench/host.py --only lpt-swap --omp-threads 4

A step takes a batch, reads one of its values, adds to one small tensor --launches times, and all-reduces 64 kB, as of
gradients. Batches have 32 samples with the int64 keys user_id, user_age, item_id, action and label, and lognormal
lengths (mean 512, std 512, 1..4096). They come from, in turns of up to 32 steps:

    prepared             batches that are on the device already, and the same again, which shows the noise
    loader               build_loader with one worker, which uploads batches too
    no exchange          the same with balance=BalanceConfig(...)
    none ... min-move    a Balancer with each strategy, over batches made before

    ms, p95_ms           median and 95th percentile of the steps, on the slowest rank
    x_prepared           ratio of the median to that of prepared batches, for each turn
    x_prepared_mean      ratio of the means over all steps, on the slowest rank
    training_cpu_ms      CPU time of the training thread per step, mean over ranks
    taking_cpu_ms        of that, to take a batch: median over the steps, mean over ranks
    other_cpu_ms         CPU time of all other threads of the process per step, mean over ranks, ended ones included
    more_cpu_ms          other_cpu_ms beyond that of prepared batches: threads reduce gradients, too
"""

import argparse
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evenrank.dataloader import JaggedBatch, LoaderConfig, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.random_batches import RandomBatches, RandomData, draw_samples
from evenrank.datasets.distributions import Lognormal, Uniform
from local_ranks import TIMEOUT, add_options, gather, meet, ranks_of
from report import Row, emit, machine, show

BATCH_SIZE, MAX_LENGTH = 32, 4096
COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False)
DATA = RandomData(
    lengths=Lognormal(mean=512, std=512, low=1, high=MAX_LENGTH),
    items=Uniform(low=0, high=999_999),
    contextual={"user_age": Uniform(high=99)},
)
STEPS_OF_TURN, WARMUP_STEPS = 32, 8
_GRADIENTS = 1 << 14  # float32
_DISTINCT = 64  # batches made before
_STORED_SAMPLES = 1 << 14  # of an epoch of all ranks

Batches = Iterator[JaggedBatch]
PREPARED = "prepared"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A rank, and what its batches are made of."""

    device: torch.device
    num_batches: int
    """Batches that a source has to have."""
    close: contextlib.ExitStack
    """Closes the sources."""
    rank: int = dataclasses.field(default_factory=dist.get_rank)
    world_size: int = dataclasses.field(default_factory=dist.get_world_size)

    @property
    def config(self) -> LoaderConfig:
        """The settings of loaders."""
        config = LoaderConfig(batch_size=BATCH_SIZE, max_history_length=MAX_LENGTH, num_tasks=1, user_id=True)
        return dataclasses.replace(config, num_workers=1, persistent_workers=True)

    def made_before(self) -> RandomBatches[Any]:
        """Return batches on the host that are made now."""
        counts: Any = {"num_batches": self.num_batches, "num_distinct": _DISTINCT}
        return RandomBatches(self.config, DATA, **counts, rank=self.rank, world_size=self.world_size)


def prepared(rank: Rank) -> Batches:
    """Return batches that are on the device."""
    made = rank.made_before()
    return itertools.cycle([made.batch(step).to(rank.device) for step in range(min(_DISTINCT, rank.num_batches))])


def loaded(rank: Rank, balance: BalanceConfig | None) -> Batches:
    """Return the batches of `build_loader`, epoch after epoch."""
    config = dataclasses.replace(rank.config, device=rank.device)
    store = draw_samples(DATA, np.random.default_rng(0), _STORED_SAMPLES, min_length=1, split="train")
    loader = build_loader(store, config, rank=rank.rank, world_size=rank.world_size, balance=balance)
    while True:
        yield from loader


def balanced(rank: Rank, strategy: str) -> Batches:
    """Return the batches of a Balancer over batches that are made now."""
    config = BalanceConfig(cost=COST, strategy=strategy, timeout=TIMEOUT)
    return iter(rank.close.enter_context(Balancer(rank.made_before(), config, device=rank.device)))


SOURCES: dict[str, Callable[[Rank], Batches]] = {
    PREPARED: prepared,
    "prepared again": prepared,
    "loader": lambda rank: loaded(rank, None),
    "no exchange": lambda rank: loaded(rank, BalanceConfig(cost=COST, timeout=TIMEOUT)),
    **{name: partial(balanced, strategy=name) for name in STRATEGIES},
}


class Turn(NamedTuple):
    """What a rank measured in a turn of a source; CPU times are milliseconds per step."""

    ms: list[float]  # of each step
    taking_ms: list[float]  # CPU time of the training thread to take the batch of each step
    training_ms: float
    other_ms: float


class Trainer:
    """The training thread of a rank."""

    def __init__(self, device: torch.device, launches: int) -> None:
        self._device, self._launches = device, launches
        self._tiny, self._gradients = torch.zeros(1, device=device), torch.zeros(_GRADIENTS, device=device)

    def train(self, batches: Batches, steps: int) -> Turn:
        """Train on batches, after steps that are not measured."""
        for _ in range(WARMUP_STEPS):
            self._step(next(batches))
        meet(self._device)
        ms, taking_ms = [], []
        process, own, last = time.process_time_ns(), time.thread_time_ns(), time.perf_counter()
        for _ in range(steps):
            begin = time.thread_time_ns()
            batch = next(batches)
            taking_ms.append(1e-6 * (time.thread_time_ns() - begin))
            self._step(batch)
            now = time.perf_counter()
            ms.append(1e3 * (now - last))
            last = now
        own, process = time.thread_time_ns() - own, time.process_time_ns() - process
        meet(self._device)
        return Turn(ms, taking_ms, 1e-6 * own / steps, 1e-6 * (process - own) / steps)

    def _step(self, batch: JaggedBatch) -> None:
        features: Any = dict(batch.tensors())["features"]
        tiny = self._tiny
        tiny.add_(features.values()[:1])
        for _ in range(self._launches):
            tiny.add_(1.0)
        dist.all_reduce(self._gradients)


def measure(device: torch.device, names: Sequence[str], steps: int, launches: int) -> list[Row]:
    """Train on all sources in turns, and return their rows. Collective."""
    num_turns = -(-steps // STEPS_OF_TURN)
    measured: dict[str, list[Turn]] = {name: [] for name in names}
    with contextlib.ExitStack() as close:
        rank = Rank(device=device, num_batches=steps + (num_turns + 1) * WARMUP_STEPS, close=close)
        sources = {name: SOURCES[name](rank) for name in names}
        trainer = Trainer(device, launches)
        for turn in range(num_turns):
            first = turn % len(names)  # so that none is always after the same one
            steps_of_turn = steps * (turn + 1) // num_turns - steps * turn // num_turns
            for name in (*names[first:], *names[:first]):
                measured[name].append(trainer.train(sources[name], steps_of_turn))
    of_ranks = gather(measured)
    shared = {"ranks": len(of_ranks), "omp_threads": torch.get_num_threads()}
    of_prepared = [own[PREPARED] for own in of_ranks]
    return [{"batches": name} | shared | summarize([own[name] for own in of_ranks], of_prepared) for name in names]


def summarize(of_ranks: Sequence[Sequence[Turn]], of_prepared: Sequence[Sequence[Turn]]) -> Row:
    """Return the row of a source, given the turns of each rank and those of prepared batches."""
    both = of_ranks, of_prepared
    steps, prepared_steps = ([[ms for turn in turns for ms in turn.ms] for turns in of] for of in both)
    # Of each turn, on its slowest rank.
    medians, prepared_medians = (
        [max(median(one.ms) for one in turns) for turns in zip(*of, strict=True)] for of in both
    )
    turns, prepared_turns = ([turn for turns in of for turn in turns] for of in both)
    other_ms = fmean(turn.other_ms for turn in turns)
    return {
        "steps": len(steps[0]),
        "ms": round(max(map(median, steps)), 3),
        "p95_ms": round(max(float(np.percentile(of_rank, 95)) for of_rank in steps), 3),
        "x_prepared": [round(own / other, 4) for own, other in zip(medians, prepared_medians, strict=True)],
        "x_prepared_mean": round(max(map(fmean, steps)) / max(map(fmean, prepared_steps)), 4),
        "training_cpu_ms": round(fmean(turn.training_ms for turn in turns), 3),
        "taking_cpu_ms": round(fmean(median(ms for turn in of for ms in turn.taking_ms) for of in of_ranks), 3),
        "other_cpu_ms": round(other_ms, 3),
        "more_cpu_ms": round(other_ms - fmean(turn.other_ms for turn in prepared_turns), 3),
    }


def main() -> None:
    """Measure the chosen sources."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=300, help="measured steps of each row")
    parser.add_argument("--launches", type=int, default=5000, help="kernels of a step")
    parser.add_argument("--only", help=f"rows, comma-separated, of: {', '.join(SOURCES)}; prepared is always there")
    options = parser.parse_args()
    chosen = list(SOURCES) if options.only is None else options.only.split(",")
    if unknown := [name for name in chosen if name not in SOURCES]:
        parser.error(f"--only has {unknown[0]!r}; known are {', '.join(SOURCES)}")
    if options.steps < 1 or options.launches < 0:
        parser.error(f"--steps must be at least 1 and --launches 0, got {options.steps} and {options.launches}")
    names = [name for name in SOURCES if name in (PREPARED, *chosen)]
    ranks = ranks_of(parser, options)
    emit(machine())
    show([emit(row) for row in ranks.run(measure, names, options.steps, options.launches)])


if __name__ == "__main__":
    main()
