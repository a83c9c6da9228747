import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
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
    assert thread.daemon
    assert not thread.is_alive()
    for error in (ConfigError("a"), RankLostError("c"), RuntimeError("out of memory")):
        with pytest.raises(type(error)) as raised:
            within(TIMEOUT, partial(_raise, error))
        assert raised.value is error
    reset = dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes")
    with pytest.raises(RankLostError) as lost:
        within(TIMEOUT, lambda: _raise(reset))
    assert str(lost.value) == NO_ANSWER.replace("no answer within 0.5 s", "Connection reset by peer")


def _members(store: TCPStore) -> Members:
    return Members(rank=1, world_size=2, store=store)


def _publish_heartbeat(store: TCPStore) -> Any:
    arrivals = Arrivals(_members(store))
    arrivals.publish(1)
    return arrivals.line(2)


ENDS: dict[Callable[[TCPStore], Any], str | None] = {  # None: returns None
    lambda store: within(TIMEOUT, lambda: store.wait(["key"], TIMEOUT)): NO_ANSWER,
    lambda store: FailFastGroup(_members(store), "metadata", TIMEOUT): NO_ANSWER,
    lambda store: handshake(lambda: (0, RankReport()), _members(store), TIMEOUT): NO_ANSWER.replace("0.5", "10.5"),
    lambda store: FailureNote(_members(store)).write(ValueError("unheard")): None,
    lambda store: FailureNote(_members(store)).read(): None,
    _publish_heartbeat: None,
}


def _stores(port: int) -> list[TCPStore]:
    return [TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1)) for _ in ENDS]


def test_all_that_uses_a_store_ends_although_its_server_does_not_answer() -> None:
    def use(store: TCPStore, call: Callable[[TCPStore], Any]) -> str | None:
        try:
            assert call(store) is None
        except RankLostError as error:
            return str(error)
        return None

    with store_server() as server, ThreadPoolExecutor(len(ENDS)) as threads:
        stores = _stores(server.port)
        server.stop()
        assert list(threads.map(use, stores, ENDS)) == list(ENDS.values())


def test_all_that_uses_a_store_ends_once_its_server_has_ended() -> None:
    with store_server() as server:
        stores = _stores(server.port)
    for store, (call, message) in zip(stores, ENDS.items(), strict=True):
        if message is None:
            assert call(store) is None
        else:
            with pytest.raises(RankLostError, match=r"^(the process group|a rank is lost or) does not respond \("):
                call(store)


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


@pytest.mark.parametrize("ending", ["destroys", "leaves"])
def test_a_process_ends_cleanly_although_a_call_has_not_returned(ending: str) -> None:
    with store_server() as server:
        command = [sys.executable, "-P", "-c", PROGRAM, str(server.port), ending]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            server.stop()
            output, _ = process.communicate("go on\n", timeout=60)
        assert (process.returncode, output) == (0, f"{NO_ANSWER}\n")
