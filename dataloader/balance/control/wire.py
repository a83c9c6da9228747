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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.batch_schema import BatchSchema

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
