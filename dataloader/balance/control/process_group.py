"""A process group of our own that ends for all of its ranks when one of them is lost."""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from evenrank.core.errors import RankError


def is_distributed() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank in the default process group and its size; 0 and 1 without one."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


class Channel:
    """A group of Gloo or NCCL; all ranks of the default group make it alike, those that are not in it too.

    When a rank is lost, only its neighbours in a collective notice, and Gloo's connections end with the last reference
    to their group, not before. So a rank that notices lets go of the group at once, and its neighbours notice in turn.
    Callers keep the channel, and never the group.

    Args:
        timeout: how long a rank waits for the others.
        ranks: that are in the group; None: all.
        backend: `gloo` or `nccl`.

    """

    def __init__(self, timeout: timedelta, ranks: Sequence[int] | None = None, backend: str = "gloo") -> None:
        self.group: dist.ProcessGroup | None = dist.new_group(
            None if ranks is None else list(ranks), backend=backend, timeout=timeout
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Turn what the backend says when a rank has gone, or does not answer in time, into one line.

        Raises:
            RankError: that line.

        """
        if self.group is None:
            raise RankError("a rank has gone, or does not answer (as an earlier error said); look for its own error")
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            traceback.clear_frames(error.__traceback__)  # they hold the group
            self.close()
            raise RankError(f"a rank has gone, or does not answer ({reason}); look for its own error") from None

    def close(self) -> None:
        """End the group; closing twice does nothing."""
        group, self.group = self.group, None
        # It has ended already if the default group has; and a rank that is not in it has no group.
        if isinstance(group, dist.ProcessGroup) and dist.is_initialized():
            dist.destroy_process_group(group)
