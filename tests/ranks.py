"""Runs functions on several ranks: real processes and Gloo groups, which are kept for the whole test run."""

import atexit
import faulthandler
import logging
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOADED = ["evenrank.dataloader.loader", "evenrank.dataloader.balance.balancer", "tests.dataloader.rich_batch"]
_TIMEOUT = 240.0  # seconds for one task, on a busy machine; a rank that takes longer prints its traceback and fails


class RankPool:
    """Processes that become the ranks of a new default process group for each task, which fails after a timeout."""

    def __init__(self, timeout: float = _TIMEOUT) -> None:
        self._timeout = timeout
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return function(rank, world_size, *arguments) of each rank; the function must be importable."""
        results = self.try_run(world_size, function, *arguments)
        for rank, result in enumerate(results):
            if isinstance(result, RankFailure):
                raise AssertionError(f"rank {rank} of {world_size}:\n{result.trace}")
        return results

    def try_run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Like `run`, but return a RankFailure for each rank that raised or died."""
        results = self._run_once(world_size, function, *arguments)
        if any(isinstance(result, _NotConnected) for result in results):
            # Gloo found another program at a port of 127.0.0.1, on a machine where many come and go.
            self.stop()
            results = self._run_once(world_size, function, *arguments)
        return results

    def _run_once(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._start(world_size - len(self._processes))
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                pipe.send((function, arguments, rank, world_size, str(Path(folder) / "store")))
            results: list[Any] = []
            has_died = False
            for rank, pipe in enumerate(self._pipes[:world_size]):
                if not pipe.poll(self._timeout + 10):
                    self.stop()
                    raise AssertionError(f"rank {rank} of {world_size} hangs; its traceback is on standard error")
                try:
                    results.append(pipe.recv())
                except EOFError as error:  # the process has died
                    results.append(RankFailure(error))
                    has_died = True
        if has_died:
            self.stop()  # the next task starts all of them again
        return results

    def stop(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self, num_processes: int) -> None:
        context = rank_context()
        if not self._processes:
            atexit.register(self.stop)  # also of a test run that is interrupted
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            # Not daemons, which may not start processes, such as the workers of a DataLoader.
            process = context.Process(target=_serve, args=(theirs, self._timeout))
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)


def rank_context() -> SpawnContext | ForkServerContext:
    """Return how ranks are started: forked from a process that has imported torch and TorchRec, which takes seconds."""
    import torch

    # With GPUs that import touches CUDA, which cannot be used after a fork.
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    forkserver.set_forkserver_preload(_PRELOADED)
    return multiprocessing.get_context("forkserver")


class RankFailure:
    """What a rank raised, in a form that can be pickled."""

    def __init__(self, error: BaseException) -> None:
        self.type_name = type(error).__name__
        self.message = str(error)
        self.trace = "".join(traceback.format_exception(error))


class _NotConnected(RankFailure):
    """The ranks have not come together, so that the function was not called."""


def _serve(pipe: Connection, task_timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        function, arguments, rank, world_size, store = pipe.recv()
        logging.disable(logging.NOTSET)  # an earlier task may have silenced TorchRec
        faulthandler.dump_traceback_later(task_timeout)
        try:
            timeout = timedelta(seconds=task_timeout / 2)
            dist.init_process_group("gloo", f"file://{store}", timeout, world_size=world_size, rank=rank)
        except Exception as error:
            result: Any = _NotConnected(error)
        else:
            # TorchRec skips a collective where an earlier task has called it, maybe on some of these ranks alone.
            if (collective_utils := sys.modules.get("torchrec.distributed.collective_utils")) is not None:
                collective_utils._INITIALIZED = False  # type: ignore[attr-defined]
            try:
                result = function(rank, world_size, *arguments)
            except Exception as error:
                result = RankFailure(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(result)
