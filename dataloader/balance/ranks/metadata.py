"""The wire format of a step's metadata: a fixed header, then cost, tokens and lengths of a rank's samples.

Its size follows from the batches' schema, so it is all-gathered without exchanging sizes first:

    header    9 x int64    schema hash, status, ended, num_real, num_rows, epoch, step, position, loader hash
    costs     B x int64
    tokens    B x int32
    lengths   K x B int32  in schema order

It has everything that planning depends on. What a user's function computes, such as costs and tokens, is sent rather
than computed again by every rank, because the functions of two ranks may differ.
"""

import dataclasses
import hashlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members
from evenrank.dataloader.batches.schema import BatchSchema

_HEADER_WORDS = 9
HEADER_BYTES = 8 * _HEADER_WORDS

STATUS_OK = 0
STATUS_FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The fixed part of a message; its fields in order are the words."""

    schema_hash: int
    """Hash of the batches' schema."""

    status: int
    """STATUS_OK or STATUS_FAILED."""

    ended: int
    """1 once the rank has no more batches, else 0."""

    num_real: int
    """Samples of the rank in this step."""

    num_rows: int = 0
    """Rows of the rank's batch before padding; if it has more than the schema, the message lacks its samples."""

    epoch: int = 0
    """Epoch of the rank's batch."""

    step: int = 0
    """Step of the rank's batch."""

    position: int = 0
    """Position of the rank's batch in the epoch."""

    loader_hash: int = 0
    """Hash of the loader's identity, which can change when a state is loaded."""

    def words(self) -> NDArray[np.int64]:
        """Return the header as int64 [9]."""
        return np.array([getattr(self, name) for name in _WORDS], dtype=np.int64)


_WORDS = tuple(entry.name for entry in dataclasses.fields(Header))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetadata:
    """The messages of all ranks in a step. W ranks, B rows per rank, K jagged keys."""

    headers: NDArray[np.int64]
    """[W, 9]."""

    costs: NDArray[np.int64]
    """[W, B], 0 for padding."""

    tokens: NDArray[np.int64]
    """[W, B], 0 for padding."""

    lengths: NDArray[np.int64]
    """[W, K, B], 0 for padding."""

    messages: NDArray[np.uint8]
    """[W, message size]: all of this as it was received."""

    def header(self, name: str) -> NDArray[np.int64]:
        """Return one word of all ranks' headers: int64 [W]."""
        return self.headers[:, _WORDS.index(name)]

    @property
    def num_real(self) -> NDArray[np.int64]:
        """Samples of each rank: int64 [W]."""
        return self.header("num_real")


def hash63(value: object) -> int:
    """Return a 63-bit hash of a value's `repr`, the same in all processes."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def encode(
    header: Header,
    schema: BatchSchema,
    *,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Return the message of a rank: uint8 [message size].

    Args:
        header: the fixed part.
        schema: of the batches; gives K and B.
        costs: int64 [B].
        tokens: int64 [B], each below 2^31.
        lengths: int64 [K, B], each below 2^31.

    """
    assert costs.shape == tokens.shape == (schema.batch_size,)
    assert lengths.shape == (len(schema.jagged_keys), schema.batch_size)
    parts = (header.words(), costs.astype(np.int64), tokens.astype(np.int32), lengths.astype(np.int32))
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def decode(messages: NDArray[np.uint8], schema: BatchSchema) -> StepMetadata:
    """Return the metadata in the messages of all ranks: uint8 [W, message size]."""
    world_size, batch_size = len(messages), schema.batch_size
    costs_start = HEADER_BYTES
    tokens_start = costs_start + 8 * batch_size
    lengths_start = tokens_start + 4 * batch_size
    lengths = messages[:, lengths_start:].copy().view(np.int32)
    return StepMetadata(
        headers=messages[:, :costs_start].copy().view(np.int64),
        costs=messages[:, costs_start:tokens_start].copy().view(np.int64),
        tokens=messages[:, tokens_start:lengths_start].copy().view(np.int32).astype(np.int64),
        lengths=lengths.reshape(world_size, len(schema.jagged_keys), batch_size).astype(np.int64),
        messages=messages,
    )


# All-gathers of small metadata messages over Gloo, flat or hierarchical: one equally sized message from each rank.


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
