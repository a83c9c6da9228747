"""`within`: a deadline for whatever uses the store of a process group, whose own timeouts do not hold.

A client of a TCPStore whose timeout has passed tells the server so, and waits for its answer without any limit. If the
server's host is stopped or cannot be reached, that is until TCP gives up, which takes a quarter of an hour, or never.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from evenrank.core.errors import RankLostError, first_line

Result = TypeVar("Result")

_GRACE = timedelta(seconds=2)  # for the timeout of the call itself, whose error says more


def within(timeout: timedelta, call: Callable[[], Result]) -> Result:
    """Return what `call` returns, or raise 2 seconds after `timeout` if it has not returned until then.

    It is called in another thread, which cannot be interrupted: it is left behind, with a lock of the store's client,
    so that other uses of that client miss their deadlines, too. It ends with the process, and does not delay that.

    Args:
        timeout: of the call itself.
        call: uses the store.

    Raises:
        RankLostError: the call did not return, or the store raised.
        Exception: what else the call raised.

    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="evenrank-store", daemon=True)
    thread.start()
    thread.join((timeout + _GRACE).total_seconds())
    if thread.is_alive():
        raise _no_response(f"no answer within {timeout.total_seconds():g} s")
    try:
        return outcome.result()
    except dist.DistError as error:
        raise _no_response(first_line(error)) from None


def _no_response(reason: str) -> RankLostError:
    return RankLostError(
        f"the process group does not respond ({reason}); a rank, or the process that serves its store, usually rank 0, "
        "is lost or cannot be reached; see its own error"
    )
