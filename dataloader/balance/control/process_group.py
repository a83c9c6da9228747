"""A process group that is torn down on every rank when one rank fails."""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from evenrank.core.errors import RankError, first_line


def is_distributed() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank in the default process group and its size; 0 and 1 without one."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


class FailFastGroup:
    """A process group of its own, Gloo or NCCL, that ends on all ranks within seconds when one of them is lost.

    When a rank is lost, only its neighbors in a collective notice; the others would wait for the timeout. Gloo closes
    its connections when the last reference to the group is dropped. So a rank that notices drops the group at once,
    its neighbors notice in turn, and so on. For this to work, callers must keep the FailFastGroup and never its
    `process_group` in a variable, because a traceback would keep that reference alive.

    Collective: every rank of the default group must create it, also ranks that are not in `ranks`.

    Args:
        timeout: how long a collective waits for other ranks.
        ranks: ranks of the group; None: all.
        backend: `gloo` or `nccl`.

    """

    def __init__(self, timeout: timedelta, ranks: Sequence[int] | None = None, backend: str = "gloo") -> None:
        group = dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=timeout)
        # A rank outside the group gets a number instead, and never uses it.
        self.process_group = group if isinstance(group, dist.ProcessGroup) else None

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an error of a collective into one line, and tear down the group.

        Raises:
            RankError: a rank is lost or did not answer in time, now or in an earlier collective.

        """
        if self.process_group is None:
            raise RankError("a rank is lost or does not respond, as an earlier error reported; see its own error")
        try:
            yield
        except RuntimeError as error:
            reason = first_line(error)
            traceback.clear_frames(error.__traceback__)  # they refer to the process group
            self.close()
            raise RankError(f"a rank is lost or does not respond ({reason}); see its own error") from None

    def close(self) -> None:
        """Destroy the process group; closing twice does nothing."""
        process_group, self.process_group = self.process_group, None
        # Destroying the default group has destroyed this one already.
        if process_group is not None and dist.is_initialized():
            dist.destroy_process_group(process_group)
