"""How functions are called several at a time, within cores and memory."""

import logging
import multiprocessing
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from evenrank.core.errors import ConfigError
from evenrank.preprocess import PreprocessConfig, preprocess
from evenrank.preprocess import engine as engine_module
from evenrank.preprocess.build import vocabulary
from evenrank.preprocess.engine import Memory, UnfinishedError, own_memory, threads
from tests.preprocess.decoded import bytes_in, of_log, synthetic


def test_results_are_in_order_with_few_ahead_and_no_task_is_called_again_or_after_an_error(tmp_path: Path) -> None:
    started, stages, first_may_end = list[int](), list[str](), threading.Event()

    def double(task: int) -> int:
        started.append(task)
        assert task or first_may_end.wait(60)
        return 2 * task if task < 20 else 1 // 0

    doubled = [(task, 2 * task) for task in range(20)]
    with threads(3, tmp_path, stages.append) as engine:
        results = engine.map(double, range(20), stage="doubling")
        first_may_end.set()
        assert next(results) == doubled[0]
        assert max(started) < 6
        assert [*results] == doubled[1:]
    assert sorted(started) == [*range(20)]
    assert stages == [f"doubling, part {number} of 20" for number in range(1, 21)]
    with threads(1, tmp_path) as engine:
        assert [*engine.map(double, range(20), stage="doubling")] == doubled
        assert len(started) == 20
        for _ in range(2):
            assert [*engine.map(double, range(2), stage="again", keep=False)] == doubled[:2]
    assert started[20:] == [0, 1, 0, 1]
    with pytest.raises(ZeroDivisionError), threads(1, tmp_path) as engine:
        list(engine.map(double, range(20, 120), stage="failing"))
    assert len(started) <= 26


def test_memory_decides_how_many_tasks_run_at_a_time() -> None:
    assert [Memory(limit, 170_000_000, 28).num_tasks for limit in (0.7, 0.9, 1.0, 10)] == [1, 1, 2, 39]
    assert [Memory(limit, 170_000_000, 76).num_tasks for limit in (1.2, 10)] == [1, 24]  # wider events
    with pytest.raises(ConfigError, match=r"^memory_limit must be at least 0.7 GB, got 0.6; raise it$"):
        Memory(0.6, 170_000_000, 28)
    for limit, what, first, second, least in (
        (1.2, "num_bytes", 400_000_000, 200_000_000, r"1\.3"),
        (1.4, "largest", 4_000_000, 20_000_000, r"2\.\d"),
    ):
        memory = Memory(limit, 170_000_000, 28)
        memory.take("a table", **{what: first})
        assert memory.num_tasks == 1
        message = rf"^memory_limit must be at least {least} GB, got {limit}, for a table and 9 ids; raise it"
        with pytest.raises(UnfinishedError, match=message):
            memory.take("9 ids", **{what: second})


def test_without_a_limit_it_is_half_of_what_is_free_and_one_task_always_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 << 20 < engine_module._free_memory() <= all_memory
    monkeypatch.setattr(engine_module, "_MEMINFO", tmp_path / "missing")  # without Linux
    assert engine_module._free_memory() <= all_memory
    monkeypatch.setattr(engine_module, "_CGROUP", tmp_path)  # of a container
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 18}\n")
    assert engine_module._free_memory() == 3 << 18
    assert Memory(None, 1 << 40, 28).num_tasks == 1
    monkeypatch.setattr(engine_module, "_free_memory", lambda: 6_000_000_000)
    assert 5 < Memory(None, own_memory(), 28).num_tasks < 15


def test_tasks_that_do_not_fit_wait(tmp_path: Path) -> None:
    memory = Memory(1.3, 170_000_000, 28)
    for fit in (3, 1):
        running, most, together = list[int](), list[int](), threading.Barrier(fit)

        def count(task: int, *, running: Any = running, most: Any = most, together: Any = together) -> None:
            running.append(task)
            most.append(len(running))
            together.wait(60)
            running.remove(task)

        with threads(8, tmp_path, memory=memory) as engine:
            list(engine.map(count, range(39), stage=f"{fit}"))
        assert max(most) == memory.num_tasks == fit
        memory.take("a table", 400_000_000)


