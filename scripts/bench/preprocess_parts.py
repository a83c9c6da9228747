"""What the benchmarks of preprocessing have in common."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import polars as pl

FLAGS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view")

_SECONDS_PER_SAMPLE = 0.5


def draw_kuairand(rng: np.random.Generator, count: int, num_users: int, *, first_day: int) -> pl.DataFrame:
    """Return events of two weeks with the columns of KuaiRand's logs, by day."""
    days = np.sort(rng.integers(0, 14, count)) + first_day
    return pl.DataFrame(
        {
            "user_id": rng.integers(0, num_users, count),
            "video_id": rng.integers(0, 4_371_900, count),
            "date": 20_220_408 + days,
            "hourmin": rng.integers(0, 24, count) * 100,
            "time_ms": 1_649_347_200_000 + days * 86_400_000 + rng.integers(0, 86_400_000, count),
            **{name: (rng.random(count) < 0.3).astype(np.int64) for name in FLAGS},
            "play_time_ms": rng.integers(0, 60_000, count),
            "duration_ms": rng.integers(3_000, 120_000, count),
            "profile_stay_time": np.zeros(count, dtype=np.int64),
            "comment_stay_time": np.zeros(count, dtype=np.int64),
            "is_profile_enter": (rng.random(count) < 0.01).astype(np.int64),
            "is_rand": np.zeros(count, dtype=np.int64),
            "tab": rng.integers(0, 15, count),
        }
    )


def run(code: str, variables: dict[str, object]) -> tuple[float, float]:
    """Run code in its own process; return its wall-clock seconds, including the start of Python, and its peak MiB.

    That of several processes together is sampled.
    """
    assignments = "".join(f"{name} = {value!r}\n" for name, value in variables.items())
    start, peak_kib, has_ended = time.perf_counter(), 0, threading.Event()
    process = subprocess.Popen([sys.executable, "-P", "-c", assignments + code])

    def sample() -> None:
        nonlocal peak_kib
        while not has_ended.wait(_SECONDS_PER_SAMPLE):
            if len(tree := _tree(process.pid)) > 1:
                peak_kib = max(peak_kib, sum(map(_kib, tree)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    has_ended.set()
    sampler.join()
    if status:
        sys.exit(f"a variant exited with code {os.waitstatus_to_exitcode(status)}; see its error message above")
    return seconds, max(peak_kib, usage.ru_maxrss) / 1024


def _tree(root: int) -> list[int]:
    """Return the ids of a process and of all that it and its children have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = path.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def _kib(pid: int) -> int:
    """Return the memory of a process, to which a page that others share counts in part."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0
