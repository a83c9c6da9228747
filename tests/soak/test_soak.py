"""Soak: jobs with random faults, resumed from their last checkpoint, train each sample of an epoch exactly once."""

import base64
import dataclasses
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_small_dataset
from tests.soak import worker
from tests.soak.worker import Datasets, Fault, Round, Shape

_GPU_ROUNDS = 24
_GPU_FAULTS = (Fault.NONE, Fault.KILLED, Fault.STOPPED, Fault.STOPPED_LONG, Fault.MODEL_RAISES, Fault.LEAVES)
_LOST = ("RankError", "RankLostError", "RuntimeError", "DistBackendError", "DistNetworkError")
Samples = Counter[tuple[int, tuple[int, ...]]]  # with their contents

_log = logging.getLogger("tests.soak")


class Job:
    def __init__(self, plan: Round, shape: Shape, folder: Path, datasets: Datasets, states: list[Any] | None) -> None:
        folder.mkdir()
        # CUDA cannot be used after a fork. Without it, importing once suffices.
        context: Any = multiprocessing.get_context("spawn" if plan.device == "cuda" else "forkserver")
        if plan.device == "cpu":
            context.set_forkserver_preload(["tests.soak.worker"])
        self._plan = plan
        self.processes: list[BaseProcess] = []
        for rank in range(shape.world_size):
            arguments = (plan, shape, rank, folder, datasets, states and states[rank])
            self.processes.append(context.Process(target=worker.run_rank, args=arguments))
        for process in self.processes:
            process.start()
        try:
            self._supervise()
        finally:
            for process in self.processes:
                process.kill()
                process.join()
        self.had_fault = (folder / "fault").exists()
        self.exit_codes = [process.exitcode for process in self.processes]
        logs = [(folder / f"rank {rank}").read_text().splitlines() for rank in range(shape.world_size)]
        entries = [[json.loads(line) for line in lines] for lines in logs]
        # What each rank has written after each step, what ended it, None if it was killed, and the steps of the last
        # checkpoint: those that all ranks have written.
        self.steps = [[entry for entry in written if "samples" in entry] for written in entries]
        self.errors = [written[-1] if written and "error" in written[-1] else None for written in entries]
        self.num_steps = min(map(len, self.steps))
        of_steps = (entry for steps in self.steps for entry in steps[: self.num_steps])
        self.samples = Samples((sample, tuple(items)) for entry in of_steps for sample, items in entry["samples"])

    def _supervise(self) -> None:
        """Wait until all processes have ended; continue those that have stopped."""
        deadline = time.monotonic() + worker.LIMIT
        while running := [process for process in self.processes if process.is_alive()]:
            assert time.monotonic() < deadline, f"ranks {[self.processes.index(process) for process in running]} hang"
            stopped = [process for process in running if _state_and_group(process.pid)[0] == "T"]
            if stopped and (self._plan.fault != Fault.STOPPED_LONG or len(running) == 1):
                os.kill(stopped[0].pid or 0, signal.SIGCONT)
            time.sleep(0.05)
        groups = {str(process.pid) for process in self.processes}
        everyone = (path.name for path in Path("/proc").glob("[0-9]*"))
        while left := [each for each in everyone if _state_and_group(each)[1] in groups]:
            assert time.monotonic() < deadline, f"processes {left} are left"
            time.sleep(0.05)
            everyone = (path.name for path in Path("/proc").glob("[0-9]*"))

    def states(self, num_ranks: int) -> list[Any]:
        """Return the state that each rank of the job that resumes loads."""
        if self.num_steps == 0:
            return [{}] * num_ranks
        return [pickle.loads(base64.b64decode(self.steps[0][self.num_steps - 1]["state"]))] * num_ranks


def _state_and_group(process: int | str | None) -> tuple[str, str]:
    """Return the state of a process and its group, none of a process that has ended."""
    try:
        state, _, group = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[:3]
    except OSError:
        return "gone", ""
    return (state, group) if state not in "ZX" else (state, "")


def _check_ends(plan: Round, job: Job) -> None:
    ends_well = not job.had_fault or plan.fault in (Fault.NONE, Fault.STOPPED)
    for rank, (code, error) in enumerate(zip(job.exit_codes, job.errors, strict=True)):
        name, message = (error["error"], error.get("message", "")) if error else (None, "")
        end = rank, code, error
        fault = plan.fault if rank == plan.culprit else None
        if ends_well or fault == Fault.LEAVES:
            assert (code, error) == (0, {"error": None}), end
        elif fault == Fault.KILLED:
            assert code == -signal.SIGKILL
        elif plan.fault in (Fault.COST_RAISES, Fault.LOADER_RAISES):
            assert (code, name) == (1, "RankError"), end
            assert message.startswith(f"rank {plan.culprit} failed: InjectedError"), end
        elif fault in (Fault.MODEL_RAISES, Fault.ON_STEP_RAISES):
            assert (code, name) == (1, "InjectedError"), end
        elif plan.device == "cuda" and error is None:
            # The host waited for the GPU, and that for a lost rank, until NCCL's watchdog ended the process.
            assert code == -signal.SIGABRT
        else:  # it has noticed, unless it needed nothing more of the culprit
            assert error is not None
            assert (code, name) in {(0, None), *((1, name) for name in _LOST)}, end


def _epoch(plan: Round, data: Path) -> Samples:
    """Return the samples of an epoch without any balancing."""
    shape = Shape(world_size=1, batch_size=8, workers=0)
    injector = worker.Injector(dataclasses.replace(plan, fault=Fault.NONE), 0, data)
    batches = worker.make_loader(plan, shape, 0, data, injector)
    return Samples((sample, tuple(items)) for batch in batches for sample, items in worker.contents_of(batch))


def _play(plan: Round, folder: Path, datasets: Datasets) -> None:
    """Run a job with its fault, then the one that resumes it, and compare what they trained with the epoch."""
    data = folder / "data"
    shutil.copytree(datasets["data"], data)
    expected, of_job = _epoch(plan, data), {**datasets, "data": data}
    job = Job(plan, plan.first, folder / "first", of_job, None)
    _check_ends(plan, job)
    trained = job.samples.copy()
    if plan.fault == Fault.OTHER_DATA:
        shutil.rmtree(data)
        shutil.copytree(datasets["data"], data)
    if trained != expected:  # otherwise the state is that of the next epoch
        resumed = Job(plan, plan.resumed, folder / "resumed", of_job, job.states(plan.resumed.world_size))
        assert {*resumed.exit_codes} == {0}, resumed.errors
        trained += resumed.samples
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
    datasets = {"data": small_dataset, "other": make_small_dataset(tmp_path / "other", seed=8)}
    options: Any = {"faults": tuple(Fault)} if device == "cpu" else {"faults": _GPU_FAULTS, "device": device}
    if device == "cuda":
        options["max_ranks"] = 2
    rounds = 10**9 if device == "cpu" else _GPU_ROUNDS
    seconds, seed = pytestconfig.getoption("soak_seconds"), pytestconfig.getoption("soak_seed")
    started, played = time.monotonic(), Counter[str]()
    while time.monotonic() < started + seconds and played.total() < rounds:
        number = played.total()
        plan = worker.draw_round(seed, number, **options)
        try:
            _play(plan, tmp_path / str(number), datasets)
        except Exception as error:
            error.add_note(f"in round {number} of seed {seed}: {plan}; its logs are in {tmp_path / str(number)}")
            raise
        played[str(plan.fault)] += 1
        _log.info("%d rounds in %.0f s: %s", played.total(), time.monotonic() - started, dict(played))
