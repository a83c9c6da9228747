"""Random rounds of a soak test, and their ranks, which save their samples and states after each step."""

import base64
import dataclasses
import enum
import faulthandler
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenrank.core.errors import one_line
from evenrank.dataloader import LoaderConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.config import EXCHANGES
from tests.dataloader.balance.costs import Ints, Lengths

# What goes wrong on one rank, in one step. STOPPED is for a moment, STOPPED_LONG beyond the timeout; LOADER_RAISES is a
# transform; the last replaces the dataset by another one.
Fault = enum.StrEnum(
    "Fault", "NONE KILLED STOPPED STOPPED_LONG MODEL_RAISES ON_STEP_RAISES COST_RAISES LOADER_RAISES LEAVES OTHER_DATA"
)
LOADERS = ("Loader", "StreamLoader")
TIMEOUT = timedelta(minutes=30)
LIMIT = 240.0  # seconds in which all ranks end, far less than the timeout of their collectives
SHORT_TIMEOUT = timedelta(seconds=15)  # beyond which ranks are stopped
Datasets = Mapping[str, Path]  # `data`, on which a job trains, and `other`, with the same users and other histories


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What may differ between the job that has a fault and the one that resumes."""

    world_size: int
    batch_size: int
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A job that trains an epoch, the fault that ends it, and the job that resumes it."""

    loader: str
    first: Shape
    resumed: Shape
    balance: Mapping[str, Any]
    gradients: bool  # all-reduce over the default group in each step, as of gradients
    fault: Fault
    culprit: int  # the rank that has the fault
    step: int  # the step, or the call, in which it has it
    device: str  # `cpu`, or `cuda`: rank r is on GPU r
    seed: int


def draw_round(seed: int, number: int, *, faults: tuple[Fault, ...], device: str = "cpu", max_ranks: int = 5) -> Round:
    """Return a round that depends on the arguments alone."""
    rng = np.random.default_rng([seed, number])
    fault = faults[int(rng.integers(len(faults)))]
    loader = "StreamLoader" if fault == Fault.OTHER_DATA else str(rng.choice(LOADERS))

    def draw_shape() -> Shape:
        return Shape(
            world_size=int(rng.integers(2 if device == "cuda" else 1, max_ranks + 1)),
            batch_size=int(rng.integers(3, 13)),
            workers=int(rng.integers(0, 3)),
        )

    first, resumed = draw_shape(), draw_shape()
    if fault == Fault.STOPPED_LONG and first.world_size == 1:  # nobody would notice
        fault = Fault.STOPPED
    strategy = str(rng.choice(["none", "karmarkar-karp", "lpt-swap", "min-move"]))
    return Round(
        loader=loader,
        first=first,
        resumed=resumed,
        balance={"strategy": strategy, "exchange": rng.choice(EXCHANGES[:2]), "lookahead": int(rng.integers(1, 5))},
        gradients=bool(rng.random() < 0.5),
        fault=fault,
        culprit=int(rng.integers(first.world_size)),
        step=int(rng.integers(0, 5)),  # an epoch of the largest job has four
        device=device,
        seed=int(rng.integers(1000)),
    )


class InjectedError(Exception):
    """The exception that a user's code raises."""


