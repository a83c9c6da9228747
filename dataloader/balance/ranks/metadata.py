"""The wire format of the metadata of steps, and the all-gather that brings every rank the messages of all.

A message is of up to 8 steps. Its size follows from the batches' schema alone, so it is all-gathered without exchanging
sizes first, also between ranks that are out of step. Of each step it has

    header    11 x int64   see `HEADER`
    costs     B x int64    0 for padding, as the next ones
    tokens    B x int32
    lengths   K x B int32  in schema order

A message has everything that planning depends on. Results of users' functions, such as costs and tokens, are sent
rather than computed again by every rank, because the functions of two ranks may differ.
"""

import functools
import hashlib
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import MAX_STEPS
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup
from evenrank.dataloader.batches.schema import BatchSchema

HEADER = (
    "schema_hash",  # of the batches
    "status",  # 1 if the rank failed, else 0
    "ended",  # 1 once the rank has no more batches, else 0
    "num_real",  # samples in this step
    "started",  # 1; 0 after the last step of the message
    "epoch",
    "step",
    "position",  # in the epoch
    "loader_hash",  # of the loader's identity, which can change when a state is loaded
    "plan_hash",  # of the batch, if it has one
    "cost_decisions",  # by which rank 0 may have changed the cost of the steps after these
)

StepMetadata = NDArray[np.void]
"""What W ranks have sent of a step: [W], with a field for each word of the header, `costs`, `tokens` and `lengths`."""


def new_message(schema: BatchSchema) -> StepMetadata:
    """Return a rank's message of no steps, [MAX_STEPS]; tokens and lengths must be below 2^31."""
    return np.zeros(MAX_STEPS, dtype=_step_type(schema.batch_size, len(schema.jagged_keys)))


def started_steps(messages: NDArray[np.uint8], schema: BatchSchema) -> StepMetadata:
    """Return the n steps that some rank has started, [n, W], given the messages of all ranks: uint8 [W, bytes]."""
    steps = np.ascontiguousarray(messages).view(_step_type(schema.batch_size, len(schema.jagged_keys))).T
    return steps[: steps["started"].any(axis=1).sum()]


@functools.lru_cache
def _step_type(batch_size: int, num_keys: int) -> np.dtype[np.void]:
    rows = [("costs", "i8", (batch_size,)), ("tokens", "i4", (batch_size,)), ("lengths", "i4", (num_keys, batch_size))]
    return np.dtype([*((name, "i8") for name in HEADER), *rows])


def common_word(step: StepMetadata, name: str) -> int:
    """Return a word of the headers that is the same on all ranks that still have batches; some rank must have."""
    return int(step[name][np.argmin(step["ended"])])


def hash63(data: bytes | memoryview) -> int:
    """Return a 63-bit hash, the same in all processes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def all_gather_bytes(group: FailFastGroup, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the messages of all ranks, uint8 [W, n], given this rank's, uint8 [n], over a group on the CPU.

    Collective: every rank must call this, with a message of the same size.
    """
    if group.is_alone:
        return message[np.newaxis]
    messages = torch.empty((group.world_size, len(message)), dtype=torch.uint8, device="cpu")
    # Copied because torch warns of arrays that are not writable, such as those of a pickle.
    group.all_gather(list(messages), torch.from_numpy(message.copy()))
    gathered: NDArray[np.uint8] = messages.numpy()
    return gathered


def all_gather_objects(group: FailFastGroup, value: Any) -> list[Any]:
    """Return the values of all ranks, any picklable objects. Collective: every rank must call this."""
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    num_bytes = all_gather_bytes(group, np.array([len(data)]).view(np.uint8)).view(np.int64)[:, 0]
    padded = np.zeros(int(num_bytes.max()), dtype=np.uint8)
    padded[: len(data)] = data
    messages = all_gather_bytes(group, padded)
    return [pickle.loads(message[:size].tobytes()) for message, size in zip(messages, num_bytes, strict=True)]
