"""What ranks handshake before any process group is created: through the store, by rank 0, with one verdict for all.

A rank whose arguments are invalid, or differ from those of the others, would otherwise leave the others waiting in the
creation of a group. The store needs neither a device nor a backend.
"""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

from torch.distributed.distributed_c10d import Store

from evenrank.core.errors import ConfigError, RankError, first_line, one_line
from evenrank.dataloader.balance.ranks.consistency import check_settings, raise_reported_errors
from evenrank.dataloader.balance.ranks.process_group import Group, Members, members_of, within
from evenrank.dataloader.state.node import HasRankInvariants

Report = TypeVar("Report")
Verdict = TypeVar("Verdict")

_WAIT = timedelta(seconds=10)  # at a time, because a client of a TCPStore serves no other thread while it waits


def handshake(
    report: Report,
    validate: Callable[[Sequence[Report]], Verdict],
    members: Members,
    timeout: timedelta,
    *,
    of: str = "Balancer",
) -> Verdict:
    """Return what `validate` makes of the reports of all ranks. Collective: every rank must call this.

    Args:
        report: of this rank; picklable.
        validate: called on rank 0 with the reports in rank order; what it returns is picklable.
        members: the ranks.
        timeout: how long to wait for other ranks.
        of: what every rank creates, for the message if one has not.

    Raises:
        RankError: what `validate` raised, on every rank; or a rank did not report in time, or the store is lost.

    """
    store = members.store
    if store is None:
        return validate([report])
    # Rank 0 names the ranks that are late, so it gets the time to do so.
    return within(timeout + _WAIT, lambda: _settle(report, validate, members, store, timeout, of))


def _settle(
    report: Report,
    validate: Callable[[Sequence[Report]], Verdict],
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
            verdict = validate([_get(store, key, rank, deadline, of) for rank, key in enumerate(keys)])
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


# `create_on_all_ranks`: objects that ranks create on their own, compared through the store.


Created = TypeVar("Created", bound=HasRankInvariants)


class _Report(NamedTuple):
    """What a rank tells the others."""

    error: str | None
    identity: Mapping[str, Any]


def create_on_all_ranks(
    make: Callable[[Members], Created], *, group: Group | None, world_size: int, timeout: timedelta
) -> Created:
    """Return what `make` returns, if it does on all ranks, with the same identity.

    Collective: every rank must call this; without a process group, it only calls `make`.

    Args:
        make: creates a loader, given the ranks.
        group: of the ranks; None: the default process group or, without one, none.
        world_size: for which the loader is created.
        timeout: how long to wait for other ranks.

    Raises:
        ConfigError: the group has another number of ranks.
        RankError: `make` raised on another rank, or identities differ.
        Exception: what `make` raised on this rank.

    """
    members = members_of(group, timeout, "loader")
    if members.store is None:
        return make(members)
    created, error, identity = None, None, {}
    try:
        if members.world_size != world_size:
            raise ConfigError(
                f"the loader is created for world_size {world_size}, but {members.world_size} ranks would balance "
                "together; pass the data-parallel ranks as group, and their number as world_size"
            )
        created = make(members)
        identity = dict(created.rank_invariants())
    except Exception as raised:  # reported to all ranks
        error = raised
    report = _Report(None if error is None else one_line(error), identity)
    try:
        handshake(report, _judge, members, timeout, of="loader")
    except RankError:
        if error is not None:
            raise error from None
        raise
    assert created is not None
    return created


def _judge(reports: Sequence[_Report]) -> None:
    raise_reported_errors([report.error for report in reports])
    check_settings([report.identity for report in reports])
