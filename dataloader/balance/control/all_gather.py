"""All-gathers of small metadata messages over Gloo, flat or hierarchical: one equally sized message from each rank."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.dataloader.balance.control.process_group import FailFastGroup, Members

# Above this number of ranks the all-gather is hierarchical: a ring over all ranks takes as many hops as ranks.
MAX_RANKS_OF_FLAT_ALL_GATHER = 512


class MetadataAllGather(ABC):
    """An all-gather of messages on the CPU."""

    @abstractmethod
    def all_gather(self, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the messages of all ranks, uint8 [W, n], given this rank's, uint8 [n].

        Collective: every rank must call this, with a message of the same size.
        """

    @abstractmethod
    def close(self) -> None:
        """Destroy the process groups; closing twice does nothing."""


class SingleRankAllGather(MetadataAllGather):
    """The only rank."""

    def all_gather(self, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the message as uint8 [1, n]."""
        return message[np.newaxis]

    def close(self) -> None:
        """Do nothing."""


class FlatAllGather(MetadataAllGather):
    """One all-gather over all ranks."""

    def __init__(self, members: Members, timeout: timedelta) -> None:
        self._group = FailFastGroup(members.substore("control"), members.rank, members.world_size, timeout)

    def all_gather(self, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the messages of all ranks: uint8 [W, n]."""
        return _all_gather(message, self._group)

    def close(self) -> None:
        """Destroy the process group."""
        self._group.close()


class HierarchicalAllGather(MetadataAllGather):
    """Within each host, then between the first ranks of the hosts, then a broadcast within each host.

    Args:
        members: all ranks.
        hosts: the host name of each rank.
        timeout: how long a collective waits for other ranks.

    """

    def __init__(self, members: Members, hosts: Sequence[str], timeout: timedelta) -> None:
        self._ranks_by_host = [
            [rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)
        ]
        host = next(index for index, ranks in enumerate(self._ranks_by_host) if members.rank in ranks)
        ranks_of_host = self._ranks_by_host[host]
        self._host_group = FailFastGroup(
            members.substore(f"control/host {host}"), ranks_of_host.index(members.rank), len(ranks_of_host), timeout
        )
        self._leader_group: FailFastGroup | None = None  # on the first rank of each host
        if members.rank == ranks_of_host[0]:
            self._leader_group = FailFastGroup(
                members.substore("control/leaders"), host, len(self._ranks_by_host), timeout
            )

    def all_gather(self, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the messages of all ranks: uint8 [W, n]."""
        messages_of_host = _all_gather(message, self._host_group)
        world_size = sum(len(ranks) for ranks in self._ranks_by_host)
        messages = np.empty((world_size, len(message)), dtype=np.uint8)
        if self._leader_group is not None:
            # Hosts may have different numbers of ranks, but the messages of an all-gather have one size.
            max_ranks = max(len(ranks) for ranks in self._ranks_by_host)
            padded = np.zeros((max_ranks, len(message)), dtype=np.uint8)
            padded[: len(messages_of_host)] = messages_of_host
            by_host = _all_gather(padded.reshape(-1), self._leader_group).reshape(-1, max_ranks, len(message))
            for ranks, of_host in zip(self._ranks_by_host, by_host, strict=True):
                messages[ranks] = of_host[: len(ranks)]
        self._host_group.broadcast(torch.from_numpy(messages), root=0)
        return messages

    def close(self) -> None:
        """Destroy the process groups."""
        self._host_group.close()
        if self._leader_group is not None:
            self._leader_group.close()


def make_all_gather(members: Members, hosts: Sequence[str] | None, timeout: timedelta) -> MetadataAllGather:
    """Return the all-gather for these ranks. Collective: every rank must call this.

    Args:
        members: the ranks.
        hosts: the host name of each rank, for a hierarchical all-gather; None: a flat one.
        timeout: how long a collective waits for other ranks.

    """
    if members.store is None:
        return SingleRankAllGather()
    return FlatAllGather(members, timeout) if hosts is None else HierarchicalAllGather(members, hosts, timeout)


def all_gather_objects(gather: MetadataAllGather, value: Any) -> list[Any]:
    """Return the values of all ranks, any picklable objects. Collective: every rank must call this."""
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    num_bytes = gather.all_gather(np.array([len(data)]).view(np.uint8)).view(np.int64)[:, 0]
    padded = np.zeros(int(num_bytes.max()), dtype=np.uint8)
    padded[: len(data)] = data
    messages = gather.all_gather(padded)
    return [pickle.loads(message[:size].tobytes()) for message, size in zip(messages, num_bytes, strict=True)]


def _all_gather(message: NDArray[np.uint8], group: FailFastGroup) -> NDArray[np.uint8]:
    messages = torch.empty((group.world_size, len(message)), dtype=torch.uint8, device="cpu")
    # Copied because torch warns of arrays that are not writable, such as those of a pickle.
    group.all_gather(list(messages), torch.from_numpy(message.copy()))
    gathered: NDArray[np.uint8] = messages.numpy()
    return gathered
