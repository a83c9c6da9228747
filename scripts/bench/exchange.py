"""Compare the exchange with the usual baselines, and with one raw all-to-all of the same bytes; run it under torchrun.

    torchrun --nproc_per_node 4 scripts/bench/exchange.py [--batch-sizes 32,128,512] [--device cuda]
    torchrun --nproc_per_node 2 scripts/bench/exchange.py --device cpu --batch-sizes 32 --steps 20

Prints one JSON line per row, from rank 0. Batches have the int64 keys user, user_age, item_id, action and a label of
item_id's length, with lognormal lengths (mean 512, std 512, at most 4096), and are balanced with --strategies. Times
are milliseconds of a step from packing to the finished batch; all-gathers and plans are made before. They are the
median over steps on the slowest rank, and of that the median over 5 rounds in which the variants take turns.

    copy              upload of the batch to the device, from pinned memory
    ours, ours-all-gather    the two exchanges of this package
    gather-select     baseline, per field: all-gather lengths, read them back, all-gather values, select rows
    per-field         baseline, per field: reorder, exchange lengths, read sizes back, exchange values, reorder
    raw               one all-to-all of the bytes that `ours` sends
    exposed           fraction by which a training step gets longer with `ours` on a side stream: matrix products and an
                      all-reduce of 64 MB, as of gradients; alternating runs of --exposed-steps steps over the same,
                      already balanced batches
    exposed-alone     the same without the all-reduce, so that only the exchange makes ranks wait for each other
"""

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.exchange.device import ExchangeDevice, make_device
from evenrank.dataloader.balance.exchange.exchange import Exchange, Handle
from evenrank.dataloader.balance.exchange.layout import Layout
from evenrank.dataloader.balance.partition.strategies import warm_up
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members, members_of
from evenrank.dataloader.balance.refit import CostSchedule
from evenrank.dataloader.balance.step_planner import StepPlanner
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import BatchSchema
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal, Uniform
from exchange_baselines import Jagged, gather_select, jagged_fields, per_field

COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False)
TOLERANCE = 0.01
TIMEOUT = timedelta(minutes=3)
ROUNDS = 5  # in which the variants take turns
WARMUP_STEPS = 10  # before the clock starts
DATA = RandomData(
    lengths=Lognormal(mean=512, std=512),
    contextual={"user": Uniform(high=1_000_000), "user_age": Uniform(high=99)},
)


def batches_of(batch_size: int, steps: int) -> RandomBatches[SequenceBatch]:
    """Return this rank's batches, with the actions as labels."""
    config = LoaderConfig(batch_size=batch_size, max_history_length=4096, max_num_candidates=0, num_tasks=1)
    return RandomBatches(config, DATA, num_batches=steps, rank=dist.get_rank(), world_size=dist.get_world_size())


Prepared = tuple[Handle, Tensor, Callable[[Tensor], JaggedBatch]]


class PlannedBatch(NamedTuple):
    """What a Balancer knows of a step before its exchange."""

    batch: SequenceBatch
    schema: BatchSchema
    rank_of: NDArray[np.int32]
    lengths: NDArray[np.int64]
    layout: Layout  # of the all-to-all


def plan_steps(batch_size: int, steps: int, strategy: str) -> list[PlannedBatch]:
    """All-gather and plan steps, as a Balancer does in the background."""
    group = FailFastGroup(members_of(None, TIMEOUT), "metadata", TIMEOUT)
    alone = FailFastGroup(Members(rank=0, world_size=1, store=None), "exchange", TIMEOUT)
    on_cpu = Exchange("all-to-all", alone, make_device(None), rank=dist.get_rank())
    planned: list[PlannedBatch] = []

    def prepare(
        step: Handle, batches: Any, schema: BatchSchema, rank_of: NDArray[np.int32], lengths: NDArray[np.int64]
    ) -> None:
        on_cpu.prepare(step, batches, schema, rank_of, lengths)
        assert step.layout is not None
        planned.append(PlannedBatch(batches[0], schema, rank_of, lengths, step.layout))

    planner = StepPlanner(
        dict,
        config=BalanceConfig(cost=COST, strategy=strategy, tolerance=TOLERANCE),
        group=group,
        prepare=prepare,
        batch_size=batch_size,
        is_measured=True,
        costs=CostSchedule(COST),
    )
    for batch in batches_of(batch_size, steps):
        planner.plan([Handle(batch)])
    group.close()
    return planned


class UploadOnce:
    """An exchange device that uploads each host buffer once, so that later launches are timed without the upload."""

    def __init__(self, device: ExchangeDevice) -> None:
        self._device = device
        self._uploaded: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def upload(self, host_buffer: Tensor) -> Tensor:
        """Return the buffer on the device, uploaded if it has not been."""
        address = host_buffer.data_ptr()
        if address not in self._uploaded:
            self._uploaded[address] = self._device.upload(host_buffer)
        return self._uploaded[address]


