"""Small messages from all ranks to all ranks, on the CPU: one run of bytes from each, of the same size."""

import pickle
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenrank.dataloader.balance.control.process_group import Channel

# With more ranks than this, messages go by host: a ring of all ranks takes as many hops as there are ranks.
_RANKS_OF_A_FLAT_GATHER = 512


class Gather(Protocol):
    """A way to tell all ranks something."""

    def messages(self, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the messages of all ranks, uint8 [W, n], given this rank's, uint8 [n]. All ranks call it alike."""
        ...

    def close(self) -> None:
        """End its process groups."""
        ...


class Alone:
    """There is no other rank."""

    def messages(self, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the one message: uint8 [1, n]."""
        return mine[np.newaxis]

    def close(self) -> None:
        """Do nothing."""


class FlatGather:
    """One all-gather of all ranks."""

    def __init__(self, timeout: timedelta) -> None:
        self._channel = Channel(timeout)

    def messages(self, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the messages of all ranks: uint8 [W, n]."""
        return _all_gather(mine, self._channel)

    def close(self) -> None:
        """End the process group."""
        self._channel.close()


class HostGather:
    """From the ranks of each host to its first one, between those, and back to the ranks of each host.

    Args:
        hosts: of each rank, by any name.
        timeout: how long a rank waits for the others.

    """

    def __init__(self, hosts: Sequence[str], timeout: timedelta) -> None:
        self._ranks = [[rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]
        me = dist.get_rank()
        self._mine = next(ranks for ranks in self._ranks if me in ranks)
        # All ranks make all groups, in this order.
        self._channels = [Channel(timeout, ranks) for ranks in self._ranks]
        self._within = self._channels[self._ranks.index(self._mine)]
        self._between = Channel(timeout, [ranks[0] for ranks in self._ranks])

    def messages(self, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the messages of all ranks: uint8 [W, n]."""
        of_host = _all_gather(mine, self._within)
        world_size = sum(len(ranks) for ranks in self._ranks)
        messages = np.empty((world_size, len(mine)), dtype=np.uint8)
        if self._mine[0] == dist.get_rank():
            # Hosts may have different numbers of ranks, and messages of a gather are of one size.
            most = max(len(ranks) for ranks in self._ranks)
            padded = np.zeros((most, len(mine)), dtype=np.uint8)
            padded[: len(of_host)] = of_host
            of_hosts = _all_gather(padded.reshape(-1), self._between).reshape(-1, most, len(mine))
            for ranks, host in zip(self._ranks, of_hosts, strict=True):
                messages[ranks] = host[: len(ranks)]
        with self._within.watched():
            dist.broadcast(torch.from_numpy(messages), src=self._mine[0], group=self._within.group)
        return messages

    def close(self) -> None:
        """End the process groups."""
        for channel in (*self._channels, self._between):
            channel.close()


def make_gather(timeout: timedelta) -> Gather:
    """Choose a way for the ranks of the default process group; all of them call it alike."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    world_size = dist.get_world_size()
    if world_size <= _RANKS_OF_A_FLAT_GATHER:
        return FlatGather(timeout)
    hosts = [""] * world_size
    dist.all_gather_object(hosts, _host())
    return HostGather(hosts, timeout)


def gather_objects(gather: Gather, mine: Any) -> list[Any]:
    """Return what each rank passes: any objects that can be pickled."""
    data = np.frombuffer(pickle.dumps(mine), dtype=np.uint8)
    sizes = gather.messages(np.array([len(data)]).view(np.uint8)).view(np.int64)[:, 0]
    padded = np.zeros(int(sizes.max()), dtype=np.uint8)
    padded[: len(data)] = data
    rows = gather.messages(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _host() -> str:
    return socket.gethostname()


def _all_gather(mine: NDArray[np.uint8], channel: Channel) -> NDArray[np.uint8]:
    with channel.watched():
        messages = torch.empty((dist.get_world_size(channel.group), len(mine)), dtype=torch.uint8)
        # A copy, because what is read from a pickle cannot be written to, which torch warns of.
        dist.all_gather(list(messages), torch.from_numpy(mine.copy()), group=channel.group)
    gathered: NDArray[np.uint8] = messages.numpy()
    return gathered
