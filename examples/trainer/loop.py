"""`Training`: the loop of a job, from the step after its last checkpoint to its end, or to a signal on any rank."""

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.dataloader import JaggedBatch, Loader
from trainer.checkpoints import Checkpoints
from trainer.config import TrainConfig
from trainer.data import Batches
from trainer.evaluation import Evaluation
from trainer.logs import JobLog
from trainer.monitors import Monitors
from trainer.parallel import Parallel
from trainer.pipelines import Pipeline, run_pipeline
from trainer.windows import WindowEvaluation
from trainer.world import World

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes signals, which ranks receive at different times or not at all, and lets all ranks agree on a step to stop.

    The ranks' answers are gathered on the CPU while the next step is computed, so that no rank waits for them: a signal
    ends the job one step later. Signals are noted while the context is open. Collective: every rank must create one,
    and enter it on its main thread.
    """

    def __init__(self) -> None:
        self._received = 0
        self._group = dist.new_group(backend="gloo")
        self._in_flight: tuple[dist.Work, Tensor] | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def poll(self) -> signal.Signals | None:
        """Return the signal that some rank had received at the last call, or None. Collective: call it once a step."""
        agreed = self._await_answers()
        answer = torch.tensor(self._received)
        work = dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._in_flight = (work, answer)
        return signal.Signals(agreed) if agreed else None

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self._await_answers()  # so that nothing is in flight when the process group ends

    def _await_answers(self) -> int:
        if self._in_flight is None:
            return 0
        (work, answer), self._in_flight = self._in_flight, None
        work.wait()
        return int(answer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number  # the first one decides


@dataclass(kw_only=True, slots=True)
class Training:
    """Everything that a job trains with, and how far it is. All methods are collective."""

    config: TrainConfig
    world: World
    parallel: Parallel
    """The model and its optimizer."""
    pipeline: Pipeline[Any]
    """Of both."""
    loader: Loader[Any]
    batches: Batches[Any]
    """Of the loader."""
    num_epochs: int
    """Epochs of the loader that are trained."""
    evaluation: Evaluation | WindowEvaluation
    checkpoints: Checkpoints
    monitors: Monitors
    log: JobLog
    stop: StopSignals
    learning_rates: list[float]
    """After the warm-up, of each group of parameters."""
    step: int = 0
    """Optimizer steps so far, over all runs of the job."""
    last_batch: JaggedBatch | None = field(default=None, init=False)
    """The one trained last in this run."""

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        newest = self.checkpoints.newest()
        if newest is None:
            return
        state = self._state()
        self.checkpoints.load(newest, state)
        self.parallel.load_state_dict(state)
        self.batches.load_state_dict(state["loader"])
        self.step = state["step"]
        self.log.say(f"resumed from {newest}; another --out starts over")

    def run(self) -> signal.Signals | None:
        """Train to the end, or until a signal, which is returned; the last checkpoint is complete then."""
        is_done = self._is_done()
        if is_done:
            limits = "--epochs or --max-steps" if self.config.time_windows is None else "--max-steps"
            self.log.say(f"all {self.step} steps are done; raise {limits} to go on")
        if self._lacks_evaluation(is_done=is_done):
            self._evaluate()
        batches = chain.from_iterable(repeat(self.batches))  # of one epoch after the other
        stopped_by = None
        while stopped_by is None and not self._is_done():
            stopped_by = self._train_epoch(batches)
        self._save()
        self.checkpoints.finish()
        return stopped_by

    def _is_done(self) -> bool:
        """Return whether nothing is left to train; between epochs, of which those without samples are skipped."""
        self.loader.skip_empty()
        return self.loader.epoch >= self.num_epochs or self.step >= (self.config.max_steps or sys.maxsize)

    def _train_epoch(self, batches: Iterator[JaggedBatch]) -> signal.Signals | None:
        """Train what is left of an epoch, evaluate and save; return the signal that ended it early."""
        end = self.step + self.batches.remaining_batches()
        max_steps, every = self.config.max_steps or sys.maxsize, self.config.eval_every or sys.maxsize
        # If all epochs after this one have as many steps, as windows of time have not.
        expected = end + (self.num_epochs - self.loader.epoch - 1) * len(self.loader)
        self.log.expect(self.step, min(expected, max_steps))
        last_step = min(end, max_steps)
        while self.step < last_step:
            stopped_by = self._train(batches, min(last_step, self.step - self.step % every + every))
            if stopped_by is not None:
                return stopped_by
            if self.step == end:
                self._save()
            self._evaluate()
        return None

    def _train(self, batches: Iterator[JaggedBatch], until: int) -> signal.Signals | None:
        """Train up to a step; return the signal that ended it early."""
        checkpoint_every = self.config.checkpoint_every or sys.maxsize
        self._prepare_step()
        for done in run_pipeline(self.pipeline, islice(batches, until - self.step)):
            self.step += 1
            self.last_batch = done.batch
            self.log.advance()
            self.monitors.note(self.step, done)
            if (stopped_by := self.stop.poll()) is not None:
                return stopped_by
            if self.step % checkpoint_every == 0:
                self._save()
            if self.step < until:
                self._prepare_step()
        return None

    def _prepare_step(self) -> None:
        self.monitors.begin_step()
        # Dropout depends on seed, step and rank alone, so there is no state of random generators to save.
        # Ranks that divide a layer's heads drop units of their own.
        torch.manual_seed((self.config.seed * 1_000_003 + self.step) * self.world.size + self.world.rank)
        progress = min(1.0, (self.step + 1) / max(1, self.config.warmup_steps))
        for group, full in zip(self.parallel.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = full * progress

    def _lacks_evaluation(self, *, is_done: bool) -> bool:
        """Return whether the run before ended between a step and its evaluation."""
        is_between_epochs = self.batches.remaining_batches() == len(self.loader)
        is_due = is_done or is_between_epochs or self.step % (self.config.eval_every or sys.maxsize) == 0
        return is_due and self.step > 0 and not self.log.has("eval", self.step)

    def _evaluate(self) -> None:
        self.monitors.pause()
        metrics = self.evaluation.run()
        shown = (
            f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
        )
        self.log.say(" | ".join((f"step {self.step}", *shown)))
        self.log.record("eval", self.step, metrics)
        self.monitors.restart()

    def _save(self) -> None:
        self.monitors.pause()  # after a check, so that no checkpoint has a NaN
        self.checkpoints.save(self.step, self._state())

    def _state(self) -> dict[str, Any]:
        loader = self.batches.state_dict(after=self.last_batch)
        return {**self.parallel.state_dict(), "loader": loader, "step": self.step}
