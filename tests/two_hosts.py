"""Two hosts on one machine: network namespaces with a cable between them, which tests cut."""

import ctypes
import faulthandler
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankFailure, rank_context

RANKS_PER_HOST = 2
WORLD_SIZE = 2 * RANKS_PER_HOST
_CLONE_NEWNET = 0x40000000
_INTERFACE = "eth0"
_PORT = 29500  # of the store; nothing else runs in the namespaces
_START_SECONDS = 240.0  # until all ranks are at their gates, on a busy machine
_numbers = itertools.count()


class TwoHosts:
    """Two network namespaces that a veth pair joins; host 0 serves the store."""

    def __init__(self) -> None:
        name = f"evenrank-{os.getpid()}-{next(_numbers)}"
        self.namespaces = (f"{name}-0", f"{name}-1")
        try:
            for namespace in self.namespaces:
                _run(f"netns add {namespace}")
            first, second = self.namespaces
            _run(f"-n {first} link add {_INTERFACE} type veth peer name {_INTERFACE} netns {second}")
            for host, namespace in enumerate(self.namespaces):
                _run(f"-n {namespace} address add {_address(host)}/24 dev {_INTERFACE}")
                for interface in ("lo", _INTERFACE):
                    _run(f"-n {namespace} link set {interface} up")
        except BaseException:
            self.close()
            raise

    def cut(self, host: int) -> None:
        _run(f"-n {self.namespaces[host]} link set {_INTERFACE} down")

    def close(self) -> None:
        for namespace in self.namespaces:
            if Path("/run/netns", namespace).exists():
                _run(f"netns delete {namespace}")

    @contextmanager
    def job(self, function: Callable[..., Any], *arguments: Any) -> Iterator["Job"]:
        """Start a process for each rank, which calls function(rank, gate, *arguments); kill those that are left."""
        job = Job(self.namespaces, function, arguments)
        try:
            yield job
        finally:
            for process in job.processes:
                process.kill()
                process.join()


class Gate:
    """A point in the program of a rank that its test waits for."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def reach(self) -> None:
        self._pipe.send(None)

    def wait(self) -> None:
        """Reach it, and wait until the test goes on."""
        self.reach()
        self._pipe.recv()


class Job:
    """The ranks of both hosts, numbered host by host."""

    def __init__(self, namespaces: Sequence[str], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        context: Any = rank_context()
        self.processes, self._pipes = [], []
        for rank in range(WORLD_SIZE):
            pipe, theirs = context.Pipe()
            namespace = namespaces[rank // RANKS_PER_HOST]
            process = context.Process(target=_serve, args=(theirs, namespace, rank, function, arguments))
            process.start()
            self.processes.append(process)
            self._pipes.append(pipe)

    def await_gates(self) -> None:
        """Return once all ranks have reached their gates."""
        deadline = time.monotonic() + _START_SECONDS
        assert all(self._receive(rank, deadline) is None for rank in range(WORLD_SIZE))

    def open_gates(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def stop(self, host: int, number: int = signal.SIGSTOP) -> None:
        for process in self.processes[host * RANKS_PER_HOST : (host + 1) * RANKS_PER_HOST]:
            os.kill(process.pid or 0, number)

    def resume(self, host: int) -> None:
        self.stop(host, signal.SIGCONT)

    def results(self, deadline: float | None = None, *, hosts: Sequence[int] = (0, 1)) -> list[Any]:
        """Return what ranks return or, as a RankFailure, raise; their ends may not come after the deadline."""
        deadline = deadline or time.monotonic() + _START_SECONDS
        ranks = [rank for rank in range(WORLD_SIZE) if rank // RANKS_PER_HOST in hosts]
        results = [self._receive(rank, deadline) for rank in ranks]
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
            assert self.processes[rank].exitcode == 0, f"rank {rank} has returned, but its process has not ended"
        return results

    def _receive(self, rank: int, deadline: float) -> Any:
        assert self._pipes[rank].poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
        return self._pipes[rank].recv()


def make_two_hosts() -> TwoHosts:
    """Return two hosts; skip the test where the system, or the user, cannot make them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two hosts are network namespaces, which need root and the command ip")
    try:
        return TwoHosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system makes no network namespaces: {error.stderr.strip()}")


def _serve(pipe: Connection, namespace: str, rank: int, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    _enter(namespace)
    # Gloo would choose the interface that the name of the machine resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_START_SECONDS, exit=True)  # also if the test itself is killed
    try:
        dist.init_process_group(
            "gloo", f"tcp://{_address(0)}:{_PORT}", timedelta(seconds=_START_SECONDS), world_size=WORLD_SIZE, rank=rank
        )
        result = function(rank, Gate(pipe), *arguments)
    except Exception as error:
        result = RankFailure(error)
    pipe.send(result)
    dist.destroy_process_group()


def _enter(namespace: str) -> None:
    """Move this thread, and those that it starts, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _address(host: int) -> str:
    return f"10.0.0.{host + 1}"


def _run(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)
