"""Groups and stores that fail: everything that uses them ends, with one line, within its timeout."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from evenrank.core.errors import ConfigError, RankLostError
from evenrank.dataloader.balance.ranks.agree import RankReport, handshake
from evenrank.dataloader.balance.ranks.connection import FailureNote
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members, within
from evenrank.training.watch import Arrivals
from tests.stopped_store import store_server

TIMEOUT = timedelta(seconds=0.5)
NO_ANSWER = (
    "the process group does not respond (no answer within 0.5 s); a rank, or the process that serves its store, "
    "usually rank 0, is lost or cannot be reached; see its own error"
)


def _raise(error: Exception) -> None:
    raise error


def test_a_call_has_its_result_or_its_error_and_that_of_the_store_is_one_line() -> None:
    thread = within(TIMEOUT, threading.current_thread)
    assert (thread.daemon, thread.is_alive()) == (True, False)
    for error in (ConfigError("a"), RankLostError("c"), RuntimeError("out of memory")):
        with pytest.raises(type(error)) as raised:
            within(TIMEOUT, partial(_raise, error))
        assert raised.value is error
    reset = dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes")
    with pytest.raises(RankLostError) as lost:
        within(TIMEOUT, lambda: _raise(reset))
    assert str(lost.value) == NO_ANSWER.replace("no answer within 0.5 s", "Connection reset by peer")


def _publish_heartbeat(members: Members) -> Any:
    arrivals = Arrivals(members)
    arrivals.publish(1)
    return arrivals.line(2)


ENDS: dict[Callable[[Members], Any], str | None] = {  # None: returns None
    lambda members: within(TIMEOUT, lambda: members.substore("a").wait(["key"], TIMEOUT)): NO_ANSWER,
    lambda members: FailFastGroup(members, "metadata", TIMEOUT): NO_ANSWER,
    lambda members: handshake(lambda: (0, RankReport()), members, TIMEOUT): NO_ANSWER.replace("0.5", "10.5"),
    lambda members: FailureNote(members).write(ValueError("unheard")): None,
    lambda members: FailureNote(members).read(): None,
    _publish_heartbeat: None,
}


def _use(members: Members, call: Callable[[Members], Any]) -> str | None:
    try:
        assert call(members) is None
    except RankLostError as error:
        return str(error)
    return None


def _members(port: int) -> list[Members]:
    stores = [TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1)) for _ in ENDS]
    return [Members(rank=1, world_size=2, store=store) for store in stores]


def test_all_that_uses_a_store_ends_although_its_server_does_not_answer_or_has_ended() -> None:
    with store_server() as server, ThreadPoolExecutor(len(ENDS)) as threads:
        members = _members(server.port)
        of_ended = _members(server.port)
        server.stop()
        assert list(threads.map(_use, members, ENDS)) == list(ENDS.values())
    starts = ("the process group does not respond (", "a rank is lost or does not respond (")
    for found, expected in zip(map(_use, of_ended, ENDS), ENDS.values(), strict=True):
        assert found is expected is None or (found or "").startswith(starts)


PROGRAM = """
import sys
from datetime import timedelta
import torch.distributed as dist
from evenrank.core.errors import RankLostError
from evenrank.dataloader.balance.ranks.process_group import members_of

timeout = timedelta(seconds=0.5)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=30))
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
print("ready", flush=True)
sys.stdin.readline()
try:
    members_of(None, timeout)
except RankLostError as error:
    print(error)
if sys.argv[2] == "destroys":
    dist.destroy_process_group()
"""


def test_a_process_ends_cleanly_although_a_call_has_not_returned() -> None:
    with store_server() as server:
        pipe, processes = subprocess.PIPE, []
        for ending in ("destroys", "leaves"):
            command = [sys.executable, "-P", "-c", PROGRAM, str(server.port), ending]
            processes.append(subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe))
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        server.stop()
        for process in processes:
            output, _ = process.communicate("go on\n", timeout=60)
            assert (process.returncode, output) == (0, f"{NO_ANSWER}\n")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("runs", [1, pytest.param(50, marks=pytest.mark.long)])
def test_programs_that_leave_their_groups_to_the_interpreter_end_cleanly(runs: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.dataloader.balance.ranks.exit_program", str(runs), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    assert output == "0 " * 8 * runs  # of two ranks of each of four kinds