def test_threads_are_no_more_than_affinity_quota_and_polars_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_CGROUP", tmp_path)
    for quota, cores, of_polars, expected in (
        *(("max 100000", 2, 2, 2), ("150000 100000", 2, 2, 2), ("100000 100000", 2, 2, 1)),
        *(("1 2", 2, 2, 1), ("max 100000", 1, 4, 1), ("max 100000", 4, 3, 3)),
    ):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        monkeypatch.setattr(pl, "thread_pool_size", lambda count=of_polars: count)
        monkeypatch.setattr(os, "cpu_count", lambda count=cores: count)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=cores: range(count), raising=False)
        assert engine_module.num_cores() == expected
        monkeypatch.delattr(os, "sched_getaffinity")  # without Linux
        assert engine_module.num_cores() == expected


def test_a_run_that_needs_more_memory_goes_on_under_a_higher_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = pl.DataFrame({"user": range(7, 2007), "item": range(2000), "time": range(1_600_000_000, 1_600_002_000)})
    log.write_csv(tmp_path / "log.csv")
    config = of_log(tmp_path / "out", tmp_path / "log.csv", ids="dense")
    monkeypatch.setattr(vocabulary, "BYTES_PER_ID", 10**6)
    message = r"^memory_limit must be at least \d\.?\d? GB, got .*, for 2,000 ids of .*"
    with pytest.raises(UnfinishedError, match=message):
        preprocess(replace(config, memory_limit=round(own_memory() / 1e9 + 1, 2)))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".out.partial", "log.csv"]
    with caplog.at_level(logging.WARNING, "evenrank.preprocess"):
        preprocess(replace(config, memory_limit=own_memory() / 1e9 + 9))
    assert caplog.messages == ["going on with what an earlier run has finished"]
    preprocess(replace(config, out=tmp_path / "whole"))
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "whole")
    pl.concat([log, log.head(5)]).write_csv(tmp_path / "log.csv")
    monkeypatch.setattr(vocabulary, "BYTES_PER_ID", 10**9)
    rare = replace(config, out=tmp_path / "rare", memory_limit=round(own_memory() / 1e9 + 1, 2), min_count="2")
    with pytest.raises(UnfinishedError, match=r", for 5 ids of .*"):  # rare ones need no memory
        preprocess(rare)


def _preprocess_and_return_peak(config: PreprocessConfig) -> float:
    preprocess(config)
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024 / 1e9


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell the peak of a process")
def test_a_limit_of_memory_is_kept_to_and_bytes_are_the_same(tmp_path: Path) -> None:
    rng, log = np.random.default_rng(0), tmp_path / "log.parquet"
    num_events = 2_200_000  # more than a file, and each with a user and an item of its own nearly
    ids = {name: rng.integers(0, 1 << 40, num_events) for name in ("user", "item")}
    pl.DataFrame({**ids, "time": 1_600_000_000 + np.arange(num_events)}).write_parquet(log)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        limited = of_log(tmp_path / "limited", log, ids="dense", memory_limit=1.0)
        assert pool.apply(_preprocess_and_return_peak, (limited,)) < 1
    preprocess(of_log(tmp_path / "free", log, ids="dense"))
    assert bytes_in(tmp_path / "limited") == bytes_in(tmp_path / "free")


def test_a_child_that_lacks_the_threads_of_polars_refuses_at_once(tmp_path: Path) -> None:
    preprocess(synthetic(tmp_path / "parent"))

    def refuse() -> None:
        with pytest.raises(ConfigError, match=r"^this process was forked after Polars had started threads, which it"):
            preprocess(synthetic(tmp_path / "child"))
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=refuse)
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 0
    preprocess(synthetic(tmp_path / "parent"))
