"""Measure the device memory that a Balancer's steps in flight take, beyond the batches that the training loop holds.

    .venv/bin/python scripts/bench/memory.py [--ranks 2] [--steps 20]        on all GPUs of the host

Batches of 32 x 4,096 and 512 x 512 tokens per rank: int64 item_id, action and label, user_id and user_age, with lengths
drawn uniformly from half to one and a half of these means, so that samples change ranks; lpt-swap, lookahead 1 and 2. A
step uses the batch, waits for the device, and 10 ms for the background, so that all steps in flight have their buffers.
In flight are the steps that are started and not yet handed out: `lookahead` of them while a batch is trained. The plain
loop moves the same, already balanced batches with .to(device) from pinned memory.

MB are those of PyTorch's allocator on the rank with the highest peak:

    batch_mb            tensors of a balanced batch, mean
    held_mb             torch.cuda.memory_allocated while the loop trains one batch, the maximum over steps
    peak_mb             torch.cuda.max_memory_allocated: the loop still holds a batch when it takes the next one
    plain_...           the same of the plain loop
    ..._per_step        difference from the plain loop per step in flight, in batches
"""

import argparse
import gc
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import JaggedBatch, LoaderConfig
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.random_batches import RandomBatches
from evenrank.datasets.distributions import Uniform
from host import COST, DATA
from local_ranks import TIMEOUT, add_options, gather, ranks_of
from report import Row, emit, machine, show

SHAPES = ((32, 4096), (512, 512))  # samples, mean length
WARMUP_STEPS, PAUSE_SECONDS = 5, 0.01
Memory = dict[str, int]  # bytes that were allocated while a loop ran: `held` and `peak`


def batches_of(batch_size: int, mean: int, steps: int) -> RandomBatches[Any]:
    """Return this rank's batches on the host."""
    data = replace(DATA, lengths=Uniform(low=mean // 2, high=mean + mean // 2))
    settings: Any = {"batch_size": batch_size, "max_history_length": 2 * mean, "num_tasks": 1, "user_id": True}
    ranks: Any = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    config = LoaderConfig(**settings, pin_memory=True)
    return RandomBatches(config, data, num_batches=steps, num_distinct=steps, **ranks)


def num_bytes(batch: JaggedBatch) -> int:
    """Return the bytes of a batch's tensors."""
    total = 0
    for _, value in batch.tensors():
        tensors = [value.values(), value.lengths()] if isinstance(value, KeyedJaggedTensor) else [value]
        total += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return total


def memory_of(batches: Iterable[JaggedBatch], before: int) -> Memory:
    """Return what a loop over batches takes beyond the bytes that were allocated before."""
    held = 0
    for step, batch in enumerate(batches):
        features: Any = dict(batch.tensors())["features"]
        features.values().sum()
        torch.cuda.synchronize()
        time.sleep(PAUSE_SECONDS)
        if step < WARMUP_STEPS:
            torch.cuda.reset_peak_memory_stats()
        else:
            held = max(held, torch.cuda.memory_allocated())
    return {"held": held - before, "peak": torch.cuda.max_memory_allocated() - before}


def allocated() -> int:
    """Return the bytes that are allocated once nothing unused is left."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def measure(device: torch.device, steps: int) -> list[Row]:
    """Return the rows of all shapes. Collective."""
    rows = []
    for batch_size, mean in SHAPES:
        loaded = batches_of(batch_size, mean, steps + WARMUP_STEPS)

        def balancer(lookahead: int, loaded: RandomBatches[Any] = loaded) -> Balancer[Any]:
            return Balancer(loaded, BalanceConfig(cost=COST, lookahead=lookahead, timeout=TIMEOUT), device=device)

        with balancer(1) as batches:
            balanced = [batch.to("cpu").pin_memory() for batch in batches]
        size = fmean(map(num_bytes, itertools.islice(balanced, WARMUP_STEPS, None)))
        plain = memory_of((batch.to(device, non_blocking=True) for batch in balanced), allocated())
        for lookahead in (1, 2):
            before = allocated()
            with balancer(lookahead) as batches:
                taken = memory_of(batches, before)
            shape = {"samples": batch_size, "mean_length": mean, "lookahead": lookahead, "ranks": dist.get_world_size()}
            rows.append(shape | summarize(gather((size, plain, taken)), lookahead))
    return rows


def summarize(of_ranks: Sequence[tuple[float, Memory, Memory]], lookahead: int) -> Row:
    """Return the numbers of a row, given each rank's bytes of a batch, of the plain loop and of the Balancer's."""
    batch, plain, taken = max(of_ranks, key=lambda of_rank: of_rank[2]["peak"])
    row: Row = {"batch_mb": round(batch / 1e6, 3)}
    for name, own in taken.items():
        row |= {f"{name}_mb": round(own / 1e6, 3), f"plain_{name}_mb": round(plain[name] / 1e6, 3)}
        row |= {f"{name}_per_step": round((own - plain[name]) / batch / lookahead, 2)}
    return row


def main() -> None:
    """Measure on the GPUs of this host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each row")
    options = parser.parse_args()
    if options.device == "cpu":
        parser.error("this benchmark measures the memory of GPUs, and PyTorch finds none; run it on a host with a GPU")
    emit(machine())
    show([emit(row) for row in ranks_of(parser, options).run(measure, options.steps)])


if __name__ == "__main__":
    main()
