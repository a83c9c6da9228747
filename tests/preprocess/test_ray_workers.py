"""Preprocessing on a real Ray cluster of two nodes of this machine."""

import dataclasses
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import evenrank
from evenrank.core.errors import ConfigError, DataError
from evenrank.preprocess import Filters, PreprocessConfig, RequestRule, SyntheticConfig, TabularConfig, preprocess
from evenrank.preprocess.engine import Memory
from evenrank.preprocess.ray_workers import ray_workers

pytestmark = pytest.mark.processes
_MEMORY = Memory(None, 0, 28, are_processes=True)
_NODE_BYTES = _MEMORY.bytes_per_task * 3 // 2


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    memory: dict[str, Any] = {"num_cpus": 1, "memory": _NODE_BYTES, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**memory, "include_dashboard": False})
    cluster.add_node(**memory)
    cluster.add_node(num_cpus=0, memory=_NODE_BYTES, object_store_memory=100 << 20)  # which gets no task
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _configs(folder: Path) -> Iterator[PreprocessConfig]:
    rows = [(f"user {event % 37}", event * event % 53, 1_600_000_000 + event * 7 % 9999) for event in range(3000)]
    lines = [f"{u},{i},{t},{t % 7 or ''}\n" for u, i, t in rows]
    (folder / "log.csv").write_text("user,item,time,rating\n" + "".join(lines) + "bad\n")
    (folder / "later.csv").write_text("user,item,time\n" + "".join(f"{u},{i + 9},{t + 10**5}\n" for u, i, t in rows))
    names: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    log = PreprocessConfig(
        dataset="custom",
        out=folder / "log",
        custom=TabularConfig(
            events=(Path("log.csv"),), label="rating:float?", **names
        ),  # relative to the folder of this process alone
        ids="dense",
        filters=Filters(min_user_events=2, min_item_events=40, window=20, stride=10),
        split="time:last:1h",
        requests=RequestRule(seconds=60),
        on_error="skip",
        rejects=True,
    )
    yield log
    later = TabularConfig(events=(folder / "later.csv",), **names)
    yield dataclasses.replace(
        log, out=folder / "later", custom=later, ids="", vocabulary=folder / "log", unknown="item=drop,user=append"
    )
    yield PreprocessConfig(dataset="synthetic", out=folder / "drawn", synthetic=SyntheticConfig(num_users=500))


def test_the_bytes_are_those_of_the_local_engine(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for config in _configs(tmp_path):
        preprocess(config)
        stages: list[str] = []
        on_ray = dataclasses.replace(config, out=f"{config.out} on ray", engine="ray", ray_address=address)
        preprocess(on_ray, on_stage=stages.append)
        assert _bytes_in(Path(on_ray.out)) == _bytes_in(Path(config.out))
        assert {"numbering user_id, part 1 of 1", "writing sequences, part 1 of 1"} <= {*stages} or "drawn" in str(
            config.out
        )
        assert not ray.is_initialized()


def _die_at_first(task: tuple[Path, int]) -> int:
    folder, number = task
    if number == 3 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_a_task_whose_worker_was_killed_runs_again(tmp_path: Path, address: str) -> None:
    with ray_workers(address, 1, [tmp_path], tmp_path, _MEMORY) as engine:
        assert engine.count == 2
        doubled = engine.map(_die_at_first, [(tmp_path, number) for number in range(9)], stage="x")
        assert [result for _, result in doubled] == [2 * number for number in range(9)]
    assert (tmp_path / "died").exists()


def _fail(task: int) -> int:
    raise DataError(f"task {task}; correct it") if task == 5 else ValueError(f"task {task}")


def test_an_error_of_a_task_is_raised_as_it_is(tmp_path: Path, address: str) -> None:
    with ray_workers(address, 1, [tmp_path], tmp_path, _MEMORY) as engine:
        for number, error in ((5, DataError), (6, ValueError)):
            with pytest.raises(error, match=f"^task {number}"):
                list(engine.map(_fail, [number], stage="x"))


def test_what_a_node_lacks_is_found_before_the_work_begins(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(DataError, match=rf"^node \S+ does not see {tmp_path}/missing; with --engine ray, choose input"),
        ray_workers(address, 1, [tmp_path, tmp_path / "missing"], tmp_path, _MEMORY),
    ):
        pass
    assert not ray.is_initialized()
    version = evenrank.__version__
    monkeypatch.setattr(evenrank, "__version__", "99")
    with (
        pytest.raises(ConfigError, match=rf"^node \S+ has evenrank {version}; install 99, as here, on all nodes$"),
        ray_workers(address, 1, [tmp_path], tmp_path, _MEMORY),
    ):
        pass
    wide = Memory(None, 0, 1 << 40, are_processes=True)
    message = r"^no node of the Ray cluster has a core and \d+\.\d GB of memory; add one$"
    with pytest.raises(ConfigError, match=message), ray_workers(address, 1, [], tmp_path, wide):
        pass


@pytest.mark.parametrize("nowhere", ["127.0.0.1:1", "[::1]:1", "::1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "[x"])
def test_an_address_without_a_cluster_is_an_error_at_once(tmp_path: Path, nowhere: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^there is no Ray cluster at {re.escape(nowhere)}: .*; check --ray-address$"
    ):
        ray_workers(nowhere, 1, [], tmp_path, _MEMORY).__enter__()


def test_a_cluster_that_a_program_uses_stays_connected(tmp_path: Path, address: str) -> None:
    ray.init(address, log_to_driver=False)
    with ray_workers(None, 1, [tmp_path], tmp_path, _MEMORY) as engine:
        assert engine.count == 2
    assert ray.is_initialized()
    ray.shutdown()
