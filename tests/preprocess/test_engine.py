import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from evenrank.core.errors import ConfigError
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess import engine as engine_module
from evenrank.preprocess.engine import Memory, UnfinishedError, threads
from tests.preprocess.test_append import bytes_in


def test_results_are_in_the_order_of_the_tasks_and_few_are_ahead(tmp_path: Path) -> None:
    started: list[int] = []
    stages: list[str] = []
    first_may_end = threading.Event()

    def double(task: int) -> int:
        started.append(task)
        if task == 0:
            assert first_may_end.wait(60)
        return 2 * task

    with threads(3, tmp_path, stages.append) as engine:
        results = engine.map(double, range(20), stage="doubling")
        first_may_end.set()
        assert next(results) == (0, 0)
        assert max(started) < 6
        assert [*results] == [(task, 2 * task) for task in range(1, 20)]
    assert sorted(started) == [*range(20)]
    assert stages == [f"doubling, part {number} of 20" for number in range(1, 21)]


def test_an_error_ends_the_tasks_that_have_not_begun(tmp_path: Path) -> None:
    called: list[int] = []

    def fail(task: int) -> None:
        called.append(task)
        raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task 0"), threads(1, tmp_path) as engine:
        list(engine.map(fail, range(100), stage="failing"))
    assert len(called) <= 2


def test_memory_decides_how_many_tasks_run_at_a_time() -> None:
    assert [Memory(limit, 170_000_000, 28).num_tasks for limit in (0.7, 0.9, 1.0, 10)] == [1, 1, 2, 39]
    assert [Memory(limit, 170_000_000, 76).num_tasks for limit in (1.2, 10)] == [1, 24]  # wider events
    for too_small, least in ((0.6, 0.7), (0.1, 0.7)):
        with pytest.raises(
            ConfigError, match=rf"^memory_limit must be at least {least} GB, got {too_small}; raise it$"
        ):
            Memory(too_small, 170_000_000, 28)
    memory = Memory(1.2, 170_000_000, 28)
    memory.take("a table", 400_000_000)
    assert memory.num_tasks == 1
    with pytest.raises(
        UnfinishedError, match=r"^memory_limit must be at least 1\.3 GB, got 1\.2, for a table and 9 ids"
    ):
        memory.take("9 ids", 200_000_000)
    memory = Memory(1.4, 170_000_000, 28)
    memory.take("many events", largest=4_000_000)
    assert memory.num_tasks == 1
    with pytest.raises(
        UnfinishedError, match=r"^memory_limit must be at least 2\.\d GB, got 1\.4, for .*more; raise it"
    ):
        memory.take("more", largest=20_000_000)


def test_without_a_limit_it_is_half_of_what_is_free_and_one_task_always_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_free_memory", lambda: 6_000_000_000)
    assert 5 < Memory(None, engine_module.own_memory(), 28).num_tasks < 15
    monkeypatch.setattr(engine_module, "_free_memory", lambda: 1)
    memory = Memory(None, 170_000_000, 28)
    memory.take("a table", 1 << 40)
    assert memory.num_tasks == 1


def test_tasks_that_do_not_fit_wait(tmp_path: Path) -> None:
    running, most, lock = [0], [0], threading.Lock()

    def count(task: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.002)
        with lock:
            running[0] -= 1

    memory = Memory(1.3, 170_000_000, 28)
    for fit in (3, 1):
        assert memory.num_tasks == fit
        with threads(8, tmp_path, memory=memory) as engine:
            list(engine.map(count, range(40), stage=f"{fit}"))
        assert 1 <= most[0] <= fit
        most[0] = 0
        memory.take("a table", 400_000_000)


# Prints how many threads preprocessing may have, after it was told which cores it has.
_CORES = """
import os, sys
os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
from evenrank.preprocess.engine import num_cores
print(num_cores())
"""


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of processes")
def test_threads_are_no_more_than_affinity_and_polars_allow() -> None:
    cores = sorted(os.sched_getaffinity(0))
    few = ",".join(map(str, cores[:1]))
    every = ",".join(map(str, cores))
    for given, environment, expected in (
        (few, {}, 1),
        (every, {}, len(cores)),
        (every, {"POLARS_MAX_THREADS": "1"}, 1),
    ):
        command = [sys.executable, "-P", "-c", _CORES, given]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100)
        assert (done.stdout, done.stderr) == (f"{expected}\n", "")


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 2), ("150000 100000", 2), ("100000 100000", 1), ("1 2", 1)]
)
def test_threads_are_no_more_than_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(engine_module, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(pl, "thread_pool_size", lambda: 2)
    assert engine_module.num_cores() == expected


def test_without_linux_all_cores_and_all_memory_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(engine_module, "_MEMINFO", tmp_path / "missing")
    assert engine_module.num_cores() == 1
    assert Memory(None, 170_000_000, 28).num_tasks >= 1


def test_free_memory_is_that_of_the_machine() -> None:
    assert 1 << 20 < engine_module._free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Preprocesses a log with a limit of memory; prints the peak of this process in GB, or the error.
_LIMITED = """
import re, sys
from pathlib import Path
from evenrank.core.errors import EvenrankError
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
log, out, limit = sys.argv[1:]
columns = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
custom = TabularConfig(events=(Path(log),), **columns)
try:
    preprocess(PreprocessConfig(dataset="custom", out=out, custom=custom, ids="dense", memory_limit=float(limit)))
    kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    print(kib * 1024 / 1e9)
except EvenrankError as error:
    print(error)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell the peak of a process")
def test_a_limit_of_memory_is_kept_to_or_an_error_says_what_would_fit_and_bytes_are_the_same(tmp_path: Path) -> None:
    rng, log = np.random.default_rng(0), tmp_path / "log.parquet"
    num_events = 2_200_000  # more than a file, and each with a user and an item of its own nearly
    ids = {name: rng.integers(0, 1 << 40, num_events) for name in ("user", "item")}
    pl.DataFrame({**ids, "time": 1_600_000_000 + np.arange(num_events)}).write_parquet(log)

    def run(limit: float) -> str:
        command = [sys.executable, "-P", "-c", _LIMITED, str(log), str(tmp_path / "limited"), f"{limit}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert re.match(r"memory_limit must be at least 0\.[89] GB, got 0\.78, for 2,199,999 ids of user_id; ", run(0.78))
    assert not (tmp_path / "limited").exists()
    assert float(run(1.0)) <= 1.0  # goes on with what was done
    columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    custom = TabularConfig(events=(log,), **columns)
    config = PreprocessConfig(dataset="custom", out=tmp_path / "free", custom=custom, ids="dense")
    with pytest.raises(ConfigError, match=r"^memory_limit must be at least \d\.?\d? GB, got 0\.1; raise it$"):
        preprocess(replace(config, memory_limit=0.1))
    preprocess(config)
    assert bytes_in(tmp_path / "limited") == bytes_in(tmp_path / "free")
