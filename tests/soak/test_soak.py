"""Soak: jobs with random faults, resumed from their last checkpoint, train each sample of an epoch exactly once."""

import enum
import logging
import os
import pickle
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenrank.dataloader import LoaderConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer
from evenrank.dataloader.balance.config import EXCHANGES
from tests.conftest import make_small_dataset
from tests.dataloader.balance.costs import Ints, Lengths
from tests.ranks import RankFailure, RankPool

# What goes wrong on one rank, in one step. STOPPED is for a moment, STOPPED_LONG beyond the timeout; LOADER_RAISES is a
# transform; the last replaces the dataset by another one.
Fault = enum.StrEnum(
    "Fault", "NONE KILLED STOPPED STOPPED_LONG MODEL_RAISES ON_STEP_RAISES COST_RAISES LOADER_RAISES LEAVES OTHER_DATA"
)
GPU_FAULTS = (Fault.NONE, Fault.KILLED, Fault.STOPPED, Fault.STOPPED_LONG, Fault.MODEL_RAISES, Fault.LEAVES)
GPU_ROUNDS = 24
LOST = ("RankError", "RankLostError", "RuntimeError", "DistBackendError", "DistNetworkError")
LIMIT = 240.0  # seconds in which all ranks end, far less than the timeout of their collectives
TIMEOUT, SHORT_TIMEOUT = timedelta(minutes=30), timedelta(seconds=15)  # beyond the latter ranks are stopped
Samples = Counter[tuple[int, tuple[int, ...]]]  # with their contents

_log = logging.getLogger("tests.soak")


class Shape(NamedTuple):
    """What may differ between the job that has a fault and the one that resumes."""

    world_size: int
    batch_size: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """A job that trains an epoch, the fault that ends it, and the job that resumes it."""

    loader: str
    first: Shape
    resumed: Shape
    balance: dict[str, Any]
    gradients: bool  # all-reduce over the default group in each step, as of gradients
    fault: Fault
    culprit: int  # the rank that has the fault
    step: int  # the step, or the call, in which it has it
    device: str  # `cpu`, or `cuda`: rank r is on GPU r
    seed: int


def _draw_round(seed: int, number: int, device: str) -> Round:
    """Return a round that depends on the arguments alone."""
    rng, least, most = np.random.default_rng([seed, number]), *((2, 2) if device == "cuda" else (1, 5))
    fault = Fault(rng.choice(GPU_FAULTS if device == "cuda" else [*Fault]))
    first, resumed = (
        Shape(int(rng.integers(least, most + 1)), int(rng.integers(3, 13)), int(rng.integers(0, 3))) for _ in range(2)
    )
    return Round(
        loader="StreamLoader" if fault == Fault.OTHER_DATA else str(rng.choice(["Loader", "StreamLoader"])),
        first=first,
        resumed=resumed,
        balance={
            "strategy": str(rng.choice(list(STRATEGIES))),
            "exchange": EXCHANGES[int(rng.integers(2))],
            "lookahead": int(rng.integers(1, 5)),
        },
        gradients=bool(rng.random() < 0.5),
        fault=Fault.STOPPED if fault == Fault.STOPPED_LONG and first.world_size == 1 else fault,  # nobody would notice
        culprit=int(rng.integers(first.world_size)),
        step=int(rng.integers(0, 5)),  # an epoch of the largest job has four
        device=device,
        seed=int(rng.integers(1000)),
    )


class InjectedError(Exception):
    """The exception that a user's code raises."""


