"""The exchange beside the usual ways, and beside one raw all-to-all of the same bytes; under torchrun.

    torchrun --nproc_per_node 4 scripts/bench/exchange.py [--batch-sizes 32,128,512] [--device cuda]
    torchrun --nproc_per_node 2 scripts/bench/exchange.py --device cpu --batch-sizes 32 --steps 20

One JSON line a row, from rank 0. Batches: keys user, user_age, item_id, action and a label of item_id's length, int64,
lognormal lengths (mean 512, std 512, at most 4096); balanced by --strategy. Milliseconds of a step, from pack to
finished batch, with gathers and plans made before: the median over steps, of the slowest rank, and of that the median
over 5 rounds in which the ways take turns.

    copy              bringing the batch to the device, from page-locked memory
    ours, ours-all-gather    the two exchanges of this package
    gather-select     the usual way: all-gather lengths, read them back, all-gather values, select rows; for each field
    per-field         the other: reorder, exchange lengths, read sizes back, exchange values, reorder; for each field
    raw               one all-to-all of the bytes that `ours` sends
    exposed           part by which a training step gets longer with `ours` beside it: matrix products, and an
                      all-reduce of 64 MB as of gradients; alternating runs of --exposed-steps steps over the same
                      batches, already balanced
    exposed-alone     the same without the all-reduce: then only the exchange makes ranks wait for each other
"""

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import STRATEGIES, Balancer, HSTUCost
from evenrank.dataloader.balance.control.all_gather import make_gather
from evenrank.dataloader.balance.control.process_group import Channel
from evenrank.dataloader.balance.exchange.device import Carrier, make_carrier
from evenrank.dataloader.balance.exchange.exchange import EXCHANGES
from evenrank.dataloader.balance.step_planner import Planned, Planner, Settings
from evenrank.dataloader.balance.warmup import compile_ahead
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal, Uniform

COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8)
TIMEOUT = timedelta(minutes=3)
ROUNDS = 5  # in which the ways take turns
FILLING = 10  # steps before the clock starts
DATA = RandomData(
    lengths=Lognormal(mean=512, std=512),
    contextual={"user": Uniform(high=1_000_000), "user_age": Uniform(high=99)},
)


def batches_of(batch_size: int, steps: int) -> RandomBatches[Any]:
    """This rank's batches, with the actions as labels."""
    config = LoaderConfig(batch_size=batch_size, max_history_length=4096, max_num_candidates=0, num_tasks=1)
    return RandomBatches(config, DATA, num_batches=steps, rank=dist.get_rank(), world_size=dist.get_world_size())


