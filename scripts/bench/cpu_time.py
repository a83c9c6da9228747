"""The CPU time of a process's threads, as Linux counts it."""

import re
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTime:
    """CPU time up to a moment, in nanoseconds."""

    process: int
    """Of all threads, ended ones included."""
    own: int
    """Of the thread that asked."""
    threads: dict[int, tuple[str, int]]
    """Name and time of each other thread that lives, by its id. Threads that Python started have Python's name."""

    @classmethod
    def now(cls) -> Self:
        """Return the times up to now."""
        process, own = time.process_time_ns(), time.thread_time_ns()
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        threads = {}
        for folder in _TASKS.iterdir():
            if (number := int(folder.name)) == threading.get_native_id():
                continue
            try:
                name = names.get(number) or (folder / "comm").read_text().strip()
                threads[number] = name, int((folder / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
        return cls(process=process, own=own, threads=threads)

    def others_since(self, earlier: "CpuTime") -> int:
        """Return the time of all threads but the one that asked, since an earlier moment."""
        return (self.process - earlier.process) - (self.own - earlier.own)

    def by_name_since(self, earlier: "CpuTime") -> dict[str, int]:
        """Return the time of these threads by name, without numbers at its end; `ended`: of threads that ended."""
        times: defaultdict[str, int] = defaultdict(int)
        for number, (name, ns) in self.threads.items():
            times[re.sub(r"[-_]*\d*$", "", name) or name] += ns - earlier.threads.get(number, ("", 0))[1]
        if earlier.threads.keys() - self.threads.keys():
            times["ended"] += max(self.others_since(earlier) - sum(times.values()), 0)
        return dict(times)
