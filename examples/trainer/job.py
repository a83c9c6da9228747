"""`run_job`: a training job from its settings to its end."""

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import nn

from evenrank.dataloader import Loader
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.ranks.agree import gather_checked
from trainer.balance_log import BalanceLog
from trainer.checkpoints import Checkpoints
from trainer.config import TrainConfig
from trainer.data import Batches, balance_config, check_names, find_data, find_split, open_batches, open_loader
from trainer.evaluation import Evaluation
from trainer.lock import FolderLock
from trainer.logs import JobLog
from trainer.loop import StopSignals, Training
from trainer.monitors import Monitors
from trainer.parallel import distribute
from trainer.pipelines import make_pipeline
from trainer.tasks import Task, make_task
from trainer.windows import WindowEvaluation, plot_log
from trainer.world import World, divide, join_world, on_all_ranks


def run_job(config: TrainConfig) -> None:
    """Train, evaluate and save checkpoints.

    Raises:
        typer.Exit: a signal has stopped the job; the code is 128 + its number.
    """
    quiet()
    check_names(config)
    with join_world() as world:
        stopped_by = train(config, world)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)


def quiet() -> None:
    """Silence what PyTorch and TorchRec say about each other, on every rank."""
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    if not torch.cuda.is_available():  # it warns of what could happen between streams, which the CPU has none of
        logging.getLogger("torchrec.distributed.train_pipeline.postproc").setLevel(logging.ERROR)


def train(config: TrainConfig, world: World) -> signal.Signals | None:
    """Train on the ranks of the default process group; return the signal that stopped it, if one did."""
    out = Path(config.out)
    # Another job would delete the checkpoints that this one is writing, and log its steps among those of this one.
    with on_all_ranks(lambda: FolderLock(out) if world.rank == 0 else nullcontext()):
        return _train(config, world, out)


def _train(config: TrainConfig, world: World, out: Path) -> signal.Signals | None:
    # A rank that evaluates longer would wait for the others, which train already.
    gather_checked({"eval_every": config.eval_every, "eval_steps": config.eval_steps}, None, dist.group.WORLD)
    world = divide(world, config.tensor_parallel)
    data = find_data(config)
    torch.manual_seed(config.seed)  # for equal weights on all ranks
    task = on_all_ranks(lambda: make_task(config, data, world))
    set_precision(task.dense, config, world.device)
    parallel = distribute(task.model, config, world)
    with (
        StopSignals() as stop,
        on_all_ranks(lambda: JobLog(out, is_first=world.rank == 0, tensorboard=config.tensorboard)) as log,
        on_all_ranks(lambda: BalanceLog(config, world)) as balance_log,
        _open(data, task, config, world, balance_log) as (loader, batches),
        _open(data, task, config, world, None) as (eval_loader, eval_batches),
        Monitors(
            config, world, task, parallel.model, log, balance_log, every=_report_every(config, loader)
        ) as monitors,
    ):
        pipeline = make_pipeline(
            config.pipeline, parallel.model, parallel.optimizer, world.device, loss=monitors.mean_loss
        )
        of_batches = task.evaluation(
            model=parallel.model,
            pipeline=pipeline,
            loader=eval_loader,
            batches=eval_batches,
            max_steps=config.eval_steps,
        )
        evaluation: Evaluation | WindowEvaluation = of_batches
        num_epochs = config.epochs
        if config.time_windows is not None:
            num_epochs = loader.num_windows - 1  # the last one is evaluated alone
            evaluation = WindowEvaluation(of_batches, trained=loader, evaluated=eval_loader)
        training = Training(
            config=config,
            world=world,
            parallel=parallel,
            pipeline=pipeline,
            loader=loader,
            batches=batches,
            num_epochs=num_epochs,
            evaluation=evaluation,
            checkpoints=Checkpoints(
                out / "checkpoints",
                keep=config.keep,
                settings={**config.kept(), **task.kept},
                key_maps=task.key_maps,
            ),
            monitors=monitors,
            log=log,
            stop=stop,
            learning_rates=[group["lr"] for group in parallel.optimizer.param_groups],
        )
        training.resume()
        stopped_by = training.run()
        if config.time_windows is not None:  # after the last step, for which other ranks would wait
            plot_log(log, out / "windows.png")
        if stopped_by is not None:
            log.say(f"stopped by {stopped_by.name} after step {training.step}; the same command continues")
        return stopped_by


@contextmanager
def _open(
    data: Path,
    task: Task,
    config: TrainConfig,
    world: World,
    balance_log: BalanceLog | None,
) -> Iterator[tuple[Loader[Any], Batches[Any]]]:
    """Open what is trained, or without a log evaluated; return its loader and its balanced batches, as logged."""
    split, order = find_split(config, is_trained=balance_log is not None)
    read = task.read(
        split=split,
        order=order,
        batch_size=config.batch_size,
        max_history_length=config.max_history_length,
        num_workers=config.num_workers,
        seed=config.seed,
        device=None if config.balance in EXCHANGES else world.device,
    )
    balance = balance_config(config, cost=task.cost)
    if balance_log is not None:
        balance = balance_log.observe(balance)
    loader: Loader[Any] = open_loader(data, read, config, world, balance)
    with open_batches(loader, config, world, balance) as batches:
        yield loader, batches


def _report_every(config: TrainConfig, loader: Loader[Any]) -> int:
    """Return the steps between reports: as there is one per evaluation, at most an epoch, unless epochs differ."""
    if config.time_windows is not None:
        return config.log_every
    return min(config.log_every, config.eval_every or len(loader))


def set_precision(dense: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Let a module compute in the precision that the settings choose for a device."""
    if config.uses_bf16(device.type):
        # Around each call: a longer context would keep the bfloat16 copies of weights that the optimizer has changed.
        dense.forward = torch.autocast(device.type, torch.bfloat16)(dense.forward)
