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

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.files import replacing

_MEMINFO = "/proc/meminfo"
Task = TypeVar("Task")
Result = TypeVar("Result")

# Measured, besides tables of ids: of the process; and of each thread, which has the events of a file with all copies.
_GB, _GB_PER_THREAD = 0.45, 0.25
BYTES_PER_PROCESS = int((_GB + _GB_PER_THREAD) * 1e9)


def num_workers(memory_limit: float | None, *, are_processes: bool = False) -> int:
    """Return how many threads or processes the cores and the memory allow.

    `memory_limit` is in GB; None: half of what is free.
    """
    limit = _free_memory() / 2e9 if memory_limit is None else memory_limit
    each = _GB + _GB_PER_THREAD if are_processes else _GB_PER_THREAD
    if memory_limit is not None and not _GB + each <= memory_limit < math.inf:
        raise ConfigError(f"memory_limit must be at least {_GB + each:g} GB, got {memory_limit:g}; raise it")
    # macOS has no such call.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(num_cores, (limit - _GB) / each)))


def _free_memory() -> int:
    """Return the bytes that are free on this machine, on macOS all it has, or if that is less, in this container."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (meminfo := Path(_MEMINFO)).exists():
        lines = meminfo.read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


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


class UnfinishedError(DataError):
    """The work could not be finished here and now; what was done is kept for the next run of the same command."""


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
        left = enumerate(tasks)
        call = self.caller(partial(_call, function, folder))
        pending: deque[tuple[int, Task, Callable[[], Result]]] = deque()
        while True:
            for number, task in islice(left, 2 * self.count - len(pending)):
                pending.append((number, task, call((number, task))))
            if not pending:
                return
            number, task, wait = pending.popleft()
            result = wait()
            self.on_stage(f"{stage}, part {number + 1} of {len(tasks)}")
            yield task, result


@contextlib.contextmanager
def threads(count: int, results: Path, on_stage: Callable[[str], None] = lambda stage: None) -> Iterator[Engine]:
    """Yield an engine with threads of this process."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="evenrank-preprocess")
    try:
        yield Engine(
            count=count,
            caller=lambda function: lambda task: pool.submit(function, task).result,
            results=results,
            on_stage=on_stage,
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
    with replacing(folder / f"{number:05d}") as path:
        path.write_bytes(pickle.dumps(result))
    return result
