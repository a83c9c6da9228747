"""Where the functions of preprocessing run, and what is kept of their results.

Parsing, sorting, encoding and compression leave Python's lock to other threads. Threads are as fast as processes then,
and share the tables of ids. Larger logs are preprocessed on the nodes of a Ray cluster; see `ray_workers`.
"""

import contextlib
import math
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.files import replacing

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
Task = TypeVar("Task")
Result = TypeVar("Result")

# Measured, in bytes.
_MODULES, _IN_USE = 170_000_000, 280_000_000  # of the libraries: once they are imported; once they are used, besides
_RAY = 400_000_000  # processes of a cluster of this machine
_TASK, _COPIES, _ROW = 50_000_000, 3, 100  # of a task: itself; copies of its events; rows of one event each
_EVENTS_PER_TASK = 1 << 20
BYTES_PER_ID = 50  # in hash tables and statistics


def num_cores() -> int:
    """Return how many cores there are for this process: of its affinity, its container, and the threads of Polars."""
    # macOS has no such call.
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    with contextlib.suppress(OSError, ValueError):  # no limit
        quota, period = map(int, (_CGROUP / "cpu.max").read_text().split())
        counts.append(-(-quota // period))
    return max(1, min(*counts, pl.thread_pool_size()))


def _free_memory() -> int:
    """Return the bytes that are free on this machine, on macOS all it has, or if that is less, in this container."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _MEMINFO.exists():
        lines = _MEMINFO.read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # no limit
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def own_memory() -> int:
    """Return the bytes that this process has."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _MODULES


class UnfinishedError(DataError):
    """The work could not be finished here and now; what was done is kept for the next run of the same command."""


class Memory:
    """What all processes together have in memory, which is kept below a limit by fewer tasks at a time.

    Args:
        limit: in GB; None: half of what is free, or as much as one task needs.
        taken: bytes that this process has besides the libraries.
        event_bytes: of all columns of an event.
        are_processes: whether tasks are in processes of their own, each with all libraries.
    """

    def __init__(self, limit: float | None, taken: int, event_bytes: int, *, are_processes: bool = False) -> None:
        self._is_promised, self._event_bytes, self._are_processes = limit is not None, event_bytes, are_processes
        self._limit = own_memory() + _free_memory() / 2 if limit is None else limit * 1e9
        self._taken, self._largest = dict[str, int](), _EVENTS_PER_TASK
        self.take("", taken + _IN_USE + _RAY * are_processes)

    @property
    def bytes_per_task(self) -> int:
        """Bytes of a task, or of a process that calls one after another."""
        of_process = (_MODULES + _IN_USE) * self._are_processes
        return of_process + _TASK + _ROW * _EVENTS_PER_TASK + _COPIES * self._event_bytes * self._largest

    @property
    def num_tasks(self) -> int:
        """How many tasks fit at a time."""
        return max(1, int((self._limit - sum(self._taken.values())) / self.bytes_per_task))

    def take(self, what: str, num_bytes: int = 0, *, largest: int = 0) -> None:
        """Take note of what stays in memory from now on, or how many events a task may have.

        Raises a ConfigError if no task fits into the limit beside it, or during the work an UnfinishedError.
        """
        self._taken[what] = num_bytes
        self._largest = max(self._largest, largest)
        needed = sum(self._taken.values()) + self.bytes_per_task
        if self._is_promised and needed > self._limit:
            least, reasons = math.ceil(needed / 1e8) / 10, " and ".join(filter(None, self._taken))
            message = f"memory_limit must be at least {least:g} GB, got {self._limit / 1e9:g}"
            if reasons:
                raise UnfinishedError(
                    f"{message}, for {reasons}; raise it and run it again: it goes on with what is done"
                )
            raise ConfigError(f"{message}; raise it")


_forked: set[int] = set()  # processes that have forked while Polars had threads, which their children lack


def _note_fork() -> None:
    with contextlib.suppress(OSError):  # of a thread that ends just now
        if any(path.read_text().startswith("polars-0") for path in Path("/proc/self/task").glob("*/comm")):
            _forked.add(os.getpid())


os.register_at_fork(before=_note_fork)


def check_not_forked() -> None:
    """Raise a ConfigError where Polars would wait forever for threads that only the parent process has."""
    if _forked - {os.getpid()}:
        raise ConfigError(
            "this process was forked after Polars had started threads, which it lacks; preprocess in the parent, or "
            "start the process with multiprocessing.get_context('spawn')"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Calls functions, several at a time, and keeps what they return, so that a killed run goes on there."""

    count: int
    """How many functions run at a time."""
    caller: Callable[[Callable[[Any], Any]], Callable[[Any], Callable[[], Any]]]
    """Return what starts a call of a function with one argument, and returns what waits for its result."""
    results: Path
    """Folder of the results."""
    on_stage: Callable[[str], None] = lambda stage: None
    memory: Memory | None = None
    """None: nothing limits it."""

    def map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, stage: str, keep: bool = True
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result, in the order of the tasks; few are ahead of the one yielded last.

        Everything must be picklable. If results are kept, what a function returns and writes must not depend on when,
        where and how often it is called.

        Args:
            function: what to call.
            tasks: its arguments.
            stage: description of the progress; unique if results are kept.
            keep: whether to keep results.
        """
        folder = self.results / stage if keep else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        fit = self.count if self.memory is None else self.memory.num_tasks
        num_ahead = 2 * self.count if fit >= self.count else fit
        left = enumerate(tasks)
        call = self.caller(partial(_call, function, folder))
        pending: deque[tuple[int, Task, Callable[[], Result]]] = deque()
        while True:
            for number, task in islice(left, num_ahead - len(pending)):
                pending.append((number, task, call((number, task))))
            if not pending:
                return
            number, task, wait = pending.popleft()
            result = wait()
            self.on_stage(f"{stage}, part {number + 1} of {len(tasks)}")
            yield task, result


@contextlib.contextmanager
def threads(
    count: int,
    results: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
    memory: Memory | None = None,
) -> Iterator[Engine]:
    """Yield an engine with threads of this process."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="evenrank-preprocess")
    try:
        yield Engine(
            count=count,
            caller=lambda function: lambda task: pool.submit(function, task).result,
            results=results,
            on_stage=on_stage,
            memory=memory,
        )
    finally:
        pool.shutdown(cancel_futures=True)


def _call(function: Callable[[Task], Result], folder: Path | None, numbered: tuple[int, Task]) -> Result:
    """Call a function, unless its result is in a folder since a run that was killed."""
    number, task = numbered
    if folder is None:
        return function(task)
    with contextlib.suppress(FileNotFoundError):
        kept: Result = pickle.loads((folder / f"{number:05d}").read_bytes())
        return kept
    result = function(task)
    with replacing(folder / f"{number:05d}") as path, path.open("wb") as file:
        pickle.dump(result, file, protocol=5)  # which writes arrays without a copy, and without the GIL
    return result
