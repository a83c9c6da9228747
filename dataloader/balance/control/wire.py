"""What a rank tells the others in each step: a fixed header, then the cost and the lengths of its samples.

All of it is one run of bytes of a size that follows from the batches' schema, so gathering it needs no size first:

    header    8 x int64    schema hash, status, ended, num_real, epoch, step, position, data
    costs     B x int64
    lengths   K x B int32  in schema order
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.batch import BatchSchema

_HEADER_WORDS = 8
HEADER_BYTES = 8 * _HEADER_WORDS

STATUS_OK = 0
STATUS_FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The fixed part; the fields are the words in their order."""

    schema_hash: int
    status: int  # STATUS_OK or STATUS_FAILED
    ended: int  # 1 once the rank's data have run out
    num_real: int
    epoch: int = 0
    step: int = 0
    position: int = 0
    data: int = 0  # hash of what the loader says of itself; it may change when a state is loaded

    def words(self) -> NDArray[np.int64]:
        """Return the header as int64 [8]."""
        return np.array([getattr(self, name) for name in _WORDS], dtype=np.int64)


_WORDS = Header.__slots__


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """The messages of all ranks."""

    headers: NDArray[np.int64]  # [W, 8]
    costs: NDArray[np.int64]  # [W, B]
    lengths: NDArray[np.int64]  # [W, K, B]

    def header(self, name: str) -> NDArray[np.int64]:
        """Return one word of all ranks' headers: int64 [W]."""
        return self.headers[:, _WORDS.index(name)]

    @property
    def num_real(self) -> NDArray[np.int64]:
        """Samples of each rank: int64 [W]."""
        return self.header("num_real")


def hash63(value: object) -> int:
    """Hash what a value's `repr` says to 63 bits, the same in all processes."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def encode(
    header: Header, schema: BatchSchema, costs: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return one rank's message: uint8 [message size].

    Args:
        header: its fixed part.
        schema: of the batches; gives K and B.
        costs: int64 [B].
        lengths: int64 [K, B], each below 2^31.

    """
    assert costs.shape == (schema.batch_size,)
    assert lengths.shape == (len(schema.jagged_keys), schema.batch_size)
    parts = (header.words(), costs.astype(np.int64), lengths.astype(np.int32))
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def decode(messages: NDArray[np.uint8], schema: BatchSchema) -> StepSizes:
    """Read the messages of all ranks: uint8 [W, message size]."""
    world_size, batch_size = len(messages), schema.batch_size
    lengths_at = HEADER_BYTES + 8 * batch_size
    lengths = messages[:, lengths_at:].copy().view(np.int32)
    return StepSizes(
        headers=messages[:, :HEADER_BYTES].copy().view(np.int64),
        costs=messages[:, HEADER_BYTES:lengths_at].copy().view(np.int64),
        lengths=lengths.reshape(world_size, len(schema.jagged_keys), batch_size).astype(np.int64),
    )
