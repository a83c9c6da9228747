"""`Monitors`: what a job says: losses, speed, balance and memory, in lines for people and in `log.jsonl`."""

import dataclasses
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerAction, profile

from evenrank.dataloader import JaggedBatch
from evenrank.dataloader.balance import BalanceConfig, StepMetrics, summarize
from evenrank.dataloader.balance.metrics.step_metrics import shown_numbers
from evenrank.dataloader.balance.metrics.writers import JsonLines
from evenrank.training import (
    FiniteCheck,
    LossAverage,
    MemoryWatch,
    StallWatch,
    StepTimer,
    Work,
    device_peaks,
    scale_loss,
)
from trainer.config import TrainConfig
from trainer.parallel import PipelineStep
from trainer.tasks import Task
from trainer.world import World

_STEPS, _COMPARED_STEPS = 100, 10  # balanced and unbalanced steps whose measured times a line summarizes
_MEASURED = ("measured_idle_after", "step_seconds", "measured_idle_before", "compared_step_seconds", "measured_speedup")


class JobLog(AbstractContextManager["JobLog"]):
    """Lines of a job on standard output, and JSON lines in OUT/log.jsonl; on all ranks but the first, nothing."""

    def __init__(self, out: Path, world: World) -> None:
        self._file: Any = None
        if world.rank == 0:
            self._file = (out / "log.jsonl").open("a+b", buffering=0)  # so that a job that is killed loses no line
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)  # it may have been killed within one
            self._file.seek(0, os.SEEK_END)

    def say(self, text: str) -> None:
        """Print a line for people."""
        if self._file is not None:
            print(text, flush=True)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line of JSON, such as of the kind `train` or `eval`; NaN is null."""
        if self._file is not None:
            shown = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
            self._file.write(json.dumps({"kind": kind, "step": step, **shown}).encode() + b"\n")

    def has(self, kind: str, step: int) -> bool:
        """Return whether `record` has written such a line, in this run or an earlier one. Collective."""
        found = [False]
        if self._file is not None:
            self._file.seek(0)
            lines = map(json.loads, self._file.read().splitlines())
            found = [any((line["kind"], line["step"]) == (kind, step) for line in lines)]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


class Monitors(AbstractContextManager["Monitors"]):
    """Collective, as are its methods: every rank must call them."""

    def __init__(self, config: TrainConfig, world: World, task: Task, log: JobLog) -> None:
        device, every = world.device, config.log_every
        self._config, self._world, self._task, self._log = config, world, task, log
        self._finite, self._losses = FiniteCheck(), LossAverage(config.num_tasks, device=device)
        self._stall, self._memory = StallWatch(), MemoryWatch(device) if device.type == "cuda" else None
        self._peak = math.nan  # of one GPU
        if device.type == "cuda":
            dtype = torch.bfloat16 if config.uses_bf16("cuda") else torch.float32
            self._peak = device_peaks(device).flops(dtype) or math.nan
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)  # of tokens, pairs and predictions
        self._num_steps, self._in_interval, self._started = 0, 0, time.perf_counter()
        self._steps = deque[StepMetrics](maxlen=max(every, _STEPS))
        self._compared = deque[StepMetrics](maxlen=_COMPARED_STEPS)
        writers: list[Callable[[StepMetrics], None]] = [self._note_times]
        self._lines: JsonLines | None = None
        if world.rank == 0:  # a job that resumes gets balance-2.jsonl
            options = {"job": dataclasses.asdict(config)}
            self._lines = JsonLines(Path(config.out) / "balance.jsonl", every=every, options=options)
            writers.append(self._lines)
        self._timer = StepTimer(*writers, device=device, every=every)
        self._profile = _start_profile(config, log) if config.profile is not None and world.rank == 0 else None

    def observe(self, balance: BalanceConfig) -> BalanceConfig:
        """Return how to balance the steps of training, which are measured; some may stay unbalanced."""
        refit_every, compare_every = self._config.refit_every, self._config.compare_every
        return dataclasses.replace(balance, on_step=self._timer, refit_every=refit_every, compare_every=compare_every)

    def mean_loss(self, output: tuple[Tensor, Any], batch: JaggedBatch) -> Tensor:
        """Return the loss to minimize, the sum over tasks, given what the model returned."""
        loss = scale_loss(output[0], batch).sum()
        if loss.requires_grad:  # not in an evaluation
            self._timer.watch(loss)
        self._stall.beat()  # before this rank waits for the gradients of the others
        return loss

    def note(self, step: int, done: PipelineStep) -> None:
        """Take note of a step that has been trained; a RankError if the loss of the one before was not finite."""
        loss_sums = done.output[0].detach()
        self._finite.update(loss_sums, done.batch)
        self._losses.update(loss_sums, done.batch)
        work = self._task.work(done.batch)
        # One at a time: copying counts that are on the host to the device in one tensor would wait for it.
        for index, count in enumerate((work.tokens, work.pairs, work.predictions)):
            self._counts[index].add_(count)
        self._num_steps += 1
        self._in_interval += 1
        if self._profile is not None:
            self._profile.step()
        if self._num_steps % self._config.log_every == 0:
            self._report(step)

    def _report(self, step: int) -> None:
        """Report on the steps since the last report, or since the last evaluation."""
        gathered = [torch.empty_like(self._counts) for _ in range(self._world.size)]
        dist.all_gather(gathered, self._counts)
        counts = torch.stack(gathered).tolist()  # waits for the device
        seconds = time.perf_counter() - self._started
        flops = [self._task.flops.of(Work(tokens=t, pairs=p, predictions=n)).total for t, p, n in counts]
        rates = [int(of_rank) / seconds for of_rank in flops]
        numbers: dict[str, Any] = {
            "loss": sum(self._losses.compute()),
            "step_ms": 1e3 * seconds / self._in_interval,
            "tokens": sum(of_rank[0] for of_rank in counts),
            "tflops": sum(rates) / len(rates) / 1e12,
            "mfu": sum(rates) / len(rates) / self._peak,
        }
        if not math.isnan(self._peak):
            numbers["rank_mfu"] = [rate / self._peak for rate in rates]
        known = shown_numbers(summarize([*self._steps, *self._compared]))
        numbers |= {name: known[name] for name in _MEASURED if name in known}
        self._losses.reset()
        self.restart()
        self._log.say(line_of(step, numbers))
        self._log.record("train", step, numbers)
        if self._memory is not None:
            usages: list[Any] = [None] * self._world.size
            dist.all_gather_object(usages, dataclasses.asdict(self._memory.check()))
            self._log.record("memory", step, {name: [usage[name] for usage in usages] for name in usages[0]})

    def restart(self) -> None:
        """Measure the speed from now on, as after an evaluation, whose time is not training's."""
        self._counts.zero_()
        self._in_interval, self._started = 0, time.perf_counter()

    def pause(self) -> None:
        """Expect no step for a while, before an evaluation or a checkpoint; a RankError as in `note`."""
        self._stall.disarm()
        self._timer.restart()
        self._finite.finish()

    def _note_times(self, metrics: StepMetrics) -> None:
        if metrics.compute_seconds is not None:
            (self._steps if metrics.is_balanced else self._compared).append(metrics)

    def __exit__(self, *error: Any) -> None:
        self._stall.close()
        if self._profile is not None:
            self._profile.stop()
        self._timer.__exit__(*error)
        if self._lines is not None:
            self._lines.close()


