"""`Monitors`: what watches over a training job, step by step: losses, speed, memory, and steps that do not end."""

import dataclasses
from itertools import groupby
from operator import attrgetter
from pathlib import Path
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
    device_peaks,
    gather_timings,
    scale_loss,
)
from trainer.balance_log import BalanceLog, measured_line, measured_numbers
from trainer.config import TrainConfig
from trainer.embedding_caches import EmbeddingCaches
from trainer.logs import JobLog
from trainer.pipelines import PipelineStep
from trainer.profile_window import ProfileWindow
from trainer.tasks import Task
from trainer.throughput import Throughput, ThroughputMeter
from trainer.world import World, gather, on_all_ranks

_TRACKED_STEPS = 10


class Monitors:
    """Collective, as are its methods: every rank must call them.

    Args:
        config: the job's settings.
        world: its ranks.
        task: what it learns.
        model: that is trained.
        log: where to report.
        balance_log: measures the steps.
        every: steps between reports.

    Raises:
        DataError: the folder of the profile cannot be created.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        task: Task,
        model: nn.Module,
        log: JobLog,
        balance_log: BalanceLog,
        *,
        every: int,
    ) -> None:
        device = world.device
        self._task = task
        self._log = log
        self._balance_log = balance_log
        self._finite = FiniteCheck()
        self._losses = LossAverage(task.num_tasks, group=world.data, device=device)
        peak_flops = _peak_flops(config, device)
        self._meter = ThroughputMeter(task.flops, every=every, device=device, peak_flops=peak_flops, group=world.data)
        self._stall = StallWatch(config.stall_seconds)
        self._memory = _watch_memory(config, device)
        self._caches = EmbeddingCaches(model)
        self._profile = on_all_ranks(lambda: _profile(config, world))
        self._tracker = _track(config, task, model, device)
        self._tracked_until = (config.track_attention or 0) + _TRACKED_STEPS
        self._num_steps = 0  # of this run

    def mean_loss(self, output: tuple[Tensor, Any], batch: JaggedBatch) -> Tensor:
        """Return the loss to minimize, the sum over tasks, given what the model returned."""
        loss = scale_loss(output[0], batch).sum()
        if loss.requires_grad:  # not in an evaluation
            self._balance_log.timer.watch(loss)
        self._stall.beat()  # before this rank waits for the gradients of the others
        return loss

    def begin_step(self) -> None:
        """Take note that a step begins; `note` must follow."""
        if self._profile is not None:
            self._profile.begin_step()

    def note(self, step: int, done: PipelineStep[JaggedBatch]) -> None:
        """Take note of a step that has been trained.

        Raises:
            RankError: the loss of the step before was NaN or infinite on some rank.
        """
        self._num_steps += 1
        loss_sums = done.output[0].detach()
        self._finite.update(loss_sums, done.batch)
        self._losses.update(loss_sums, done.batch)
        if self._profile is not None and (trace := self._profile.end_step(step)) is not None:
            self._log.say(f"profile: {trace}")
        if (throughput := self._meter.step(self._task.work(done.batch))) is not None:
            self._report(dataclasses.replace(throughput, step=step))  # of the job, not of this run
        if self._tracker is not None:
            timings = self._tracker.step()
            if self._num_steps == self._tracked_until:
                for timing in gather_timings(timings):
                    self._log.say(timing.line())
                    of = f"rank_{timing.rank}/{timing.layer}"
                    self._log.record("attention", step, dataclasses.asdict(timing), of=of)

    def _report(self, throughput: Throughput) -> None:
        """Report on an interval; on GPUs also on the memory and the caches of all ranks."""
        step, loss = throughput.step, sum(self._losses.compute())
        self._losses.reset()
        measured = self._balance_log.measured()
        line, numbers = measured_line(measured), measured_numbers(measured)
        self._log.say(" | ".join(part for part in (throughput.line(loss=loss), line) if part))
        self._log.record("train", step, {"loss": loss, **dataclasses.asdict(throughput), **numbers})
        if self._memory is None:
            return
        usage = self._memory.check()
        self._log.say(usage.line())
        of_ranks = gather((dataclasses.asdict(usage), self._caches.read()))
        self._log.record("memory", step, {name: [of[name] for of, _ in of_ranks] for name in of_ranks[0][0]})
        uses = sorted((use for _, uses in of_ranks for use in uses), key=attrgetter("tables"))
        for tables, group in groupby(uses, key=attrgetter("tables")):
            counts = [(use.hits, use.misses) for use in group]
            hits, misses = (sum(column) for column in zip(*counts, strict=True))
            rate = hits / (hits + misses) if hits + misses else None
            values = {"tables": tables, "hits": hits, "misses": misses, "hit_rate": rate}
            self._log.record("embedding_cache", step, values, of=tables)

    def restart(self) -> None:
        """Measure the speed from now on, after an evaluation, whose time is not training's."""
        self._meter.restart()

    def pause(self) -> None:
        """Expect no step for a while, before an evaluation or a checkpoint.

        Raises:
            RankError: the loss of the last step was NaN or infinite on some rank.
        """
        self._stall.disarm()
        self._balance_log.timer.restart()
        self._finite.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stall.close()
        if self._profile is None or kind is not None:
            return
        if not self._profile.has_begun:
            self._log.say(f"no profile: this run ended after {self._num_steps} steps, before those of --profile")
        if (profiled := self._profile.finish()) is not None:
            self._log.say(f"profile: {profiled}")


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


def _watch_memory(config: TrainConfig, device: torch.device) -> MemoryWatch | None:
    limits = {"min_free_gib": config.min_free_gib, "max_unallocated": config.max_unallocated}
    return MemoryWatch(device, **limits) if device.type == "cuda" else None


def _profile(config: TrainConfig, world: World) -> ProfileWindow | None:
    if config.profile_window is None or world.rank > 0:
        return None
    return ProfileWindow(Path(config.out) / "profile", config.profile_window, world.device)
