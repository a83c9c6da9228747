"""`run_job`: a training job, from its settings or its last checkpoint to its end, or to a signal on any rank."""

import contextlib
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import chain, islice, repeat
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.core.files import locked
from evenrank.dataloader import JaggedBatch
from evenrank.dataloader.balance import BalanceConfig, Cost, MeasuredCost, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.ranks.agree import gather_checked
from evenrank.datasets import read_manifest
from evenrank.training import load_dmp, save_dmp
from trainer.config import TrainConfig
from trainer.data import find_data, open_batches
from trainer.monitors import JobLog, Monitors
from trainer.parallel import distribute, make_pipeline, run_pipeline
from trainer.tasks import ranking
from trainer.world import World, join_world, on_all_ranks


def run_job(config: TrainConfig) -> None:
    """Train, evaluate and save checkpoints; a typer.Exit of 128 + its number if a signal has stopped the job."""
    quiet()
    with join_world() as world:
        stopped_by = train(config, world)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)


def quiet() -> None:
    """Silence what PyTorch and TorchRec say about each other, on every rank."""
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", ".*we are deprecating ShardedTensor", FutureWarning)
    if not torch.cuda.is_available():  # it warns of what could happen between streams, which the CPU has none of
        logging.getLogger("torchrec.distributed.train_pipeline.postproc").setLevel(logging.ERROR)


def train(config: TrainConfig, world: World) -> signal.Signals | None:
    """Train on the ranks of the default process group; return the signal that stopped it, if one did."""
    # A rank that evaluates longer would wait for the others, which train already.
    gather_checked({"eval_every": config.eval_every, "eval_steps": config.eval_steps}, None, dist.group.WORLD)
    with ExitStack() as stack:
        # Another job would replace the checkpoint of this one, and log its steps among those of this one.
        on_all_ranks(lambda: stack.enter_context(_lock(Path(config.out))) if world.rank == 0 else None)
        log = stack.enter_context(on_all_ranks(lambda: JobLog(Path(config.out), world)))
        return Training(config, world, log, stack).run()


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock", seconds=0.1))
        except TimeoutError:
            raise DataError(f"{folder} is in use by another job; wait for it, or choose another folder") from None
        yield


