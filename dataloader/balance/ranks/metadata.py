"""The wire format of the metadata of steps, and the all-gather that brings every rank the messages of all.

A message is of up to 8 steps. Its size follows from the batches' schema alone, so it is all-gathered without exchanging
sizes first, also between ranks that are out of step. Of each step it has

    header    10 x int64   schema hash, status, ended, num_real, started, epoch, step, position, hashes of loader, plan
    costs     B x int64
    tokens    B x int32
    lengths   K x B int32  in schema order

A message has everything that planning depends on. Results of users' functions, such as costs and tokens, are sent
rather than computed again by every rank, because the functions of two ranks may differ.
"""

import functools
import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members
from evenrank.dataloader.batches.schema import BatchSchema

MAX_STEPS = 8
"""Steps of a message: an all-gather takes about as long for 8 as for one."""


class Header(NamedTuple):
    """The fixed part of a message, in words of int64."""

    schema_hash: int  # hash of the batches' schema
    status: int = 0  # 1 if the rank failed, else 0
    ended: int = 0  # 1 once the rank has no more batches, else 0
    num_real: int = 0  # samples in this step
    started: int = 1  # 0 after the last step of the message
    epoch: int = 0
    step: int = 0
    position: int = 0  # in the epoch
    loader_hash: int = 0  # hash of the loader's identity, which can change when a state is loaded
    plan_hash: int = 0  # of the batch, if it has one


HEADER = {name: index for index, name in enumerate(Header._fields)}
"""Index of each word of a header."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What all ranks have sent of a step. W ranks, B rows per rank, K jagged keys."""

    headers: NDArray[np.int64]  # [W, 10]
    costs: NDArray[np.int64]  # [W, B], 0 for padding
    tokens: NDArray[np.int64]  # [W, B], 0 for padding
    lengths: NDArray[np.int64]  # [W, K, B], 0 for padding

    def header(self, name: str) -> NDArray[np.int64]:
        """Return one word of all ranks' headers: int64 [W]."""
        return self.headers[:, HEADER[name]]

    def common(self, name: str) -> int:
        """Return a word that is the same on all ranks that still have batches; some rank must have."""
        return int(self.header(name)[np.argmin(self.header("ended"))])

    @property
    def num_real(self) -> NDArray[np.int64]:
        """Samples of each rank: int64 [W]."""
        return self.header("num_real")


def hash63(value: object) -> int:
    """Return a 63-bit hash of a value's `repr`, the same in all processes."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def encode(
    headers: Sequence[Header],
    schema: BatchSchema,
    costs: NDArray[np.int64],
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Return a rank's message, uint8, given the headers, costs [n, B], tokens [n, B] and lengths [n, K, B] of n steps.

    There are at most MAX_STEPS. Tokens and lengths are below 2^31.
    """
    message = np.zeros(MAX_STEPS, dtype=_step_type(schema.batch_size, len(schema.jagged_keys)))
    started, others = message[: len(headers)], message[len(headers) :]
    started["header"], started["costs"], started["tokens"], started["lengths"] = headers, costs, tokens, lengths
    others["header"] = Header(0, started=0)
    return message.view(np.uint8)


def decode(messages: NDArray[np.uint8], schema: BatchSchema) -> list[StepMetadata]:
    """Return the steps that some rank has started, given the messages of all ranks: uint8 [W, message size]."""
    steps = np.ascontiguousarray(messages).view(_step_type(schema.batch_size, len(schema.jagged_keys))).T  # [steps, W]
    is_started = steps["header"][..., HEADER["started"]].any(axis=1)
    names = ("header", "costs", "tokens", "lengths")
    fields = (np.ascontiguousarray(steps[: is_started.sum()][name], dtype=np.int64) for name in names)
    return [StepMetadata(headers, *arrays) for headers, *arrays in zip(*fields, strict=True)]


@functools.lru_cache
def _step_type(batch_size: int, num_keys: int) -> np.dtype[np.void]:
    header, lengths = ("header", "i8", (len(Header._fields),)), ("lengths", "i4", (num_keys, batch_size))
    return np.dtype([header, ("costs", "i8", (batch_size,)), ("tokens", "i4", (batch_size,)), lengths])


class MetadataAllGather:
    """All-gathers of equally sized messages on the CPU, over Gloo.

    Collective: every rank must call the constructor.
    """

    def __init__(self, members: Members, timeout: timedelta) -> None:
        self._group: FailFastGroup | None = None  # None if there is only one rank
        if members.store is not None:
            self._group = FailFastGroup(members.substore("metadata"), members.rank, members.world_size, timeout)

    def all_gather(self, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the messages of all ranks, uint8 [W, n], given this rank's, uint8 [n].

        Collective: every rank must call this, with a message of the same size.
        """
        if self._group is None:
            return message[np.newaxis]
        messages = torch.empty((self._group.world_size, len(message)), dtype=torch.uint8, device="cpu")
        # Copied because torch warns of arrays that are not writable, such as those of a pickle.
        self._group.all_gather(list(messages), torch.from_numpy(message.copy()))
        gathered: NDArray[np.uint8] = messages.numpy()
        return gathered

    def close(self) -> None:
        """Destroy the process group; closing twice does nothing."""
        if self._group is not None:
            self._group.close()


def all_gather_objects(gather: MetadataAllGather, value: Any) -> list[Any]:
    """Return the values of all ranks, any picklable objects. Collective: every rank must call this."""
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    num_bytes = gather.all_gather(np.array([len(data)]).view(np.uint8)).view(np.int64)[:, 0]
    padded = np.zeros(int(num_bytes.max()), dtype=np.uint8)
    padded[: len(data)] = data
    messages = gather.all_gather(padded)
    return [pickle.loads(message[:size].tobytes()) for message, size in zip(messages, num_bytes, strict=True)]
