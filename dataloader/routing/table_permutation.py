"""The rows of a table whose keys are assigned to the ranks round-robin, as long as each has rows left.

With b rows per range, N = f b + l: f ranks have b rows, the next one l < b, and others none. In the first l rounds
f + 1 ranks take a key each, in the others f.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.hashing import MIX_MULTIPLIERS, MIX_SHIFTS, mix_word
from evenrank.core.numba_cache import compiled
from evenrank.dataloader.routing.modes import rows_per_rank

if TYPE_CHECKING:
    from torch import Tensor


Words = TypeVar("Words", NDArray[np.int64], "Tensor")


class RoundRobin(NamedTuple):
    """The bijection between keys and rows, on int64 arrays or tensors of any shape."""

    range_rows: int
    """b."""
    full_ranks: int
    """f."""
    last_rows: int
    """l."""

    @classmethod
    def of(cls, num_embeddings: int, world_size: int) -> "RoundRobin":
        """Return the bijection of a table that is sharded over `world_size` ranks."""
        range_rows = rows_per_rank(num_embeddings, world_size)
        return cls(range_rows, *divmod(num_embeddings, range_rows))

    def rows(self, keys: Words) -> Words:
        """Return the row of each key."""
        late = keys - self._num_early
        early_rows = keys % (self.full_ranks + 1) * self.range_rows + keys // (self.full_ranks + 1)
        late_rows = late % self.full_ranks * self.range_rows + late // self.full_ranks + self.last_rows
        rows: Words = _where(late < 0, early_rows, late_rows)
        return rows

    def keys(self, rows: Words) -> Words:
        """Return the key of each row."""
        rank, turn = rows // self.range_rows, rows % self.range_rows
        late_keys = self._num_early + (turn - self.last_rows) * self.full_ranks + rank
        keys: Words = _where(turn < self.last_rows, turn * (self.full_ranks + 1) + rank, late_keys)
        return keys

    @property
    def _num_early(self) -> int:
        """Keys of the rounds in which f + 1 ranks take part."""
        return self.last_rows * (self.full_ranks + 1)


def _where(condition: Any, values: Any, others: Any) -> Any:
    return np.where(condition, values, others) if isinstance(values, np.ndarray) else values.where(condition, others)


# A permutation of the rows of a table of any size, in which every pattern of rows looks random.
#
# A keyed Feistel network on pairs (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). For N rows it
# takes A = 2^a, about the square root of N, and B = ceil(N / A). Keys and rows are pairs j < B, r < A:
#
#     key = j A + r
#     r += hash(j) mod A, j += hash(r) mod B, r += hash(j) mod A, j += hash(r) mod B
#     row = r B + j
#
# The rank that has a row depends on r, which is random after three rounds: with two, keys that collide in j would keep
# the distance of their r. Rows past the table's end, fewer than A of A B, are permuted again until they are within it
# (cycle walking).
#
# It depends on N alone: not on the number of ranks, so a table can be sharded over another number without moving rows.

# One for each round, so that they differ: the first hexadecimal digits of pi.
ROUND_KEYS = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89
CONSTANTS = *ROUND_KEYS, *MIX_MULTIPLIERS, *MIX_SHIFTS
"""Everything that the permutation depends on besides the number of rows."""


class Permutation(NamedTuple):
    """The bijection between keys and rows, on int64 arrays or tensors of any shape."""

    num_rows: int
    """N, from 1 to 2^62."""
    bits: int
    """a: A is 2^a."""
    size: int
    """B."""

    @classmethod
    def of(cls, num_rows: int) -> "Permutation":
        """Return the permutation of a table with `num_rows` rows."""
        bits = max(2, (num_rows - 1).bit_length()) // 2
        return cls(num_rows, bits, -(-num_rows >> bits))

    def rows(self, keys: Words) -> Words:
        """Return the row of each key."""
        if not isinstance(keys, np.ndarray):
            return _permute_tensor(keys, self)
        rows = np.array(keys, order="C")
        _permute(rows.reshape(-1), *self)
        return rows

    def keys(self, rows: Words) -> Words:
        """Return the key of each row."""
        if not isinstance(rows, np.ndarray):
            return _restore_tensor(rows, self)
        keys = np.array(rows, order="C")
        _restore(keys.reshape(-1), *self)
        return keys


@compiled
def _permute(rows: NDArray[np.int64], num_rows: int, bits: int, size: int) -> None:
    """Replace keys, each in 0..num_rows-1, by their rows, in place."""
    num_bits, num_first = np.uint64(bits), np.uint64(size)
    mask = (np.uint64(1) << num_bits) - np.uint64(1)
    for index in range(len(rows)):
        row = np.uint64(rows[index])
        while True:
            first, second = row >> num_bits, row & mask
            second = (second + _top_bits(first, 0, num_bits)) & mask
            first = _add(first, _scaled(second, 1, num_first), num_first)
            second = (second + _top_bits(first, 2, num_bits)) & mask
            first = _add(first, _scaled(second, 3, num_first), num_first)
            row = second * num_first + first
            if row < np.uint64(num_rows):
                break
        rows[index] = np.int64(row)


@compiled
def _restore(rows: NDArray[np.int64], num_rows: int, bits: int, size: int) -> None:
    """Replace rows by their keys, in place."""
    num_bits, num_first = np.uint64(bits), np.uint64(size)
    mask = (np.uint64(1) << num_bits) - np.uint64(1)
    for index in range(len(rows)):
        row = np.uint64(rows[index])
        while True:
            second, first = row // num_first, row % num_first
            first = _add(first, num_first - _scaled(second, 3, num_first), num_first)
            second = (second - _top_bits(first, 2, num_bits)) & mask
            first = _add(first, num_first - _scaled(second, 1, num_first), num_first)
            second = (second - _top_bits(first, 0, num_bits)) & mask
            row = (first << num_bits) | second
            if row < np.uint64(num_rows):
                break
        rows[index] = np.int64(row)


@compiled
def _top_bits(word: np.uint64, number: int, count: np.uint64) -> np.uint64:
    """Return the most significant bits of a word's hash in a round."""
    return mix_word(word ^ np.uint64(ROUND_KEYS[number])) >> (np.uint64(64) - count)