class Injector:
    """Has the fault of a round, on its culprit, once."""

    def __init__(self, plan: Round, rank: int, folder: Path) -> None:
        self._plan, self._folder, self._calls = plan, folder, 0
        self._is_culprit = rank == plan.culprit

    def is_due(self, fault: Fault, step: int | None = None) -> bool:
        """Return whether the fault happens now: in this step or, without one, in this call."""
        if self._plan.fault != fault or not self._is_culprit:
            return False
        self._calls += 1
        is_now = (self._calls - 1 if step is None else step) == self._plan.step
        if is_now:
            (self._folder / "fault").touch()
        return is_now

    def raise_if_due(self, fault: Fault, step: int | None = None) -> None:
        """Raise as a user's code does, if the fault happens now."""
        if self.is_due(fault, step):
            raise InjectedError(str(fault))

    def hit(self, step: int, datasets: Datasets) -> None:
        """Have the faults of a process and of its files, if they happen in this step."""
        if self.is_due(Fault.KILLED, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_due(Fault.STOPPED, step) or self.is_due(Fault.STOPPED_LONG, step):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.is_due(Fault.OTHER_DATA, step):
            copy = shutil.copytree(datasets["other"], self._folder / "copy")
            datasets["data"].rename(self._folder / "replaced")
            copy.rename(datasets["data"])


def make_loader(plan: Round, shape: Shape, rank: int, data: Path, injector: Injector) -> Any:
    def transform(batch: Any, rng: np.random.Generator) -> Any:
        injector.raise_if_due(Fault.LOADER_RAISES)
        return batch

    build = build_loader if plan.loader == "Loader" else build_stream_loader
    config = LoaderConfig(batch_size=shape.batch_size, num_workers=shape.workers, prefetch=3, seed=plan.seed)
    return build(data, config, transform=transform, rank=rank, world_size=shape.world_size)


def contents_of(batch: Any) -> Iterator[tuple[int, list[int]]]:
    items = batch.features["item_id"]
    rows = torch.split(items.values().cpu(), items.lengths().tolist())
    for index, sample in enumerate(batch.sample_ids[: batch.num_real].tolist()):
        yield int(sample), rows[index].tolist()


def run_rank(plan: Round, shape: Shape, rank: int, folder: Path, datasets: Datasets, state: Any) -> None:
    """Train an epoch, or the rest of one; write what was trained, and what ended it, to `folder/rank R`."""
    os.setpgid(0, 0)  # so that processes that it leaves behind can be found
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT - 10)  # where a rank hangs
    with (folder / f"rank {rank}").open("w") as log:
        try:
            _train(plan, shape, rank, folder, datasets, state, log)
        except Exception as error:
            _write(log, {"error": type(error).__name__, "message": one_line(error)})
            sys.exit(1)
        _write(log, {"error": None})


def _train(plan: Round, shape: Shape, rank: int, folder: Path, datasets: Datasets, state: Any, log: Any) -> None:
    # On a GPU a lost rank is noticed by the timeout alone if the host waits for the device.
    is_noticed_late = plan.fault == Fault.STOPPED_LONG or plan.device == "cuda"
    timeout = SHORT_TIMEOUT if is_noticed_late and state is None else TIMEOUT
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=shape.world_size, timeout=timeout)
    device = f"cuda:{rank}" if plan.device == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    injector = Injector(plan if state is None else dataclasses.replace(plan, fault=Fault.NONE), rank, folder)

    def cost(lengths: Lengths, num_candidates: Ints) -> Ints:
        injector.raise_if_due(Fault.COST_RAISES)
        return lengths["item_id"] ** 2 + 1

    def on_step(_: object) -> None:
        injector.raise_if_due(Fault.ON_STEP_RAISES)

    config = BalanceConfig(cost=cost, timeout=timeout, on_step=on_step, **plan.balance)
    with Balancer(make_loader(plan, shape, rank, datasets["data"], injector), config, device=device) as balancer:
        if state:
            balancer.load_state_dict(state)
        for step, batch in enumerate(balancer):
            injector.raise_if_due(Fault.MODEL_RAISES, step)
            if injector.is_due(Fault.LEAVES, step):
                break
            if device is not None:
                weight = torch.rand(2048, 2048, device=device)
                torch.tanh(weight @ weight).sum()
            if plan.gradients:
                dist.all_reduce(torch.ones(16))
            saved = base64.b64encode(pickle.dumps(balancer.state_dict())).decode()
            _write(log, {"samples": list(contents_of(batch)), "state": saved})
            injector.hit(step, datasets)
    dist.destroy_process_group()


def _write(log: Any, entry: Mapping[str, Any]) -> None:
    log.write(json.dumps(entry) + "\n")
    log.flush()
    os.fsync(log.fileno())
