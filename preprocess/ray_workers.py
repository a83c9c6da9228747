"""Workers on the nodes of a Ray cluster: one that is running, or one of this machine for as long as they are used."""

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import evenrank
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.optional_imports import naming_extras
from evenrank.preprocess.engine import Engine, Memory, UnfinishedError

with naming_extras():
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_SECONDS_TO_CONNECT = 10


@contextlib.contextmanager
def ray_workers(
    address: str | None,
    count: int,
    shared: Sequence[Path],
    results: Path,
    memory: Memory,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Iterator[Engine]:
    """Yield an engine with processes on all nodes of a cluster, which each reserve a part of the memory.

    Args:
        address: of a cluster, as `ray.init` takes it; None: one of this machine is started and ended.
        count: number of cores of that one; otherwise, cores and memory of the nodes decide.
        shared: files and folders that all nodes must see, because events go through them.
        results, memory, on_stage: of the engine.
    """
    of_cluster = {"address": address} if address else {"address": "local", "num_cpus": count}
    handler, is_connected = signal.getsignal(signal.SIGTERM), ray.is_initialized()  # by the program that calls this one
    try:
        if not is_connected:
            # Ray would wait for minutes.
            if target := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address or ""):
                socket.create_connection((target[1], int(target[2])), timeout=_SECONDS_TO_CONNECT).close()
            ray.init(**of_cluster, log_to_driver=False, logging_level=logging.ERROR)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's exits at once
    except (OSError, RuntimeError, ValueError) as error:
        place = f"at {address}" if address else "on this machine"
        raise ConfigError(f"there is no Ray cluster {place}: {first_line(error)}; check --ray-address") from error
    num_bytes = memory.bytes_per_task
    try:
        count = 0
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            resources = node["Resources"] if node["Alive"] else {}
            if fit := int(min(resources.get("CPU", 0), resources.get("memory", 0) // num_bytes)):
                _check(node, [str(path) for path in shared])
                count += fit
        if not count:
            raise ConfigError(f"no node of the Ray cluster has a core and {num_bytes / 1e9:.1f} GB of memory; add one")
        call: Any = ray.remote(_call).options(memory=num_bytes)

        def caller(function: Callable[[Any], Any]) -> Callable[[Any], Callable[[], Any]]:
            sent: Any = ray.put(function)  # to each node once
            return lambda task: partial(_wait, call.remote(sent, task))

        yield Engine(count=count, caller=caller, results=results, on_stage=on_stage, memory=memory)
    finally:
        if not is_connected:
            ray.shutdown()


def _check(node: dict[str, Any], shared: Sequence[str]) -> None:
    """Raise an error if a node lacks this release or what must be shared."""
    on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    version, missing = _wait(ray.remote(_call).options(scheduling_strategy=on_node).remote(_look_around, shared))
    where = f"node {node['NodeManagerAddress']}"
    if version != evenrank.__version__:
        raise ConfigError(f"{where} has evenrank {version}; install {evenrank.__version__}, as here, on all nodes")
    if missing:
        raise DataError(
            f"{where} does not see {missing[0]}; with --engine ray, choose input and output (for a URL, TMPDIR) on "
            "storage that all nodes share"
        )


def _look_around(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the release of evenrank on this node, and the files that it does not see."""
    return evenrank.__version__, [name for name in names if not os.path.exists(name)]


def _call(function: Callable[[Any], Any], task: Any) -> tuple[Any, Exception | None]:
    """Return the result or the error, which Ray would replace by one of its own, and log if nobody asks for it."""
    try:
        return function(task), None
    except Exception as error:
        return None, error


def _wait(reference: Any) -> Any:
    try:
        result, failure = ray.get(reference)
    except RayError as error:
        reason = f"Ray could not finish a task: {first_line(error)}"
        raise UnfinishedError(f"{reason}; see its logs, and run it again, which goes on with what was done") from error
    if failure is not None:
        raise failure
    return result