class Injector:
    """Has the fault of a round, on its culprit, once."""

    def __init__(self, plan: Round, rank: int, folder: Path, data: Path) -> None:
        self._fault = plan.fault if rank == plan.culprit else None
        self._step, self._folder, self._data, self._calls = plan.step, folder, data, 0

    def at(self, *faults: Fault, step: int | None = None) -> bool:
        """Have the fault, if it is one of these and due in this step or, without one, in this call; return whether."""
        if self._fault not in faults:
            return False
        self._calls += 1
        if (self._calls - 1 if step is None else step) != self._step:
            return False
        (self._folder / "fault").touch()
        if self._fault == Fault.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault in (Fault.STOPPED, Fault.STOPPED_LONG):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._fault == Fault.OTHER_DATA:
            self._data.rename(self._folder / "replaced")
            self._data.with_name("other").rename(self._data)
        elif self._fault != Fault.LEAVES:
            raise InjectedError(str(self._fault))
        return True


def _loader(plan: Round, shape: Shape, rank: int, data: Path, injector: Injector | None) -> Any:
    def transform(batch: Any, rng: np.random.Generator) -> Any:
        if injector is not None:
            injector.at(Fault.LOADER_RAISES)
        return batch

    build = build_loader if plan.loader == "Loader" else build_stream_loader
    config = LoaderConfig(batch_size=shape.batch_size, num_workers=shape.workers, prefetch=3, seed=plan.seed)
    return build(data, config, transform=transform, rank=rank, world_size=shape.world_size)


def _samples(batch: Any) -> list[tuple[int, tuple[int, ...]]]:
    items = batch.features["item_id"]
    rows = torch.split(items.values().cpu(), items.lengths().tolist())
    ids = batch.sample_ids[: batch.num_real].tolist()
    return [(sample, tuple(row.tolist())) for sample, row in zip(ids, rows, strict=False)]


def _train(rank: int, world_size: int, plan: Round, folder: Path, data: Path, state: Any) -> None:
    """Train an epoch, or the rest of one from a state on; write what was trained in each step to `folder`."""
    # On a GPU a lost rank is noticed by the timeout alone if the host waits for the device.
    is_noticed_late = plan.fault == Fault.STOPPED_LONG or plan.device == "cuda"
    timeout = SHORT_TIMEOUT if is_noticed_late and state is None else TIMEOUT
    device = f"cuda:{rank}" if plan.device == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    injector = Injector(plan, rank if state is None else -1, folder, data)

    def cost(lengths: Lengths, num_candidates: Ints) -> Ints:
        injector.at(Fault.COST_RAISES)
        return lengths["item_id"] ** 2 + 1

    def on_step(_: object) -> None:
        injector.at(Fault.ON_STEP_RAISES)

    config = BalanceConfig(cost=cost, timeout=timeout, on_step=on_step, **plan.balance)
    loader = _loader(plan, plan.first if state is None else plan.resumed, rank, data, injector)
    try:
        with Balancer(loader, config, device=device) as balancer:
            if state:
                balancer.load_state_dict(state)
            for step, batch in enumerate(balancer):
                if injector.at(Fault.MODEL_RAISES, Fault.LEAVES, step=step):
                    break
                if device is not None:
                    weight = torch.rand(2048, 2048, device=device)
                    torch.tanh(weight @ weight).sum()
                if plan.gradients:
                    dist.all_reduce(torch.ones(16))
                trained = pickle.dumps((_samples(batch), balancer.state_dict()))
                (folder / f"{rank} {step}").write_bytes(trained)
                injector.at(Fault.KILLED, Fault.STOPPED, Fault.STOPPED_LONG, Fault.OTHER_DATA, step=step)
    finally:
        (folder / f"ended {rank}").touch()


