"""`measure_run`: trains a run on live, prepared and even batches in turn, on one rank, and returns its row."""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

import report
from end_to_end.batches import Source, load_of
from end_to_end.experiments import Run, Workload
from end_to_end.summary import EVEN, LIVE, PREPARED, Row, Segment, Work, summarize
from evenrank.dataloader import LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, Balancer, Cost, HSTUCost, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.costs.model_costs import TokenCost
from evenrank.datasets.schema import ACTION, ITEM_ID, USER_ID, Manifest
from evenrank.training import StepTimer, device_peaks, scale_loss
from evenrank.training import Work as BatchWork
from evenrank.training.step_timer import Clock
from local_ranks import gather
from trainer import (
    Pipeline,
    World,
    balance_config,
    distribute,
    make_pipeline,
    quiet,
    ranking,
    run_pipeline,
    set_precision,
)

Batches = AbstractContextManager[Iterable[SequenceBatch]]

_REFITS = 4  # before a run with `refit_every` is measured: the first of them has few times


def measure_run(device: torch.device, run: Run) -> Row:
    """Return the row of a run on the ranks of the default process group. Collective."""
    quiet()
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    row = measured(run, world)
    return row | {"conditions": run.conditions, "machine": report.machine()}


def measured(run: Run, world: World) -> Row:
    """Return the row of a run. Collective."""
    config, workload, device = run.settings, run.workload, world.device
    torch.manual_seed(config.seed)  # for equal weights on all ranks
    sizes = {USER_ID: workload.user_rows, ITEM_ID: workload.item_rows, ACTION: 2**config.num_tasks}
    learns = ranking(config, Manifest(dataset="random", vocabulary_sizes=sizes), world)
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
    read = learns.read(batch_size=config.batch_size, max_history_length=config.max_history_length, seed=workload.seed)
    assert isinstance(read, LoaderConfig)
    source = Source(workload, read, world)

    def balanced(*, endless: bool, on_step: Callable[[StepMetrics], None] | None = None) -> Batches:
        way = balance_config(config, cost=cost, on_step=on_step)
        if not endless:
            way = dataclasses.replace(way, refit_every=None)  # of batches that are not trained
        if config.balance in EXCHANGES:
            drawn = source.endless() if endless else source.once()
            return Balancer(drawn, way, device=device)
        return closing(source.reading(way, num_workers=config.num_workers, endless=endless))

    def new_timer(refit_every: int) -> StepTimer:
        return StepTimer(device=device, every=max(refit_every // 4, 1))

    if config.refit_every is not None:
        # As a job that begins with the cost of the model. The cost that it comes to also balances prepared and even
        # batches.
        with new_timer(config.refit_every) as timer, balanced(endless=True, on_step=timer) as live:
            train(pipeline, clock, islice(iter(live), _REFITS * config.refit_every), timer)
        cost = timer.cost or cost
    steps: list[StepMetrics] = []
    prepared = prepare(balanced(endless=False, on_step=steps.append), device)
    as_drawn = BalanceConfig(cost=cost, strategy="none")
    even = prepare(Balancer(source.even(cost), as_drawn, device=device), device)
    of_live = None if config.refit_every is None else new_timer(config.refit_every)
    with balanced(endless=True, on_step=of_live) as live:
        segments = measure(pipeline, clock, workload, live=live, prepared=prepared, even=even, timer=of_live)
    dtype = torch.bfloat16 if config.uses_bf16(device.type) else torch.float32
    figures = summarize(
        segments,
        describe(prepared, learns.work, cost),
        steps,
        # The backward pass takes twice as many.
        flops={name: 3 * getattr(learns.flops, name) for name in ("per_token", "per_pair", "per_prediction")},
        peak_flops=device_peaks(device).flops(dtype) if device.type == "cuda" else None,
        data_ranks=world.size,
    )
    named = {"lengths": run.lengths, "run": run.name, "gpus": run.gpus, "cost": type(cost).__name__}
    return named | figures | {"peak_gib": peak_gib(device)}


class StepClock:
    """Marks five points of each step, without waiting for the device; `Segment.marks` says which.

    Args:
        encoder: module whose first argument are the embeddings of a batch; its forward begins when these have arrived.
        dense: module whose forward ends with the loss.
        device: of both.
    """

    def __init__(self, encoder: nn.Module, dense: nn.Module, device: torch.device) -> None:
        self.device = device
        self._clock = Clock(device)
        self._reference: Any = None
        self._embeddings: Tensor | None = None  # of the current batch
        self.timer: StepTimer | None = None
        """Measures steps besides, for a cost that is fitted."""
        self._points: list[Any] = []  # of the current step
        self._steps: list[list[Any]] = []
        encoder.register_forward_pre_hook(self._begin_encoder)
        dense.register_forward_hook(self._end_forward)

    def watch(self, loss: Tensor) -> Tensor:
        """Return the loss of a step, which the timer watches."""
        if self.timer is not None:
            # Then embeddings are exchanged, which waits for the other ranks.
            self.timer.watch(loss, until=self._embeddings)
        return loss

    def start(self) -> None:
        """Begin a segment. Collective: every rank must call this."""
        if self.timer is not None:
            self.timer.restart()
        self._clock.wait()
        # It ends on all ranks at the same moment, to within some microseconds.
        dist.all_reduce(torch.zeros(1, device=self.device))
        self._reference = self._clock.mark()
        self._points, self._steps = [self._reference], []

    def end_step(self) -> None:
        """Note that all work of a step has been launched."""
        end = self._clock.mark()
        self._steps.append([*self._points, end])
        self._points = [end]

    def read(self) -> NDArray[np.float64]:
        """Return the points of the steps since `start`: float64 [steps, 5], in milliseconds. Waits for the device."""
        self._clock.wait()
        return np.array([[self._clock.milliseconds(self._reference, point) for point in step] for step in self._steps])

    def _begin_encoder(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._points.append(self._clock.mark())
        self._embeddings = embeddings = arguments[0]
        # Its gradient is complete when the encoder's backward is.
        embeddings.register_hook(self._end_backward)

    def _end_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._points.append(self._clock.mark())

    def _end_backward(self, gradient: Tensor) -> None:
        self._points.append(self._clock.mark())


def prepare(batches: Batches, device: torch.device) -> list[SequenceBatch]:
    """Return batches on a device, all before any is trained. Collective."""
    with batches as opened:
        return [batch.to(device) for batch in opened]


def describe(batches: Iterable[SequenceBatch], work: Callable[[SequenceBatch], BatchWork], cost: Cost) -> Work:
    """Return what batches give each rank to do. Collective."""
    rows = []
    for batch in batches:
        of_batch = work(batch)
        counts = [int(count) for count in (of_batch.tokens, of_batch.pairs, of_batch.predictions)]
        rows.append([*counts, load_of(batch, cost)])
    return Work(*np.moveaxis(np.array(gather(rows)), 2, 0))


def measure(
    pipeline: Pipeline[SequenceBatch],
    clock: StepClock,
    workload: Workload,
    *,
    live: Iterable[SequenceBatch],
    prepared: list[SequenceBatch],
    even: list[SequenceBatch],
    timer: StepTimer | None = None,
) -> tuple[Segment, ...]:
    """Train, and return the segments of all rounds. Collective.

    Args:
        pipeline: that trains a batch.
        clock: that its model marks.
        workload: says how long.
        live: balances the batches while they are trained, one after the other, again and again.
        prepared: the same batches, balanced beforehand.
        even: perfectly even batches.
        timer: measures live steps.
    """
    endless = {
        LIVE: iter(live),
        PREPARED: chain.from_iterable(cycle([prepared])),
        EVEN: chain.from_iterable(cycle([even])),
    }
    # Each kind warms up, so that nothing that happens once is left for the clock of any: Triton compiles kernels, and
    # cuBLAS chooses others, for new numbers of tokens; allocators ask the driver for memory.
    for kind, batches in endless.items():
        train(pipeline, clock, islice(batches, workload.warmup_steps), timer if kind == LIVE else None)
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(clock.device)
    # Whatever is there now stays; garbage collection would look at all of it time and again, on another rank each time.
    gc.collect()
    gc.freeze()
    counted = -(-workload.steps // workload.rounds)
    segments = []
    kinds = [*endless]
    for number in range(workload.rounds):
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:  # each comes first in its turn
            steps = islice(endless[kind], counted + workload.skipped_steps)
            trained, marks = train(pipeline, clock, steps, timer if kind == LIVE else None)
            batch = trained[workload.skipped_steps :] % workload.num_batches
            segments.append(Segment(kind, number, batch, np.stack(gather(marks[workload.skipped_steps :]))))
    gc.unfreeze()
    return tuple(segments)


def train(
    pipeline: Pipeline[SequenceBatch],
    clock: StepClock,
    batches: Iterator[SequenceBatch],
    timer: StepTimer | None = None,
) -> tuple[Any, Any]:
    """Train batches, which a timer measures too; return the number of each and its points in time. Collective."""
    trained = []
    clock.timer = timer
    clock.start()
    for done in run_pipeline(pipeline, batches):
        clock.end_step()
        trained.append(done.batch.step)
    return np.array(trained), clock.read()


def peak_gib(device: torch.device) -> float | None:
    """Return the most memory that a rank has allocated while training, of the rank with the most. Collective."""
    return max(gather(torch.cuda.max_memory_allocated(device))) / 2**30 if device.type == "cuda" else None
