"""Which ranks have arrived at the latest heartbeat, as far as they have published it in the store of their group."""

import contextlib
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from evenrank.dataloader.balance.control.deadline import within
from evenrank.dataloader.balance.control.process_group import Members

STORE_TIMEOUT = timedelta(seconds=5)
_NAMED_RANKS = 16  # of those that have not arrived; the others are counted


class Arrivals:
    """How many heartbeats each rank has had, as far as the ranks have published it. All methods are for one thread.

    Args:
        members: the ranks.

    """

    def __init__(self, members: Members) -> None:
        self.rank = members.rank
        self._world_size = members.world_size
        self._shared = None if members.store is None else members.substore("heartbeats")
        self._store: Store | None = None
        self._published = 0

    def publish(self, count: int) -> None:
        """Publish the heartbeats of this rank, if there are new ones."""
        if (shared := self._shared) is None or count == self._published:
            return
        # The store is lost if the process that serves it is; then there is nobody to tell.
        try:
            if self._store is None:
                # A connection of its own: training may wait in the other one, which serves one thread at a time.
                self._store = within(STORE_TIMEOUT, lambda: shared.clone())  # type: ignore[attr-defined]
            store = self._store
            within(STORE_TIMEOUT, lambda: store.set(str(self.rank), str(count)))
            self._published = count
        except RuntimeError:
            self._shared = self._store = None

    def line(self, count: int) -> str | None:
        """Return which ranks are behind, given the heartbeats of this one; None if there is nobody to ask."""
        if (store := self._store) is None:
            return None
        with contextlib.suppress(RuntimeError):
            # Adding nothing reads a number without waiting for a rank that has not published one.
            counts = within(STORE_TIMEOUT, lambda: [store.add(str(rank), 0) for rank in range(self._world_size)])
            counts[self.rank] = count
            return arrivals_line(counts)
        return None


def arrivals_line(counts: Sequence[int]) -> str:
    """Describe which ranks have not arrived at the latest heartbeat.

    Args:
        counts: heartbeats of each rank.

    """
    latest = max(counts)
    behind = [f"{rank} (at {count:,})" for rank, count in enumerate(counts) if count < latest]
    if not behind:
        return f"all {len(counts)} ranks have arrived at heartbeat {latest:,}"
    named = ", ".join(behind[:_NAMED_RANKS])
    if len(behind) > _NAMED_RANKS:
        named += f" and {len(behind) - _NAMED_RANKS} more"
    return f"{len(behind)} of {len(counts)} ranks have not arrived at heartbeat {latest:,}: {named}"