@contextmanager
def _continuing(pool: RankPool, folder: Path, num_ended: int) -> Iterator[None]:
    """Continue ranks that have stopped, once so many others have ended."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            for process in pool._processes:
                with suppress(FileNotFoundError, ProcessLookupError):  # it was killed
                    stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
                    if stat[0] == "T" and len([*folder.glob("ended *")]) >= num_ended:
                        os.kill(process.pid or 0, signal.SIGCONT)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _run(
    pool: RankPool, plan: Round, shape: Shape, folder: Path, data: Path, state: Any
) -> tuple[list[Any], Any, Samples]:
    """Return what each rank ended with, the state after the last step that all have trained, and the samples."""
    folder.mkdir()
    with _continuing(pool, folder, shape.world_size - 1 if plan.fault == Fault.STOPPED_LONG else 0):
        results = pool.try_run(shape.world_size, _train, plan, folder, data, state)
    steps = [
        [pickle.loads((folder / f"{rank} {step}").read_bytes()) for step in range(len([*folder.glob(f"{rank} *")]))]
        for rank in range(shape.world_size)
    ]
    num_steps = min(map(len, steps))
    trained = Samples(sample for of_rank in steps for samples, _ in of_rank[:num_steps] for sample in samples)
    return results, steps[0][num_steps - 1][1] if num_steps else {}, trained


def _check_ends(plan: Round, results: list[Any]) -> None:
    for rank, result in enumerate(results):
        name, message = (result.type_name, result.message) if isinstance(result, RankFailure) else (None, "")
        fault = plan.fault if rank == plan.culprit else None
        if plan.fault in (Fault.NONE, Fault.STOPPED) or fault == Fault.LEAVES:
            assert name is None, message
        elif fault == Fault.KILLED:
            assert name == "EOFError"
        elif plan.fault in (Fault.COST_RAISES, Fault.LOADER_RAISES):
            assert name == "RankError", message
            assert message.startswith(f"rank {plan.culprit} failed: InjectedError")
        elif fault in (Fault.MODEL_RAISES, Fault.ON_STEP_RAISES):
            assert name == "InjectedError", message
        elif plan.device == "cpu" or name != "EOFError":  # on a GPU, NCCL's watchdog may end the process
            assert name in (None, *LOST), message  # it has noticed, unless it needed nothing more of the culprit


def _play(pool: RankPool, plan: Round, folder: Path, datasets: Path) -> None:
    """Run a job with its fault, then the one that resumes it, and compare what they trained with the epoch."""
    data = Path(shutil.copytree(datasets, folder)) / "data"
    batches = _loader(plan, Shape(1, 8, 0), 0, data, None)
    expected = Samples(sample for batch in batches for sample in _samples(batch))
    results, state, trained = _run(pool, plan, plan.first, folder / "first", data, None)
    if (folder / "first" / "fault").exists():
        _check_ends(plan, results)
    else:
        assert results == [None] * plan.first.world_size
    if (replaced := folder / "first" / "replaced").exists():
        shutil.rmtree(data)
        replaced.rename(data)
    if trained != expected:  # otherwise the state is that of the next epoch
        results, _, rest = _run(pool, plan, plan.resumed, folder / "resumed", data, state)
        assert results == [None] * plan.resumed.world_size
        trained += rest
    assert trained == expected
    shutil.rmtree(folder)


@pytest.mark.timeout(0)  # each round has a limit
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="states of processes are read in /proc")
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.multi_gpu)]
)
def test_random_faults_lose_no_sample_and_hang_no_rank(
    tmp_path: Path, small_dataset: Path, pytestconfig: pytest.Config, device: str
) -> None:
    datasets = tmp_path / "datasets"  # one that is trained, and another with the same users and other histories
    shutil.copytree(small_dataset, datasets / "data")
    make_small_dataset(datasets / "other", seed=8)
    rounds = 10**9 if device == "cpu" else GPU_ROUNDS
    seconds, seed = pytestconfig.getoption("soak_seconds"), pytestconfig.getoption("soak_seed")
    started, played, pool = time.monotonic(), Counter[str](), RankPool(LIMIT)
    try:
        while time.monotonic() < started + seconds and played.total() < rounds:
            number = played.total()
            plan = _draw_round(seed, number, device)
            try:
                _play(pool, plan, tmp_path / str(number), datasets)
            except BaseException as error:
                error.add_note(f"in round {number} of seed {seed}: {plan}; its logs are in {tmp_path / str(number)}")
                raise
            played[str(plan.fault)] += 1
            _log.info("%d rounds in %.0f s: %s", played.total(), time.monotonic() - started, dict(played))
    finally:
        pool.stop()
