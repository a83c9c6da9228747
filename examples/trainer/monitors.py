"""`Monitors`: what watches over a training job, step by step: losses, speed, memory, and steps that do not end."""

import dataclasses
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from evenrank.dataloader import JaggedBatch
from evenrank.training import (
    AttentionTracker,
    FiniteCheck,
    LossAverage,
    MemoryWatch,
    StallWatch,
    ThroughputMeter,
    device_peaks,
    gather_timings,
    scale_loss,
)
from evenrank.training.pipelines import PipelineStep
from trainer.config import TrainConfig
from trainer.logs import JobLog
from trainer.tasks import Task
from trainer.world import World

_TRACKED_STEPS = 10


class Monitors:
    """Collective, as are its methods: every rank must call them.

    Args:
        config: the job's settings.
        world: its ranks.
        task: what it learns.
        model: that is trained.
        log: where to report.
        eval_every: steps between evaluations, which begin a new interval of reports.
    """

    def __init__(
        self, config: TrainConfig, world: World, task: Task, model: nn.Module, log: JobLog, *, eval_every: int
    ) -> None:
        device, every = world.device, min(config.log_every, eval_every)
        self._task = task
        self._log = log
        self._finite = FiniteCheck()
        self._losses = LossAverage(task.num_tasks, group=world.data, device=device)
        peak_flops = _peak_flops(config, device)
        self._meter = ThroughputMeter(task.flops, every=every, device=device, peak_flops=peak_flops, group=world.data)
        self._stall = StallWatch(config.stall_seconds)
        self._memory = MemoryWatch(device) if device.type == "cuda" else None
        self._tracker = _track(config, task, model, device)
        self._tracked_until = (config.track_attention or 0) + _TRACKED_STEPS
        self._num_steps = 0  # of this run

    def mean_loss(self, output: tuple[Tensor, Any], batch: JaggedBatch) -> Tensor:
        """Return the loss to minimize, the sum over tasks, given what the model returned."""
        self._stall.beat()  # before this rank waits for the gradients of the others
        return scale_loss(output[0], batch).sum()

    def note(self, step: int, done: PipelineStep[JaggedBatch]) -> None:
        """Take note of a step that has been trained.

        Raises:
            RankError: the loss of the step before was NaN or infinite on some rank.
        """
        self._num_steps += 1
        loss_sums = done.output[0].detach()
        self._finite.update(loss_sums, done.batch)
        self._losses.update(loss_sums, done.batch)
        if (throughput := self._meter.step(self._task.work(done.batch))) is not None:
            throughput = dataclasses.replace(throughput, step=step)  # of the job, not of this run
            loss = sum(self._losses.compute())
            self._losses.reset()
            self._log.say(throughput.line(loss=loss))
            measured = {name: value for name, value in dataclasses.asdict(throughput).items() if value is not None}
            self._log.record("train", step, {"loss": loss, **measured})
            if self._memory is not None:
                self._log.say(self._memory.check().line())
        if self._tracker is not None:
            timings = self._tracker.step()
            if self._num_steps == self._tracked_until:
                for timing in gather_timings(timings):
                    self._log.say(timing.line())

    def restart(self) -> None:
        """Measure the speed from now on, after an evaluation, whose time is not training's."""
        self._meter.restart()

    def pause(self) -> None:
        """Expect no step for a while, before an evaluation or a checkpoint.

        Raises:
            RankError: the loss of the last step was NaN or infinite on some rank.
        """
        self._stall.disarm()
        self._finite.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stall.close()


def _peak_flops(config: TrainConfig, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return device_peaks(device).flops(torch.bfloat16 if config.uses_bf16("cuda") else torch.float32)


def _track(config: TrainConfig, task: Task, model: nn.Module, device: torch.device) -> AttentionTracker | None:
    first = config.track_attention
    if first is None:
        return None
    return AttentionTracker(
        model,
        task.attention,
        device=device,
        start=first,
        stop=first + _TRACKED_STEPS,
        flops=task.attention_flops,
        peak_flops=_peak_flops(config, device),
    )