def plan_steps(batch_size: int, steps: int, strategy: str) -> list[Planned]:
    """Gather and plan steps, as a Balancer does in the background."""
    settings = Settings(
        strategy=strategy,
        tolerance=0.01,
        max_tokens_per_rank=None,
        on_overflow="raise",
        exchange="all-to-all",
        lookahead=1,
    )
    gather = make_gather(TIMEOUT)
    planner = Planner(
        [], cost=COST, settings=settings, gather=gather, rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    planned = [planner.plan(batch, None) for batch in batches_of(batch_size, steps)]
    gather.close()
    return planned


class Staged:
    """A carrier that brings each memory once."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._there: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def bring(self, host: torch.Tensor, memory: torch.Tensor) -> None:
        """Bring what is not there yet."""
        if host.data_ptr() not in self._there:
            self._there.add(host.data_ptr())
            self._carrier.bring(host, memory)


def timed(run: Callable[[int], Any], steps: int, device: torch.device, group: dist.ProcessGroup) -> float:
    """Return the median milliseconds of a step, of the slowest rank; the first steps warm up."""
    seconds = []
    for step in range(steps):
        wait(device)
        dist.barrier(group)
        begun = time.perf_counter()
        run(step)
        wait(device)
        seconds.append(time.perf_counter() - begun)
    median = torch.tensor([statistics.median(seconds[steps // 4 :])])
    dist.all_reduce(median, op=dist.ReduceOp.MAX, group=group)
    return float(median) * 1e3


def wait(device: torch.device) -> None:
    """Let the device finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fields_of(batch: Any) -> list[KeyedJaggedTensor]:
    """The fields that the usual ways exchange one by one."""
    return [batch.features, batch.labels]


def select(values: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Select rows of jagged keys: values key-major, lengths [K, B]; the size of the result is read back."""
    offsets = torch.cumsum(lengths.view(-1), 0) - lengths.view(-1)
    chosen = lengths[:, rows]
    starts = offsets.view(lengths.shape)[:, rows].reshape(-1)
    flat = chosen.reshape(-1)
    ends = torch.cumsum(flat, 0)
    places = torch.repeat_interleave(starts - (ends - flat), flat)
    return values[places + torch.arange(len(places), device=values.device)], chosen


def gather_select(kjt: KeyedJaggedTensor, mine: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """All-gather a field and keep the rows `mine`, numbered over all ranks."""
    world_size, keys = dist.get_world_size(), len(kjt.keys())
    lengths = kjt.lengths().view(keys, -1)
    everybody = [torch.empty_like(lengths) for _ in range(world_size)]
    dist.all_gather(everybody, lengths.contiguous(), group=group)
    totals = torch.stack([one.sum() for one in everybody]).tolist()
    padded = torch.zeros(max(totals), dtype=kjt.values().dtype, device=lengths.device)
    padded[: len(kjt.values())] = kjt.values()
    values = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(values, padded, group=group)
    # Key-major over all ranks.
    parts = [
        torch.split(one[:total], each.sum(1).tolist())
        for one, total, each in zip(values, totals, everybody, strict=True)
    ]
    joined = torch.cat([part[key] for key in range(keys) for part in parts])
    return select(joined, torch.cat(everybody, dim=1), mine)


def per_field(kjt: KeyedJaggedTensor, sends: torch.Tensor, counts: Any, group: dist.ProcessGroup) -> Any:
    """Exchange a field: rows in the order of their destinations, lengths first, then values of the sizes they tell."""
    keys = len(kjt.keys())
    send_counts, receive_counts = counts
    values, chosen = select(kjt.values(), kjt.lengths().view(keys, -1), sends)
    out = chosen.t().contiguous()
    arrived = torch.empty((sum(receive_counts), keys), dtype=out.dtype, device=out.device)
    dist.all_to_all_single(arrived, out, receive_counts, send_counts, group=group)
    # Row-major for the wire: each row's keys one behind the other.
    rows = len(out)
    order = torch.arange(rows * keys, device=out.device).view(keys, rows).t().reshape(-1)
    flat = chosen.reshape(-1)
    wire, _ = select(values, flat[None], order)
    send_sizes = [int(part.sum()) for part in torch.split(out, send_counts)]
    receive_sizes = [int(part.sum()) for part in torch.split(arrived, receive_counts)]
    landed = torch.empty(sum(receive_sizes), dtype=values.dtype, device=values.device)
    dist.all_to_all_single(landed, wire, receive_sizes, send_sizes, group=group)
    back = torch.arange(len(arrived) * keys, device=out.device).view(len(arrived), keys).t().reshape(-1)
    values, lengths = select(landed, arrived.reshape(1, -1), back)
    return values, lengths.view(keys, -1)


def measure(batch_size: int, steps: int, strategy: str, device: torch.device) -> dict[str, Any]:
    """Time all ways on the same planned steps."""
    carrier = make_carrier(device)
    channel = Channel(TIMEOUT, backend=carrier.backend)
    control = dist.group.WORLD
    assert control is not None
    assert channel.group is not None
    planned = plan_steps(batch_size, steps, strategy)
    pairs = [(one.batch.pin_memory() if device.type == "cuda" else one.batch, one.plan) for one in planned]
    row: dict[str, Any] = {"ranks": dist.get_world_size(), "batch_size": batch_size, "strategy": strategy}
    row["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    sent = [int(plan.send_bytes.sum()) for _, plan in pairs]
    row["sent_kb"] = round(statistics.median(sent) / 1e3, 1)

    brought = [batch.to(device) for batch, _ in pairs]
    ways: dict[str, Callable[[int], Any]] = {}
    results: dict[str, Any] = {}
    for name, kind in EXCHANGES.items():
        exchange = kind(channel, Staged(carrier))  # type: ignore[arg-type]
        prepared = [exchange.prepare(batch, plan) for batch, plan in pairs]
        for one in prepared:  # brings all there
            exchange.finish(exchange.launch(one))
        if name == "all-to-all":
            ways["copy"] = lambda step, all=prepared: carrier.bring(all[step].host, all[step].memory)
        label = "ours" if name == "all-to-all" else "ours-all-gather"

        def run(step: int, exchange: Any = exchange, all: Any = prepared) -> Any:
            exchange.finish(exchange.launch(all[step]))
            return all[step].balanced()

        ways[label] = run
        results[label] = run(0).features

    numbers = [np.flatnonzero(plan.rank_of.reshape(-1) == plan.rank) for _, plan in pairs]
    mine = [torch.from_numpy(rows).to(device) for rows in numbers]
    ways["gather-select"] = lambda step: [
        gather_select(kjt, mine[step], channel.group) for kjt in fields_of(brought[step])
    ]
    orders = []
    for _, plan in pairs:
        own = plan.rank_of[plan.rank]
        sends = np.argsort(own, kind="stable")[np.count_nonzero(own < 0) :]
        counts = [int((own == other).sum()) for other in range(len(plan.rank_of))]
        orders.append(
            (
                torch.from_numpy(sends).to(device),
                (counts, [int((plan.rank_of[other] == plan.rank).sum()) for other in range(len(plan.rank_of))]),
            )
        )
    ways["per-field"] = lambda step: [per_field(kjt, *orders[step], channel.group) for kjt in fields_of(brought[step])]
    check(results, gather_select(brought[0].features, mine[0], channel.group), pairs[0][1].num_real)
    check(results, per_field(brought[0].features, *orders[0], channel.group), pairs[0][1].num_real)

    buffers = [
        [torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=device) for sizes in (p.receive_bytes, p.send_bytes)]
        for _, p in pairs
    ]
    ways["raw"] = lambda step: dist.all_to_all_single(
        *buffers[step],
        pairs[step][1].receive_bytes.tolist(),
        pairs[step][1].send_bytes.tolist(),
        group=channel.group,
    )
    rounds = [{name: timed(run, steps, device, control) for name, run in ways.items()} for _ in range(ROUNDS)]
    row |= {name: round(statistics.median(one[name] for one in rounds), 4) for name in ways}
    row["ours_over_raw"] = round(row["ours"] / row["raw"], 2)
    channel.close()
    return row


def check(results: dict[str, Any], usual: Any, num_real: int) -> None:
    """The usual ways and ours give the same values."""
    values, lengths = usual
    for features in results.values():
        assert torch.equal(features.values(), values)
        assert torch.equal(features.lengths().view(lengths.shape[0], -1)[:, :num_real], lengths)


def measure_exposed(batch_size: int, steps: int, strategy: str, device: torch.device, reducing: bool) -> dict[str, Any]:
    """Alternate runs with the exchange and without, over the same balanced batches."""
    control = dist.group.WORLD
    gradients_group = dist.new_group(backend=make_carrier(device).backend)
    is_cuda = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if is_cuda else (256, torch.float32)
    weight = torch.randn(side, side, device=device, dtype=dtype)
    gradients = torch.zeros(side * 4096, device=device, dtype=dtype)

    def options() -> dict[str, Any]:
        return {"cost": COST, "strategy": strategy, "tolerance": 0.01, "device": device, "timeout": TIMEOUT}

    made = [batch.pin_memory() if is_cuda else batch for batch in batches_of(batch_size, 16)]

    def source() -> Any:
        for number, batch in enumerate(itertools.islice(itertools.cycle(made), steps + FILLING)):
            batch.step = number
            yield batch

    def work(batch: Any) -> None:
        # As much for every batch, so that only the exchange differs.
        batch.features.values().sum()
        for _ in range(8):
            torch.mm(weight, weight)
        if reducing:
            dist.all_reduce(gradients, group=gradients_group)

    with Balancer(itertools.chain(made), **options()) as balancer:
        ready = list(balancer)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for repeat in range(6):
        for name in ("with", "without") if repeat % 2 else ("without", "with"):
            with contextlib.ExitStack() as stack:
                batches = itertools.islice(itertools.cycle(ready), steps + FILLING)
                if name == "with":
                    batches = iter(stack.enter_context(Balancer(source(), **options())))
                for number, batch in enumerate(batches):
                    if number == FILLING:  # the first steps of an epoch wait for their plans
                        wait(device)
                        dist.barrier(control)
                        begun = time.perf_counter()
                    work(batch)
                wait(device)
                seconds[name].append((time.perf_counter() - begun) / steps)
    medians = torch.tensor([statistics.median(values[1:]) for values in seconds.values()])
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=control)
    dist.destroy_process_group(gradients_group)
    with_it, without = (float(value) for value in medians)
    name = "exposed" if reducing else "exposed-alone"
    return {
        f"{name}-step-ms": round(without * 1e3, 3),
        f"{name}-step-with-exchange-ms": round(with_it * 1e3, 3),
        name: round(with_it / without - 1, 5),
    }


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", default="32,128,512")
    parser.add_argument("--strategies", default="lpt-swap,min-move")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--exposed-steps", type=int, default=200, help="0 leaves that measurement out")
    parser.add_argument("--alone", action="store_true", help="measure exposed-alone, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    strategies = arguments.strategies.split(",")
    if unknown := [name for name in strategies if name not in STRATEGIES]:
        parser.error(f"no strategy is called {unknown[0]!r}; there are {', '.join(STRATEGIES)}")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device is {arguments.device}, but PyTorch finds no CUDA device here; --device cpu works")
    if "LOCAL_RANK" not in os.environ:
        parser.error("one process a rank is needed: run it under torchrun, as --help shows")
    faulthandler.dump_traceback_later(540, exit=True)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    compile_ahead()
    for strategy in strategies:
        for batch_size in map(int, arguments.batch_sizes.split(",")):
            row = measure(batch_size, arguments.steps, strategy, device)
            for reducing in [True, False][: (1 + arguments.alone) * bool(arguments.exposed_steps)]:
                row |= measure_exposed(batch_size, arguments.exposed_steps, strategy, device, reducing)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
