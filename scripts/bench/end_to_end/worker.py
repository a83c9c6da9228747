"""`measure_run`: one run of the training benchmark on one rank."""

import dataclasses
from collections.abc import Callable
from contextlib import closing
from itertools import islice

import torch
import torch.distributed as dist

import report
from end_to_end.batches import Source
from end_to_end.experiments import Run, Workload
from end_to_end.measure import Batches, StepClock, describe, measure, peak_gib, prepare, train
from end_to_end.summary import Row, summarize
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
from trainer.world import World, divide

_REFITS = 4  # before a run with `refit_every` is measured: the first of them has few times


def measure_run(device: torch.device, run: Run) -> Row:
    """Return the row of a run on the ranks of the default process group. Collective."""
    quiet()
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    row = measured(run, divide(world, run.settings.tensor_parallel))
    return row | {"conditions": run.conditions, "machine": report.machine()}


def measured(run: Run, world: World) -> Row:
    """Return the row of a run. Collective."""
    config, workload, device = run.settings, run.workload, world.device
    torch.manual_seed(config.seed)  # for equal weights on all ranks
    learns = ranking(config, _manifest(workload, config), world)
    assert isinstance(learns.cost, HSTUCost)
    cost: TokenCost = learns.cost
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
        batch_size=config.batch_size, max_history_length=config.max_history_length, seed=workload.seed
    )
    assert isinstance(read, LoaderConfig)
    source = Source(workload, read, world)

    def balanced(*, endless: bool, on_step: Callable[[StepMetrics], None] | None = None) -> Batches:
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
        # As a job that begins with the cost of the model. The cost that it comes to also balances prepared and even
        # batches.
        with new_timer(config.refit_every) as timer, balanced(endless=True, on_step=timer) as live:
            train(pipeline, clock, islice(iter(live), _REFITS * config.refit_every), timer)
        cost = timer.cost or cost
    steps: list[StepMetrics] = []
    prepared = prepare(balanced(endless=False, on_step=steps.append), device)
    as_drawn = BalanceConfig(cost=cost, strategy="none")
    even = prepare(Balancer(source.even(cost), as_drawn, device=device, group=world.data), device)
    of_live = None if config.refit_every is None else new_timer(config.refit_every)
    with balanced(endless=True, on_step=of_live) as live:
        segments = measure(pipeline, clock, workload, live=live, prepared=prepared, even=even, timer=of_live)
    figures = summarize(
        segments,
        describe(prepared, learns.work, cost),
        steps,
        # The backward pass takes twice as many.
        flops={name: 3 * getattr(learns.flops, name) for name in ("per_token", "per_pair", "per_prediction")},
        peak_flops=_peak_flops(config, device),
        data_ranks=world.data_size,
    )
    named = {"lengths": run.lengths, "run": run.name, "gpus": run.gpus, "cost": type(cost).__name__}
    return named | figures | {"peak_gib": peak_gib(device)}


def _manifest(workload: Workload, config: TrainConfig) -> Manifest:
    """Return the manifest of the data that are drawn, which says how large the tables are."""
    sizes = {USER_ID: workload.user_rows, ITEM_ID: workload.item_rows, ACTION: 2**config.num_tasks}
    return Manifest(dataset="random", vocabulary_sizes=sizes)


def _peak_flops(config: TrainConfig, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return device_peaks(device).flops(torch.bfloat16 if config.uses_bf16("cuda") else torch.float32)
