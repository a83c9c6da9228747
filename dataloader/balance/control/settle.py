"""What ranks settle before any process group is created: through the store, by rank 0, with one verdict for all.

A rank whose arguments are invalid, or differ from those of the others, would otherwise leave the others waiting in the
creation of a group. The store needs neither a device nor a backend.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed.distributed_c10d import Store

from evenrank.core.errors import RankError, first_line, one_line
from evenrank.dataloader.balance.control.deadline import within
from evenrank.dataloader.balance.control.process_group import Members

Report = TypeVar("Report")
Verdict = TypeVar("Verdict")

_WAIT = timedelta(seconds=10)  # at a time, because a client of a TCPStore serves no other thread while it waits


def settle(
    report: Report,
    judge: Callable[[Sequence[Report]], Verdict],
    members: Members,
    timeout: timedelta,
    *,
    of: str = "Balancer",
) -> Verdict:
    """Return what `judge` makes of the reports of all ranks. Collective: every rank must call this.

    Args:
        report: of this rank; picklable.
        judge: called on rank 0 with the reports in rank order; what it returns is picklable.
        members: the ranks.
        timeout: how long to wait for other ranks.
        of: what every rank creates, for the message if one has not.

    Raises:
        RankError: what `judge` raised, on every rank; or a rank did not report in time, or the store is lost.

    """
    store = members.store
    if store is None:
        return judge([report])
    # Rank 0 names the ranks that are late, so it gets the time to do so.
    return within(timeout + _WAIT, lambda: _settle(report, judge, members, store, timeout, of))


def _settle(
    report: Report,
    judge: Callable[[Sequence[Report]], Verdict],
    members: Members,
    store: Store,
    timeout: timedelta,
    of: str,
) -> Verdict:
    keys = [f"report/{rank}" for rank in range(members.world_size)]
    store.set(keys[members.rank], _as_text(report))
    deadline = time.monotonic() + timeout.total_seconds()
    verdict: Verdict | None
    message: str | None = None
    if members.rank == 0:
        try:
            verdict = judge([_get(store, key, rank, deadline, of) for rank, key in enumerate(keys)])
        except Exception as error:  # raised on all ranks below
            verdict, message = None, one_line(error)
        store.set("verdict", _as_text((verdict, message)))
    else:
        verdict, message = _get(store, "verdict", 0, deadline + _WAIT.total_seconds(), of)
    if message is not None:
        raise RankError(message)
    return cast(Verdict, verdict)


def _as_text(value: object) -> str:
    return pickle.dumps(value).hex()  # stores take strings


def _get(store: Store, key: str, rank: int, deadline: float, of: str) -> Any:
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            store.wait([key], min(_WAIT, left))
            return pickle.loads(bytes.fromhex(store.get(key).decode()))
        except RuntimeError as error:
            reason = first_line(error)
        store.check([key])  # raises if the store is lost
        if time.monotonic() >= deadline:
            raise RankError(
                f"rank {rank} has not created its {of} in time ({reason}); create one on every rank of the group, "
                "in the same order, or raise timeout"
            )
