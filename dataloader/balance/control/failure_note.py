"""Why a rank left: written to the group's store by the first rank that fails alone, read by those that then lose it."""

import contextlib
from datetime import timedelta

from evenrank.core.errors import one_line
from evenrank.dataloader.balance.control.deadline import within
from evenrank.dataloader.balance.control.process_group import Members

_KEY = "reason"
_WAIT = timedelta(seconds=2)


class FailureNote:
    """A note that all ranks share.

    Args:
        members: the ranks.

    """

    def __init__(self, members: Members) -> None:
        self._rank = members.rank
        self._store = None if members.store is None else members.substore("failure")

    def write(self, error: Exception) -> None:
        """Leave the reason, unless another rank has left one before."""
        if (store := self._store) is not None:
            # The store is lost if the process that serves it is; then there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                within(_WAIT, lambda: store.compare_set(_KEY, "", f"rank {self._rank} failed: {one_line(error)}"))

    def read(self) -> str | None:
        """Return the reason of the first rank that failed; None if none has left one."""
        if (store := self._store) is None:
            return None

        def read() -> str:
            store.wait([_KEY], _WAIT)
            return store.get(_KEY).decode()

        try:
            return within(_WAIT, read)
        except RuntimeError:
            return None
