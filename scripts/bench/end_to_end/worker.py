"""Runs on one rank, one after the other: `torchrun --nproc_per_node N scripts/bench/end_to_end/worker.py TASK.json...`.

The runner starts processes for each run, so that none ends with another. Several to one start save half a minute each.
"""

import dataclasses
import datetime
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import torch
import torch.cuda.nccl
import torch.distributed as dist
import torchrec
from torch.cuda import nccl

import evenrank
from end_to_end.batches import Source
from end_to_end.cost_fit import fit_cost
from end_to_end.experiments import Workload
from end_to_end.measure import Batches, StepClock, balance_of, describe, measure, peak_memory, prepare, train
from end_to_end.results import RunResult
from end_to_end.tasks import WorkerTask, new_result
from evenrank.cli import console
from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.costs.model_costs import TokenCost
from evenrank.datasets.schema import ACTION, ITEM_ID, USER_ID, Manifest
from evenrank.training import StepTimer, device_peaks, scale_loss
from trainer.config import TrainConfig
from trainer.data import balance_config
from trainer.job import quiet, set_precision
from trainer.parallel import distribute
from trainer.pipelines import Pipeline, make_pipeline
from trainer.tasks import ranking
from trainer.world import World, divide, join_world

_REFITS = 4  # before a run with `refit_every` is measured: the first of them has few times


def main(tasks: Sequence[WorkerTask]) -> None:
    """Measure runs, and write their results on rank 0."""
    quiet()
    with join_world() as world:
        for task in tasks:
            result = measured(task, divide(world, task.run.settings.tensor_parallel))
            if world.rank == 0:
                result.save(task.result)
            dist.barrier()  # the next one may read the result, for its cost
            gc.collect()  # what the models of this one still refer to, in cycles
            torch.cuda.empty_cache()


def measured(task: WorkerTask, world: World) -> RunResult:
    """Return the result of a run. Collective: every rank must call this.

    Raises:
        ConfigError: torchrun has started another number of processes than the task says.
    """
    if world.size != task.gpus:
        raise ConfigError(f"the task is for {task.gpus} processes, not {world.size}; start so many with torchrun")
    config, workload, device = task.run.settings, task.workload, world.device
    torch.manual_seed(config.seed)  # for equal weights on all ranks
    learns = ranking(config, _manifest(workload, config), world)
    assert isinstance(learns.cost, HSTUCost)
    cost: TokenCost = learns.cost if task.cost_result is None else fit_cost(RunResult.load(task.cost_result))
    set_precision(learns.dense, config, device)
    clock = StepClock(learns.dense.encoder, learns.dense, device)  # type: ignore[arg-type]
    parallel = distribute(learns.model, config, world)
    pipeline: Pipeline[SequenceBatch] = make_pipeline(
        config.pipeline,
        parallel.model,
        parallel.optimizer,
        device,
        loss=lambda output, batch: clock.watch(scale_loss(output[0], batch).sum()),
    )
    read = learns.read(
        batch_size=config.batch_size,
        max_history_length=config.max_history_length,
        seed=workload.seed,
    )
    assert isinstance(read, LoaderConfig)
    source = Source(workload, task.distribution, read, world)

    def balanced(cost: TokenCost, *, endless: bool, on_step: Callable[[StepMetrics], None] | None = None) -> Batches:
        way = balance_config(config, cost=cost, on_step=on_step)
        if not endless:
            way = dataclasses.replace(way, refit_every=None)  # of batches that are not trained
        if config.balance in EXCHANGES:
            drawn = source.endless() if endless else source.once()
            return Balancer(drawn, way, device=device, group=world.data)
        return closing(source.reading(way, num_workers=config.num_workers, endless=endless))

    def new_timer(refit_every: int) -> StepTimer:
        return StepTimer(device=device, every=max(refit_every // 4, 1), group=world.data)

    if config.refit_every is not None:
        # As a job that begins with the cost of the model. What it comes to also balances the prepared and even batches.
        with new_timer(config.refit_every) as timer, balanced(cost, endless=True, on_step=timer) as live:
            train(pipeline, clock, islice(iter(live), _REFITS * config.refit_every), timer)
        cost = timer.cost or cost
    steps: list[StepMetrics] = []
    prepared = prepare(balanced(cost, endless=False, on_step=steps.append), device)
    as_drawn = BalanceConfig(cost=cost, strategy="none")
    even = prepare(Balancer(source.even(cost), as_drawn, device=device, group=world.data), device)
    result = dataclasses.replace(
        new_result(task, _environment(device)),
        peak_flops=_peak_flops(config, device),
        flops={
            name: 3 * getattr(learns.flops, name)  # the backward pass takes twice as many
            for name in ("per_token", "per_pair", "per_prediction")
        },
        cost={"name": type(cost).__name__, **dataclasses.asdict(cost)},
        balanced=describe(prepared, learns.work, cost),
        even=describe(even, learns.work, cost),
        balance=balance_of(steps),
    )
    of_live = None if config.refit_every is None else new_timer(config.refit_every)
    with balanced(cost, endless=True, on_step=of_live) as live:
        segments = measure(
            pipeline,
            clock,
            workload,
            live=live,
            prepared=prepared,
            even=even,
            on_warm=partial(_reset_peak_memory, device),
            timer=of_live,
        )
    allocated, reserved = peak_memory(device)
    return dataclasses.replace(result, segments=segments, peak_allocated=allocated, peak_reserved=reserved)


def _manifest(workload: Workload, config: TrainConfig) -> Manifest:
    """Return the manifest of the data that are drawn, which says how large the tables are."""
    sizes = {USER_ID: workload.user_rows, ITEM_ID: workload.item_rows, ACTION: 2**config.num_tasks}
    return Manifest(dataset="random", vocabulary_sizes=sizes)


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_flops(config: TrainConfig, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return device_peaks(device).flops(torch.bfloat16 if config.uses_bf16("cuda") else torch.float32)


def _environment(device: torch.device) -> dict[str, Any]:
    """Return what the run was made on and with."""
    is_cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "host_cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if is_cuda else None,
        "torchrec": torchrec.__version__,
        "evenrank": evenrank.__version__,
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    # The runner sends it to a run that takes too long; then each rank says where it is.
    faulthandler.register(signal.SIGTERM, chain=True)
    if len(sys.argv) < 2:
        raise ConfigError("usage: worker.py TASK.json..., under torchrun")
    try:
        main([WorkerTask.load(Path(path)) for path in sys.argv[1:]])
    except EvenrankError as error:  # the runner finds this line in the log
        console.print_error(str(error))
        sys.exit(2)
