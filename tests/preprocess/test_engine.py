import math
import os
import threading
from pathlib import Path

import pytest

from evenrank.core.errors import ConfigError
from evenrank.preprocess import engine as engine_module
from evenrank.preprocess.engine import num_workers, threads


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


def test_cores_and_memory_decide_how_many_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert [num_workers(limit) for limit in (0.7, 0.94, 0.96, 2.4, 1000)] == [1, 1, 2, 7, 16]
    monkeypatch.setattr(engine_module, "_free_memory", lambda: 4_000_000_000)
    assert num_workers(None) == 6
    monkeypatch.setattr(engine_module, "_free_memory", lambda: 1)
    assert num_workers(None) == 1
    for wrong in (0.69, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"memory_limit must be at least 0\.7 GB"):
            num_workers(wrong)


def test_without_linux_all_cores_and_all_memory_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(engine_module, "_MEMINFO", "/missing")
    assert num_workers(1000) == 3
    assert 1 <= num_workers(None) <= 3


def test_free_memory_is_that_of_the_machine() -> None:
    assert 1 << 20 < engine_module._free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
