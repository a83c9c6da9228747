"""`create_alike`: what ranks create on their own, compared when it is created, through the store of a process group."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from evenrank.core.errors import ConfigError, RankError, one_line
from evenrank.dataloader.balance.control.consistency import check_settings, raise_reported_errors
from evenrank.dataloader.balance.control.process_group import Group, Members, members_of
from evenrank.dataloader.balance.control.settle import settle
from evenrank.dataloader.protocols import HasIdentity

Created = TypeVar("Created", bound=HasIdentity)


class _Report(NamedTuple):
    """What a rank tells the others."""

    error: str | None
    identity: Mapping[str, Any]


def create_alike(
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
        identity = dict(created.identity())
    except Exception as raised:  # reported to all ranks
        error = raised
    report = _Report(None if error is None else one_line(error), identity)
    try:
        settle(report, _judge, members, timeout, of="loader")
    except RankError:
        if error is not None:
            raise error from None
        raise
    assert created is not None
    return created


def _judge(reports: Sequence[_Report]) -> None:
    raise_reported_errors([report.error for report in reports])
    check_settings([report.identity for report in reports])
