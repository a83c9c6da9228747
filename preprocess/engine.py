"""Where the functions of preprocessing run: on threads of this process.

Parsing, sorting, encoding and compression leave Python's lock to other threads. Threads are as fast as processes then,
and share the tables of ids.
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from evenrank.core.errors import ConfigError

_MEMINFO = "/proc/meminfo"
Task = TypeVar("Task")
Result = TypeVar("Result")

# Measured, besides tables of ids: of the process; and of each thread, which has the events of a file with all copies.
_GB, _GB_PER_THREAD = 0.45, 0.25


def num_workers(memory_limit: float | None) -> int:
    """Return how many threads the cores and the memory allow; `memory_limit` in GB, None: half of what is free."""
    limit = _free_memory() / 2e9 if memory_limit is None else memory_limit
    if memory_limit is not None and not _GB + _GB_PER_THREAD <= memory_limit < math.inf:
        raise ConfigError(f"memory_limit must be at least {_GB + _GB_PER_THREAD:g} GB, got {memory_limit:g}; raise it")
    return max(1, int(min(_num_cores(), (limit - _GB) / _GB_PER_THREAD)))


def _num_cores() -> int:
    # macOS has no such call.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


class Engine:
    """Calls functions on `workers` threads; a context manager, which ends them."""

    def __init__(self, workers: int) -> None:
        self._num_workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="evenrank-preprocess")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result, in the order of the tasks; few are ahead of the one yielded last."""
        left = iter(tasks)
        pending: deque[tuple[Task, Future[Result]]] = deque()
        while True:
            for task in islice(left, 2 * self._num_workers - len(pending)):
                pending.append((task, self._threads.submit(function, task)))
            if not pending:
                return
            task, future = pending.popleft()
            yield task, future.result()