class StopSignals(AbstractContextManager["StopSignals"]):
    """Notes SIGINT and SIGTERM, which ranks receive at different times or not at all, and lets all agree to stop.

    The ranks' answers are gathered on the CPU while the next step is computed, so that no rank waits for them: a signal
    ends the job one step later. Collective: every rank must create one, and enter it on its main thread.
    """

    def __init__(self) -> None:
        self._received = 0
        self._group = dist.new_group(backend="gloo")
        self._in_flight: tuple[dist.Work, Tensor] | None = None

    def poll(self) -> signal.Signals | None:
        """Return the signal that some rank had received at the last call, or None. Collective: call it once a step."""
        agreed, answer = self._await_answers(), torch.tensor(self._received)
        work = dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._in_flight = (work, answer)
        return signal.Signals(agreed) if agreed else None

    def _await_answers(self) -> int:
        if self._in_flight is None:
            return 0
        (work, answer), self._in_flight = self._in_flight, None
        work.wait()
        return int(answer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number  # the first one decides

    def __enter__(self) -> "StopSignals":
        self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error[0] is None:
            self._await_answers()  # so that nothing is in flight when the process group ends


class Training:
    """Everything that a job trains with, and how far it is. All methods are collective."""

    def __init__(self, config: TrainConfig, world: World, log: JobLog, stack: ExitStack) -> None:
        self._config, self._world, self._log = config, world, log
        self._path = Path(config.out) / "checkpoint"
        data = find_data(config)
        manifest = on_all_ranks(lambda: read_manifest(data))
        self._kept = {**config.kept(), "dataset": f"{manifest.dataset} {manifest.content_hash[:16]}"}
        self._stop = stack.enter_context(StopSignals())
        torch.manual_seed(config.seed)  # for equal weights on all ranks
        self._task = task = on_all_ranks(lambda: ranking(config, manifest, world))
        set_precision(task.dense, config, world.device)
        self._model, self._optimizer = distribute(task.model, config, world)
        self._monitors = stack.enter_context(on_all_ranks(lambda: Monitors(config, world, task, log)))
        loss = self._monitors.mean_loss
        self._pipeline = make_pipeline(config.pipeline, self._model, self._optimizer, world.device, loss=loss)
        balance = balance_config(config, cost=task.cost)
        self._loader, trained = open_batches(data, task, config, world, self._monitors.observe(balance))
        self._batches = stack.enter_context(trained)
        self._eval_loader, evaluated = open_batches(data, task, config, world, balance)
        self._eval_batches = stack.enter_context(evaluated)
        # The last window of time, or that of evaluations, is not trained.
        self._num_epochs = config.epochs if config.time_windows is None else self._loader.num_windows - 1
        if config.evaluate_window is not None:
            self._num_epochs = config.evaluate_window
            self._eval_loader.begin_at(config.evaluate_window)
            if not len(self._eval_loader):
                raise ConfigError(
                    f"evaluate_window {config.evaluate_window} has no targets to evaluate; windows are 0 to "
                    f"{self._loader.num_windows - 1}, choose another"
                )
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._last_batch: JaggedBatch | None = None
        self.step = self._saved_step = 0  # optimizer steps so far, over all runs of the job

    def run(self) -> signal.Signals | None:
        """Train to the end, or until a signal, which is returned; the checkpoint is complete then."""
        self._resume()
        if is_done := self._is_done():
            self._log.say(f"all {self.step} steps are done; raise --epochs or --max-steps to go on")
        if self._lacks_evaluation(is_done=is_done):
            self._evaluate()
        batches = chain.from_iterable(repeat(self._batches))  # of one epoch after the other
        stopped_by = None
        while stopped_by is None and not self._is_done():
            stopped_by = self._train_epoch(batches)
        self._save()
        if stopped_by is not None:
            self._log.say(f"stopped by {stopped_by.name} after step {self.step}; the same command continues")
        return stopped_by

    def _resume(self) -> None:
        """Continue from the checkpoint, if there is one; on any number of ranks."""
        if (saved := load_dmp(self._path, self._model, self._optimizer)) is None:
            return
        before = saved["settings"]
        for name in self._kept:
            if before.get(name) != self._kept[name]:
                raise StateError(
                    f"{self._path} was saved with {name} = {before.get(name)!r}, this job has {self._kept[name]!r}; "
                    "choose another --out, or the settings of that job"
                )
        self._batches.load_state_dict(saved["loader"])
        self.step = self._saved_step = saved["step"]
        self._log.say(f"resumed after step {self.step}; another --out starts over")

    def _save(self) -> None:
        """Replace the checkpoint, which stays until the new one is complete."""
        if self.step > self._saved_step:
            self._monitors.pause()  # after a check, so that no checkpoint has a NaN
            position = self._batches.state_dict(after=self._last_batch)
            values = {"settings": self._kept, "loader": position, "step": self.step}
            save_dmp(self._path, self._model, self._optimizer, values)
            self._saved_step = self.step

    def _is_done(self) -> bool:
        """Return whether nothing is left to train; between epochs, of which those without samples are skipped."""
        self._loader.skip_empty()
        return self._loader.epoch >= self._num_epochs or self.step >= (self._config.max_steps or sys.maxsize)

    def _train_epoch(self, batches: Iterator[JaggedBatch]) -> signal.Signals | None:
        """Train what is left of an epoch, evaluate and save; return the signal that ended it early."""
        end = self.step + self._batches.remaining_batches()
        last_step, every = min(end, self._config.max_steps or sys.maxsize), self._config.eval_every or sys.maxsize
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
        self._prepare_step()
        for done in run_pipeline(self._pipeline, islice(batches, until - self.step)):
            self.step += 1
            self._last_batch = done.batch
            self._monitors.note(self.step, done)
            if (stopped_by := self._stop.poll()) is not None:
                return stopped_by
            if self.step % (self._config.checkpoint_every or sys.maxsize) == 0:
                self._save()
            if self.step < until:
                self._prepare_step()
        return None

    def _prepare_step(self) -> None:
        # Dropout depends on seed, step and rank alone, so there is no state of random generators to save.
        torch.manual_seed((self._config.seed * 1_000_003 + self.step) * self._world.size + self._world.rank)
        progress = min(1.0, (self.step + 1) / max(1, self._config.warmup_steps))
        for group, full in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = full * progress

    def _lacks_evaluation(self, *, is_done: bool) -> bool:
        """Return whether the run before ended between a step and its evaluation."""
        is_between_epochs = self._batches.remaining_batches() == len(self._loader)
        is_due = is_done or is_between_epochs or self.step % (self._config.eval_every or sys.maxsize) == 0
        return is_due and self.step > 0 and not self._log.has("eval", self.step)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self._monitors.pause()
        metrics: dict[str, Any] = {} if self._config.time_windows is None else self._next_window()
        self._model.eval()
        batches = islice(self._eval_batches, self._config.eval_steps)
        metrics |= self._task.evaluate(self._pipeline, self._eval_loader, batches)
        self._model.train()
        shown = (f"{name} {f'{one:.4f}' if isinstance(one, float) else one}" for name, one in metrics.items())
        self._log.say(" | ".join((f"step {self.step}", *shown)))
        self._log.record("eval", self.step, metrics)
        self._monitors.restart()

    def _next_window(self) -> dict[str, Any]:
        """Begin the evaluation of the window of time after the one that is trained, or was trained last.

        windows       |   0   |   1   |   2   |   3   |       the last one is evaluated alone
        trained           0       1       2
        evaluated                 1       2       3           by the model that was trained on all windows before it
                                  3       3       3           with evaluate_window = 3
        """
        # A job that resumes within a window has not begun to iterate over it.
        is_within = self._loader.remaining_batches() < len(self._loader)
        trained, fixed = self._loader.epoch + is_within - 1, self._config.evaluate_window
        self._eval_loader.begin_at(trained + 1 if fixed is None else fixed)
        self._eval_loader.skip_empty()
        window, (store,) = self._eval_loader.epoch, self._eval_loader.stores
        begin, end = (time.isoformat().removesuffix("+00:00") for time in self._eval_loader.window(window))
        targets = 0 if store.num_targets is None else int(store.num_targets.sum())
        return {"trained": trained, "window": window, "begin": begin, "end": end, "targets": targets}


def balance_config(
    config: TrainConfig, *, cost: Cost, on_step: Callable[[StepMetrics], None] | None = None
) -> BalanceConfig:
    """Return how a job balances its steps by a cost, if the settings name no file of a measured one.

    `balance = "none"` is the strategy `none`, which moves no sample but counts the loss tokens of all ranks. Without
    `on_step`, the cost is not fitted either.
    """
    return BalanceConfig(
        cost=cost if config.cost is None else MeasuredCost.load(Path(config.cost)),
        strategy="none" if config.balance == "none" else config.strategy,
        tolerance=config.tolerance,
        max_tokens_per_rank=config.max_tokens_per_rank,
        window=config.window,
        refit_every=None if on_step is None else config.refit_every,
        exchange=config.balance if config.balance in EXCHANGES else EXCHANGES[0],
        on_step=on_step,
    )


def set_precision(dense: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Let a module compute in the precision that the settings choose for a device."""
    if config.uses_bf16(device.type):
        # Around each call: a longer context would keep the bfloat16 copies of weights that the optimizer has changed.
        dense.forward = torch.autocast(device.type, torch.bfloat16)(dense.forward)
