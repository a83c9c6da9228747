"""Compare the exchange with a naive one, and with one raw all-to-all of the same bytes.

    .venv/bin/python scripts/bench/exchange.py [--batch-sizes 32,128,512]     on all GPUs of the host, over NCCL
    .venv/bin/python scripts/bench/exchange.py --device cpu --batch-sizes 32 --steps 20

Batches have the int64 keys user, user_age, item_id, action and a label of item_id's length, with lognormal lengths
(mean 512, std 512, at most 4096). Times are milliseconds of a step from packing to the finished batch; plans are made
before. They are the median over steps on the slowest rank, for each of 5 rounds in which the variants take turns.

    sent_kb           median bytes that a rank sends
    upload_ms         upload of the batch to the device, from pinned memory
    all_to_all_ms, all_gather_ms    the two exchanges of this package
    naive_ms          per field: all-gather lengths, read them back, all-gather values, select rows
    raw_ms            one all-to-all of the bytes that `all-to-all` sends; x_raw, x_naive: all-to-all relative to these
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, HSTUCost
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.exchange.device import ExchangeDevice, make_device
from evenrank.dataloader.balance.exchange.exchange import Exchange, Handle
from evenrank.dataloader.balance.exchange.layout import Layout
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members, members_of
from evenrank.dataloader.balance.refit import CostSchedule
from evenrank.dataloader.balance.step_planner import StepPlanner
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal, Uniform
from local_ranks import TIMEOUT, add_options, gather, meet, ranks_of, synchronize
from report import Row, emit, machine, show

COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=False)
TOLERANCE = 0.01
ROUNDS = 5
DATA = RandomData(
    lengths=Lognormal(mean=512, std=512),
    contextual={"user": Uniform(high=1_000_000), "user_age": Uniform(high=99)},
)


class PlannedBatch(NamedTuple):
    """What a Balancer knows of a step before its exchange."""

    batch: SequenceBatch
    schema: Any
    rank_of: NDArray[np.int32]
    lengths: NDArray[np.int64]
    layout: Layout  # of the all-to-all


def plan_steps(batch_size: int, steps: int, strategy: str) -> list[PlannedBatch]:
    """All-gather and plan steps, as a Balancer does in the background. Collective."""
    group = FailFastGroup(members_of(None, TIMEOUT), "metadata", TIMEOUT)
    alone = FailFastGroup(Members(rank=0, world_size=1, store=None), "exchange", TIMEOUT)
    on_cpu = Exchange("all-to-all", alone, make_device(None), rank=dist.get_rank())
    planned: list[PlannedBatch] = []

    def prepare(step: Handle, batches: Any, schema: Any, rank_of: Any, lengths: Any) -> None:
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
    loader = LoaderConfig(batch_size=batch_size, max_history_length=4096, max_num_candidates=0, num_tasks=1)
    ranks: Any = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    for batch in RandomBatches[SequenceBatch](loader, DATA, num_batches=steps, **ranks):
        planner.plan([Handle(batch)])
    group.close()
    return planned


class UploadOnce:
    """An exchange device that uploads each host buffer once, so that later launches are timed without the upload."""

    def __init__(self, device: ExchangeDevice) -> None:
        self._device, self.upload = device, cache(device.upload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class PreparedExchange:
    """Steps that are ready to be exchanged, again and again."""

    def __init__(self, name: str, group: FailFastGroup, device: ExchangeDevice, plans: list[PlannedBatch]) -> None:
        upload_once: Any = UploadOnce(device)
        self._exchange = Exchange(name, group, upload_once, rank=dist.get_rank())
        self._steps = [Handle(plan.batch) for plan in plans]
        for step, plan in zip(self._steps, plans, strict=True):
            self._exchange.prepare(step, [plan.batch], *plan[1:-1])
        self._kept = [(step.host_buffer, step.make_batch) for step in self._steps]
        self.host_buffers: list[Any] = [buffer for buffer, _ in self._kept]
        for number in range(len(plans)):  # uploads all batches
            self.run(number)

    def run(self, number: int) -> Any:
        """Exchange a step and return the balanced batch."""
        step = self._steps[number]
        step.host_buffer, step.make_batch = self._kept[number]  # which finishing a step drops
        self._exchange.launch(step)
        self._exchange.finish(step)
        batch, step.batch = step.batch, None
        return batch


def naive(field: KeyedJaggedTensor, rows: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """All-gather a field and select rows, numbered over all ranks; sizes are read back. Return values and lengths."""
    num_keys = len(field.keys())
    lengths = field.lengths().view(num_keys, -1).contiguous()
    lengths_of_ranks = [torch.empty_like(lengths) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths_of_ranks, lengths, group=group)
    totals = torch.stack([lengths_of_rank.sum() for lengths_of_rank in lengths_of_ranks]).tolist()
    padded = torch.zeros(max(totals), dtype=field.values().dtype, device=lengths.device)
    padded[: len(field.values())] = field.values()
    values_of_ranks = [torch.empty_like(padded) for _ in lengths_of_ranks]
    dist.all_gather(values_of_ranks, padded, group=group)
    parts = [
        torch.split(values[:total], lengths_of_rank.sum(1).tolist())
        for values, total, lengths_of_rank in zip(values_of_ranks, totals, lengths_of_ranks, strict=True)
    ]
    values = torch.cat([by_key[key] for key in range(num_keys) for by_key in parts])
    lengths = torch.cat(lengths_of_ranks, dim=1)
    offsets = torch.cumsum(lengths.view(-1), 0) - lengths.view(-1)
    starts, selected = offsets.view(lengths.shape)[:, rows].reshape(-1), lengths[:, rows]
    flat = selected.reshape(-1)
    shifts = torch.repeat_interleave(starts - (torch.cumsum(flat, 0) - flat), flat)
    return values[shifts + torch.arange(len(shifts), device=values.device)], selected


def median_ms(run: Callable[[int], Any], steps: int, device: torch.device) -> float:
    """Return the median milliseconds of a step on the slowest rank; the first quarter of the steps warms up."""
    seconds = []
    for step in range(steps):
        meet(device)
        started = time.perf_counter()
        run(step)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 1e3 * float(max(gather(statistics.median(seconds[steps // 4 :]))))


def time_exchange(device: torch.device, batch_size: int, steps: int, strategy: str) -> Row:
    """Time all variants on the same planned steps. Collective."""
    exchange_device = make_device(device)
    group = FailFastGroup(members_of(None, TIMEOUT), "exchange", TIMEOUT, backend=exchange_device.backend)
    plain_group: Any = dist.new_group(backend=exchange_device.backend)
    plans = plan_steps(batch_size, steps, strategy)
    ours = {name: PreparedExchange(name, group, exchange_device, plans) for name in EXCHANGES}
    host_buffers = ours["all-to-all"].host_buffers
    on_device = [plan.batch.to(device) for plan in plans]
    trained = [np.flatnonzero(plan.rank_of.reshape(-1) == dist.get_rank()) for plan in plans]
    rows = [torch.from_numpy(numbers).to(device) for numbers in trained]
    sent, received = ([getattr(plan.layout, f"{way}_bytes") for plan in plans] for way in ("send", "receive"))
    buffers = [
        [torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=device) for sizes in of] for of in (received, sent)
    ]

    def raw(step: int) -> None:
        sizes = received[step].tolist(), sent[step].tolist()
        dist.all_to_all_single(buffers[0][step], buffers[1][step], *sizes, group=plain_group)

    variants: dict[str, Callable[[int], Any]] = {
        "upload": lambda step: exchange_device.upload(host_buffers[step]),
        **{name.replace("-", "_"): exchange.run for name, exchange in ours.items()},
        "naive": lambda step: [
            naive(field, rows[step], plain_group) for field in (on_device[step].features, on_device[step].labels)
        ],
        "raw": raw,
    }
    (values, lengths), _ = variants["naive"](0)
    for exchange in ours.values():
        features = exchange.run(0).features
        assert torch.equal(features.values(), values)
        of_keys = features.lengths().view(len(lengths), -1)
        assert torch.equal(of_keys[:, : plans[0].layout.num_real], lengths)
    rounds = [{name: median_ms(run, steps, device) for name, run in variants.items()} for _ in range(ROUNDS)]
    group.close()
    dist.destroy_process_group(plain_group)
    row: Row = {"ranks": dist.get_world_size(), "batch_size": batch_size, "strategy": strategy}
    row["sent_kb"] = round(statistics.median(int(sizes.sum()) for sizes in sent) / 1e3, 1)
    row |= {f"{name}_ms": [round(times[name], 4) for times in rounds] for name in variants}
    row |= {f"x_{name}": [round(times["all_to_all"] / times[name], 3) for times in rounds] for name in ("raw", "naive")}
    return row


def main() -> None:
    """Print a row for each strategy and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--batch-sizes", default="32,128,512", help="samples per rank, comma-separated")
    parser.add_argument("--strategies", default="lpt-swap,min-move", help="comma-separated")
    parser.add_argument("--steps", type=int, default=60, help="steps of each round")
    options = parser.parse_args()
    if unknown := [name for name in options.strategies.split(",") if name not in STRATEGIES]:
        parser.error(f"no strategy is called {unknown[0]!r}; known are {', '.join(STRATEGIES)}")
    ranks = ranks_of(parser, options)
    emit(machine())
    settings = itertools.product(options.strategies.split(","), map(int, options.batch_sizes.split(",")))
    show([emit(ranks.run(time_exchange, size, options.steps, strategy)) for strategy, size in settings])


if __name__ == "__main__":
    main()
