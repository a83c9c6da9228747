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
from evenrank.preprocess import Filters, RequestRule, preprocess
from evenrank.preprocess.engine import Memory
from evenrank.preprocess.ray_workers import ray_workers
from tests.preprocess.decoded import bytes_in, of_log

pytestmark = pytest.mark.processes
_MEMORY = Memory(None, 0, 28, are_processes=True)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    of_node: dict[str, Any] = {"memory": _MEMORY.bytes_per_task * 3 // 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **of_node, "include_dashboard": False})
    cluster.add_node(num_cpus=1, **of_node)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


def test_the_bytes_are_those_of_the_local_engine(here: Path, address: str) -> None:
    rows = [(f"user {event % 37}", event * event % 53, 1_600_000_000 + event * 7 % 9999) for event in range(3000)]
    lines = [f"{u},{i},{t},{t % 7 or ''}\n" for u, i, t in rows]
    Path("log.csv").write_text("user,item,time,rating\n" + "".join(lines) + "bad\n")
    Path("later.csv").write_text("user,item,time\n" + "".join(f"{u},{i + 9},{t + 10**5}\n" for u, i, t in rows))
    others: dict[str, Any] = {"split": "time:last:1h", "requests": RequestRule(seconds=60)}
    others |= {"filters": Filters(min_user_events=2, min_item_events=40, window=20, stride=10)}
    others |= {"on_error": "skip", "rejects": True}
    given: dict[str, Any] = {"vocabulary": here / "log", "unknown": "item=drop,user=append"}
    for config in (
        of_log(here / "log", Path("log.csv"), log={"label": "rating:float?"}, min_count="item=60", **others),
        of_log(here / "later", here / "later.csv", **given, **others),
    ):
        preprocess(config)
        stages: list[str] = []
        on_ray = dataclasses.replace(config, out=f"{config.out} on ray", engine="ray", ray_address=address)
        preprocess(on_ray, on_stage=stages.append)
        assert bytes_in(Path(on_ray.out)) == bytes_in(Path(config.out))
        assert {"numbering user_id, part 1 of 1", "writing sequences, part 1 of 1"} <= {*stages}
        assert not ray.is_initialized()


def _double(task: tuple[Path, int]) -> int:
    """Return twice a number, and be killed once at 3; 5 and 6 are errors."""
    folder, number = task
    if number == 3 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if number > 4:
        raise DataError(f"task {number}; correct it") if number == 5 else ValueError(f"task {number}")
    return 2 * number


def test_killed_workers_are_replaced_errors_are_raised_and_a_cluster_that_a_program_uses_stays_connected(
    tmp_path: Path, address: str
) -> None:
    ray.init(address, log_to_driver=False)
    with ray_workers(None, 1, [tmp_path], tmp_path, _MEMORY) as engine:
        assert engine.count == 2
        doubled = engine.map(_double, [(tmp_path, number) for number in range(5)], stage="x")
        assert [result for _, result in doubled] == [0, 2, 4, 6, 8]
        assert (tmp_path / "died").exists()
        for number, error in ((5, DataError), (6, ValueError)):
            with pytest.raises(error, match=f"^task {number}"):
                list(engine.map(_double, [(tmp_path, number)], stage="y"))
    assert ray.is_initialized()
    ray.shutdown()


def test_what_a_node_lacks_is_found_before_the_work_begins_and_a_missing_cluster_at_once(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, version = Memory(None, 0, 1 << 40, are_processes=True), evenrank.__version__
    for kind, line, paths, memory, here in (
        (DataError, rf"node \S+ does not see {tmp_path}/missing; with .*", ["missing"], _MEMORY, version),
        (ConfigError, rf"node \S+ has evenrank {version}; install 99, as here, on all nodes", [], _MEMORY, "99"),
        (ConfigError, r"no node of the Ray cluster has a core and \d+\.\d GB of memory; add one", [], wide, version),
    ):
        monkeypatch.setattr(evenrank, "__version__", here)
        shared = [tmp_path, *(tmp_path / path for path in paths)]
        with pytest.raises(kind, match=f"^{line}$"), ray_workers(address, 1, shared, tmp_path, memory):
            pass
        assert not ray.is_initialized()
    for nowhere in ("127.0.0.1:1", "[::1]:1", "::1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "[x"):
        line = rf"^there is no Ray cluster at {re.escape(nowhere)}: .*; check --ray-address$"
        with pytest.raises(ConfigError, match=line):
            ray_workers(nowhere, 1, [], tmp_path, _MEMORY).__enter__()