def line_of(step: int, numbers: Mapping[str, float]) -> str:
    """Return what is known of an interval as a line of a log."""
    mfu = "unknown" if math.isnan(numbers["mfu"]) else f"{100 * numbers['mfu']:.1f} %"
    parts = [
        f"step {step} | loss {numbers['loss']:.4f} | tokens {numbers['tokens']:,} | {numbers['step_ms']:.1f} ms",
        f"{numbers['tflops']:.1f} TFLOP/s | MFU {mfu}",
    ]
    for name, idle, seconds in (
        ("idle", "measured_idle_after", "step_seconds"),
        ("unbalanced", "measured_idle_before", "compared_step_seconds"),
    ):
        if idle in numbers:
            parts.append(f"{name} {100 * numbers[idle]:.1f} % of {1e3 * numbers[seconds]:.1f} ms")
    speedup = f", speed-up {numbers['measured_speedup']:.2f}x" if "measured_speedup" in numbers else ""
    return " | ".join(parts) + speedup


def _start_profile(config: TrainConfig, log: JobLog) -> profile:
    """Profile the steps of `--profile`; the trace is for Perfetto or chrome://tracing."""
    assert config.profile_window is not None
    start, stop = config.profile_window
    trace = Path(config.out) / "profile" / f"steps-{start}-{stop}.trace.json"

    def action(step: int) -> ProfilerAction:
        if start <= step < stop:
            return ProfilerAction.RECORD_AND_SAVE if step == stop - 1 else ProfilerAction.RECORD
        return ProfilerAction.NONE

    def save(finished: profile) -> None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(trace))
        log.say(f"profile: {trace}")

    started = profile(schedule=action, on_trace_ready=save)
    started.start()
    return started