@compiled
def _scaled(word: np.uint64, number: int, size: np.uint64) -> np.uint64:
    """Return a word's hash in a round, scaled to 0..size-1; size is at most 2^31."""
    return (_top_bits(word, number, np.uint64(32)) * size) >> np.uint64(32)


@compiled
def _add(first: np.uint64, shift: np.uint64, size: np.uint64) -> np.uint64:
    """Return a sum modulo `size`, of which no summand is larger."""
    total = first + shift
    return total - size if total >= size else total


def _permute_tensor(keys: "Tensor", shape: Permutation) -> "Tensor":
    """Return the row of each key, as `_permute`."""
    _, bits, size = shape
    mask = (1 << bits) - 1
    first, second = keys >> bits, keys & mask
    second = (second + _top_bits_of(first, 0, bits)) & mask
    first = (first + _scaled_of(second, 1, size)) % size
    second = (second + _top_bits_of(first, 2, bits)) & mask
    first = (first + _scaled_of(second, 3, size)) % size
    return _walk(_permute_tensor, second * size + first, shape)


def _restore_tensor(rows: "Tensor", shape: Permutation) -> "Tensor":
    """Return the key of each row, as `_restore`."""
    _, bits, size = shape
    mask = (1 << bits) - 1
    second, first = rows // size, rows % size
    first = (first - _scaled_of(second, 3, size)) % size
    second = (second - _top_bits_of(first, 2, bits)) & mask
    first = (first - _scaled_of(second, 1, size)) % size
    second = (second - _top_bits_of(first, 0, bits)) & mask
    return _walk(_restore_tensor, (first << bits) | second, shape)


def _walk(function: Callable[["Tensor", Permutation], "Tensor"], rows: "Tensor", shape: Permutation) -> "Tensor":
    """Apply a function again to what is past the table's end."""
    is_past = rows >= shape.num_rows
    if bool(is_past.any()):
        rows[is_past] = function(rows[is_past], shape)
    return rows


def _top_bits_of(words: "Tensor", number: int, count: int) -> "Tensor":
    """Return what `_top_bits` does: the same hash, of int64."""
    words = words ^ _signed(ROUND_KEYS[number])
    for shift, multiplier in zip(MIX_SHIFTS, (*MIX_MULTIPLIERS, 1), strict=True):
        words = (words ^ _shifted(words, shift)) * _signed(multiplier)
    return _shifted(words, 64 - count)


def _scaled_of(words: "Tensor", number: int, size: int) -> "Tensor":
    """Return what `_scaled` does."""
    return (_top_bits_of(words, number, 32) * size) >> 32


def _shifted(words: "Tensor", count: int) -> "Tensor":
    """Return words shifted right as unsigned ones; PyTorch shifts copies of the sign in."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """Return the signed integer of the same 64 bits."""
    return word - (word >> 63 << 64)