def timed(run: Callable[[int], Any], steps: int, device: torch.device, group: dist.ProcessGroup) -> float:
    """Return the median milliseconds of a step on the slowest rank; the first quarter of the steps warms up."""
    seconds = []
    for step in range(steps):
        synchronize(device)
        dist.barrier(group)
        started = time.perf_counter()
        run(step)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    median = torch.tensor([statistics.median(seconds[steps // 4 :])])
    dist.all_reduce(median, op=dist.ReduceOp.MAX, group=group)
    return float(median) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def send_order(plan: PlannedBatch, device: torch.device) -> tuple[Tensor, tuple[list[int], list[int]]]:
    """Return a rank's rows by destination, its own included, and the counts that `per_field` needs."""
    own = dist.get_rank()
    destinations = plan.rank_of[own]
    rows = np.argsort(destinations, kind="stable")[np.count_nonzero(destinations < 0) :]
    send_counts = [int((destinations == rank).sum()) for rank in range(len(plan.rank_of))]
    receive_counts = [int((source == own).sum()) for source in plan.rank_of]
    return torch.from_numpy(rows).to(device), (send_counts, receive_counts)


def measure(batch_size: int, steps: int, strategy: str, device: torch.device) -> dict[str, Any]:
    """Time all variants on the same planned steps."""
    exchange_device = make_device(device)
    members = members_of(None, TIMEOUT)
    group = FailFastGroup(members, "exchange", TIMEOUT, backend=exchange_device.backend)
    baseline_group = dist.new_group(backend=exchange_device.backend)
    cpu_group = dist.group.WORLD
    assert cpu_group is not None
    plans = plan_steps(batch_size, steps, strategy)
    layouts = [plan.layout for plan in plans]
    loaded = [plan.batch.pin_memory() if device.type == "cuda" else plan.batch for plan in plans]
    row: dict[str, Any] = {"ranks": dist.get_world_size(), "batch_size": batch_size, "strategy": strategy}
    row["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    row["sent_kb"] = round(statistics.median(int(layout.send_bytes.sum()) for layout in layouts) / 1e3, 1)

    variants: dict[str, Callable[[int], Any]] = {}
    results: dict[str, KeyedJaggedTensor] = {}
    for name in EXCHANGES:
        upload_once: Any = UploadOnce(exchange_device)
        exchange = Exchange(name, group, upload_once, rank=dist.get_rank())
        prepared = [prepare_again(exchange, plan) for plan in plans]
        for number in range(steps):  # uploads all batches
            exchanged(exchange, prepared, number)
        if name == "all-to-all":
            variants["copy"] = partial(upload, exchange_device, [host_buffer for _, host_buffer, _ in prepared])
        label = "ours" if name == "all-to-all" else "ours-all-gather"
        variants[label] = partial(exchanged, exchange, prepared)
        results[label] = variants[label](0).features

    on_device = [batch.to(device) for batch in loaded]
    trained_rows = [np.flatnonzero(plan.rank_of.reshape(-1) == dist.get_rank()) for plan in plans]
    rows = [torch.from_numpy(numbers).to(device) for numbers in trained_rows]
    orders = [send_order(plan, device) for plan in plans]
    variants["gather-select"] = lambda step: [
        gather_select(field, rows[step], baseline_group) for field in jagged_fields(on_device[step])
    ]
    variants["per-field"] = lambda step: [
        per_field(field, *orders[step], baseline_group) for field in jagged_fields(on_device[step])
    ]
    for baseline in ("gather-select", "per-field"):
        check_equal(results, variants[baseline](0)[0], layouts[0].num_real)

    def empty_buffers(sizes: Iterable[NDArray[np.int64]]) -> list[Tensor]:
        return [torch.zeros(int(of_step.sum()), dtype=torch.uint8, device=device) for of_step in sizes]

    send_buffers = empty_buffers(layout.send_bytes for layout in layouts)
    receive_buffers = empty_buffers(layout.receive_bytes for layout in layouts)
    variants["raw"] = lambda step: dist.all_to_all_single(
        receive_buffers[step],
        send_buffers[step],
        layouts[step].receive_bytes.tolist(),
        layouts[step].send_bytes.tolist(),
        group=baseline_group,
    )
    rounds = [{name: timed(run, steps, device, cpu_group) for name, run in variants.items()} for _ in range(ROUNDS)]
    row |= {name: round(statistics.median(times[name] for times in rounds), 4) for name in variants}
    row["ours_over_raw"] = round(row["ours"] / row["raw"], 2)
    group.close()
    dist.destroy_process_group(baseline_group)
    return row


def upload(device: ExchangeDevice, host_buffers: list[Tensor], step: int) -> Tensor:
    """Upload the batch of a step."""
    return device.upload(host_buffers[step])


def prepare_again(exchange: Exchange, plan: PlannedBatch) -> Prepared:
    """Return a prepared step, and what it needs to be so again after it is finished."""
    exchange.prepare(step := Handle(plan.batch), [plan.batch], *plan[1:-1])
    return step, step.host_buffer, step.make_batch


def exchanged(exchange: Exchange, prepared: list[Prepared], number: int) -> Any:
    """Exchange a step and return the balanced batch."""
    step, host_buffer, make_batch = prepared[number]
    step.host_buffer, step.make_batch = host_buffer, make_batch
    exchange.launch(step)
    exchange.finish(step)
    batch, step.batch = step.batch, None
    return batch


def check_equal(results: dict[str, KeyedJaggedTensor], baseline: Jagged, num_real: int) -> None:
    """Check that a baseline and our exchanges give the same values and lengths."""
    values, lengths = baseline
    for features in results.values():
        assert torch.equal(features.values(), values)
        assert torch.equal(features.lengths().view(lengths.shape[0], -1)[:, :num_real], lengths)


def measure_exposed(
    batch_size: int, steps: int, strategy: str, device: torch.device, *, all_reduce: bool
) -> dict[str, Any]:
    """Alternate runs with and without the exchange, over the same balanced batches."""
    cpu_group = dist.group.WORLD
    gradients_group = dist.new_group(backend=make_device(device).backend)
    is_cuda = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if is_cuda else (256, torch.float32)
    weight = torch.randn(side, side, device=device, dtype=dtype)
    gradients = torch.zeros(side * 4096, device=device, dtype=dtype)

    loaded = [batch.pin_memory() if is_cuda else batch for batch in batches_of(batch_size, 16)]

    def balancer_of(batches: Iterable[SequenceBatch]) -> Balancer[SequenceBatch]:
        return Balancer(
            batches, BalanceConfig(cost=COST, strategy=strategy, tolerance=TOLERANCE, timeout=TIMEOUT), device=device
        )

    def source() -> Iterator[SequenceBatch]:
        for number, batch in enumerate(itertools.islice(itertools.cycle(loaded), steps + WARMUP_STEPS)):
            batch.step = number
            yield batch

    def train(batch: SequenceBatch) -> None:
        # The same work for every batch, so that only the exchange differs.
        batch.features.values().sum()
        for _ in range(8):
            torch.mm(weight, weight)
        if all_reduce:
            dist.all_reduce(gradients, group=gradients_group)

    with balancer_of(loaded) as balancer:
        balanced = list(balancer)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for repeat in range(6):
        for name in ("with", "without") if repeat % 2 else ("without", "with"):
            with contextlib.ExitStack() as stack:
                batches: Iterator[SequenceBatch] = itertools.islice(itertools.cycle(balanced), steps + WARMUP_STEPS)
                if name == "with":
                    batches = iter(stack.enter_context(balancer_of(source())))
                started = 0.0
                for number, batch in enumerate(batches):
                    if number == WARMUP_STEPS:  # the first steps of an epoch wait for their plans
                        synchronize(device)
                        dist.barrier(cpu_group)
                        started = time.perf_counter()
                    train(batch)
                synchronize(device)
                seconds[name].append((time.perf_counter() - started) / steps)
    medians = torch.tensor([statistics.median(values[1:]) for values in seconds.values()])
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=cpu_group)
    dist.destroy_process_group(gradients_group)
    with_exchange, without = medians.tolist()
    name = "exposed" if all_reduce else "exposed-alone"
    return {
        f"{name}-step-ms": round(without * 1e3, 3),
        f"{name}-step-with-exchange-ms": round(with_exchange * 1e3, 3),
        name: round(with_exchange / without - 1, 5),
    }


def main() -> None:
    """Print a row for each strategy and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", default="32,128,512", help="samples per rank, comma-separated")
    parser.add_argument("--strategies", default="lpt-swap,min-move", help="comma-separated")
    parser.add_argument("--steps", type=int, default=60, help="steps of each round")
    parser.add_argument("--exposed-steps", type=int, default=200, help="0 skips that measurement")
    parser.add_argument("--alone", action="store_true", help="also measure exposed-alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    strategies = arguments.strategies.split(",")
    if unknown := [name for name in strategies if name not in STRATEGIES]:
        parser.error(f"no strategy is called {unknown[0]!r}; known are {', '.join(STRATEGIES)}")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(
            f"--device is {arguments.device}, but PyTorch finds no CUDA device on this host; pass --device cpu"
        )
    if "LOCAL_RANK" not in os.environ:
        parser.error("one process per rank is needed: run it under torchrun, as --help shows")
    faulthandler.dump_traceback_later(540, exit=True)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for strategy in strategies:
        warm_up(strategy)
        for batch_size in map(int, arguments.batch_sizes.split(",")):
            row = measure(batch_size, arguments.steps, strategy, device)
            for all_reduce in [True, False][: (1 + arguments.alone) * bool(arguments.exposed_steps)]:
                row |= measure_exposed(batch_size, arguments.exposed_steps, strategy, device, all_reduce=all_reduce)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
