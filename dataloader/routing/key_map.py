"""The modes of routing, and `KeyMap`: which row of a table has which key, so that patterns of keys spread over ranks.

The row-wise sharding of stock TorchRec gives rank r the rows r b .. r b + b - 1 of a table of N rows, b = ceil(N / W).
With 10 rows and 4 ranks, b = 3:

    rank              0          1          2         3
    row               0  1  2    3  4  5    6  7  8   9
    key, continuous   0  1  2    3  4  5    6  7  8   9
    key, roundrobin   0  4  7    1  5  8    2  6  9   3

`hash_roundrobin` is a keyed Feistel network on pairs (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002), which makes every pattern of keys look random. For N rows it takes A = 2^a, about the square root of N,
and B = ceil(N / A). Keys and rows are pairs j < B, r < A:

    key = j A + r
    r += hash(j) mod A, j += hash(r) mod B, r += hash(j) mod A, j += hash(r) mod B
    row = r B + j

The rank that has a row depends on r, which is random after three rounds: with two, keys that collide in j would keep
the distance of their r. Rows past the table's end, fewer than A of A B, are permuted again until they are within it
(cycle walking). It depends on N alone, so a table can be sharded over another number of ranks without moving rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError, DataError
from evenrank.core.hashing import MIX_MULTIPLIERS, MIX_SHIFTS, mix_word
from evenrank.core.rules import Bounds
from evenrank.core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Integers = TypeVar("Integers", "NDArray[Any]", "Tensor")
Mode = Literal["continuous", "roundrobin", "hash_roundrobin"]
_Size = Annotated[int, Bounds(at_least=1, at_most=1 << 62)]
MODES: tuple[Mode, ...] = get_args(Mode)

# Round keys, different for each round: the first hexadecimal digits of pi.
ROUND_KEYS = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89
_ROUND_WORDS = tuple(map(np.uint64, ROUND_KEYS))
CONSTANTS = *ROUND_KEYS, *MIX_MULTIPLIERS, *MIX_SHIFTS
"""Everything that `hash_roundrobin` depends on besides the number of rows."""


def rows_per_rank(num_embeddings: int, world_size: int) -> int:
    """Return the rows of a rank's range in TorchRec's row-wise sharding; the last ranks may have fewer, or none."""
    return -(-num_embeddings // world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyMap(Settings):
    """A bijection from the keys of a table to its rows, both 0..num_embeddings-1.

    Raises:
        ConfigError: a field is out of range.
    """

    num_embeddings: _Size
    """Rows of the table, N, at most 2^62."""
    world_size: _Size
    """Number of ranks that the table is sharded over, W. Only `roundrobin` depends on it."""
    mode: Mode
    """`continuous`: row k has key k, as without a map. `roundrobin`: key k is on rank k % W; where N is no multiple of
    W, the last ranks have fewer rows or none, and further keys go round the others. `hash_roundrobin`: a pseudo-random
    permutation, which gives each rank a random sample of any pattern of keys.
    """

    def __call__(self, keys: Integers) -> Integers:
        """Return the row of each key, an array or a tensor as the keys are, of the same shape, dtype and device.

        Raises:
            ConfigError: the dtype cannot hold all rows.
            DataError: a key is not in 0..num_embeddings-1.
        """
        return self._mapped(keys, "key")

    def inverse(self, rows: Integers) -> Integers:
        """Return the key of each row; the inverse of a call, with the same types and errors."""
        return self._mapped(rows, "row")

    @property
    def is_identity(self) -> bool:
        """Whether each key is its own row."""
        return self.mode == "continuous"

    def describe(self) -> dict[str, Any]:
        """Return the description of the map in checkpoints: plain values that JSON can hold."""
        known: dict[str, Any] = {"mode": self.mode, "num_embeddings": self.num_embeddings}
        if self.mode == "roundrobin":
            known["world_size"] = self.world_size
        if self.mode == "hash_roundrobin":
            known["constants"] = list(CONSTANTS)
        return known

    def _mapped(self, values: Integers, kind: Literal["key", "row"]) -> Integers:
        """Return the row of each key, or the key of each row."""
        self._check_values(values, kind)
        if self.is_identity:
            return values
        function = _map_in_turn if self.mode == "roundrobin" else _map_at_random
        if isinstance(values, np.ndarray):
            mapped = function(values.reshape(-1).astype(np.int64, copy=False), self, kind)
            return mapped.astype(values.dtype, copy=False).reshape(values.shape)
        mapped = function(values.long().cpu().numpy().reshape(-1), self, kind)
        return values.new_tensor(mapped).reshape(values.shape)

    def _check_values(self, values: Any, kind: str) -> None:
        limit = _largest_value(values)
        if limit is None:
            raise ConfigError(
                f"{kind}s must be an array of integers or a tensor of signed integers, got "
                f"{getattr(values, 'dtype', type(values).__name__)}; convert them to an array or a tensor of int64"
            )
        if self.num_embeddings - 1 > limit:
            raise ConfigError(
                f"the {kind}s of a table with num_embeddings={self.num_embeddings} can be larger than {values.dtype} "
                "holds; convert them to int64"
            )
        if not all(values.shape):
            return
        least, greatest = int(values.min()), int(values.max())
        if least < 0 or greatest >= self.num_embeddings:
            raise DataError(
                f"the {kind}s of a table with num_embeddings={self.num_embeddings} are 0 to {self.num_embeddings - 1}, "
                f"got {least if least < 0 else greatest}; set num_embeddings to the largest key + 1"
            )


def map_features(features: "KeyedJaggedTensor", key_maps: Mapping[str, KeyMap]) -> "KeyedJaggedTensor":
    """Return the same features with the rows of tables instead of keys, for batches of other loaders.

    On a GPU this waits for the device, because it checks the keys; map on the CPU, where batches are made.

    Args:
        features: with integer values.
        key_maps: of some of its features, by name.

    Raises:
        ConfigError: there is no such feature, or its dtype cannot hold all rows.
        DataError: a key is not in the table.
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # as torch

    names, varies = features.keys(), features.variable_stride_per_key()
    if unknown := [name for name in key_maps if name not in names]:
        raise ConfigError(f"key_maps has {unknown[0]!r}, which is no feature; there are {', '.join(names)}")
    ends = features.offset_per_key()
    values = features.values().clone()
    for name, (begin, end) in zip(names, pairwise(ends), strict=True):
        if name in key_maps:
            values[begin:end] = key_maps[name](values[begin:end])
    return KeyedJaggedTensor(
        keys=names,
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        stride=None if varies else features.stride(),
        length_per_key=features.length_per_key(),
        offset_per_key=ends,
        inverse_indices=features.inverse_indices_or_none(),
    )


def _largest_value(values: Any) -> int | None:
    """Return the largest value of the dtype; None for anything but arrays of integers and tensors of signed ones."""
    if isinstance(values, np.ndarray):
        return np.iinfo(values.dtype).max if values.dtype.kind in "iu" else None
    import torch  # not installed where arrays alone are mapped

    if not isinstance(values, torch.Tensor):
        return None
    is_signed_integer = values.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    return torch.iinfo(values.dtype).max if is_signed_integer else None


def _map_in_turn(values: NDArray[np.int64], key_map: KeyMap, kind: str) -> NDArray[np.int64]:
    """Assign the keys of a table to ranks in turn, as long as each has rows left: return rows or keys, int64 [n].

    With b rows per range, N = f b + l: f ranks have b rows, the next one l < b, and others none. In the first l rounds
    f + 1 ranks take a key each, in the others f.
    """
    range_rows = rows_per_rank(key_map.num_embeddings, key_map.world_size)  # b
    full_ranks, last_rows = divmod(key_map.num_embeddings, range_rows)  # f, l
    num_early = last_rows * (full_ranks + 1)  # keys of the rounds in which f + 1 ranks take part
    if kind == "row":
        rank, turn = values // range_rows, values % range_rows
        late_keys = num_early + (turn - last_rows) * full_ranks + rank
        return np.where(turn < last_rows, turn * (full_ranks + 1) + rank, late_keys)
    late = values - num_early
    early_rows = values % (full_ranks + 1) * range_rows + values // (full_ranks + 1)
    late_rows = late % full_ranks * range_rows + late // full_ranks + last_rows
    return np.where(late < 0, early_rows, late_rows)


def _map_at_random(values: NDArray[np.int64], key_map: KeyMap, kind: str) -> NDArray[np.int64]:
    """Permute keys as in mode `hash_roundrobin`, see the top of this file: return rows or keys, int64 [n]."""
    num_rows = key_map.num_embeddings  # N
    bits = max(2, (num_rows - 1).bit_length()) // 2  # a
    mapped = np.array(values, order="C")
    _permute(mapped, num_rows, bits, -(-num_rows >> bits), kind == "row")
    return mapped


@compiled
def _permute(words: NDArray[np.int64], num_rows: int, bits: int, size: int, is_inverse: bool) -> None:
    """Replace keys, each in 0..num_rows-1, by their rows, in place, or rows by their keys if `is_inverse`."""
    num_bits, num_first = np.uint64(bits), np.uint64(size)
    mask = (np.uint64(1) << num_bits) - np.uint64(1)
    for index in range(len(words)):
        word = np.uint64(words[index])
        while True:
            if is_inverse:
                second, first = word // num_first, word % num_first
                first = _add(first, num_first - _scaled(second, 3, num_first), num_first)
                second = (second - _top_bits(first, 2, num_bits)) & mask
                first = _add(first, num_first - _scaled(second, 1, num_first), num_first)
                second = (second - _top_bits(first, 0, num_bits)) & mask
                word = (first << num_bits) | second
            else:
                first, second = word >> num_bits, word & mask
                second = (second + _top_bits(first, 0, num_bits)) & mask
                first = _add(first, _scaled(second, 1, num_first), num_first)
                second = (second + _top_bits(first, 2, num_bits)) & mask
                first = _add(first, _scaled(second, 3, num_first), num_first)
                word = second * num_first + first
            if word < np.uint64(num_rows):
                break
        words[index] = np.int64(word)


@compiled
def _top_bits(word: np.uint64, number: int, count: np.uint64) -> np.uint64:
    """Return the most significant bits of a word's hash in a round."""
    return mix_word(word ^ _ROUND_WORDS[number]) >> (np.uint64(64) - count)


@compiled
def _scaled(word: np.uint64, number: int, size: np.uint64) -> np.uint64:
    """Return a word's hash in a round, scaled to 0..size-1; size is at most 2^31."""
    return (_top_bits(word, number, np.uint64(32)) * size) >> np.uint64(32)


@compiled
def _add(first: np.uint64, shift: np.uint64, size: np.uint64) -> np.uint64:
    """Return a sum modulo `size`, of which no summand is larger."""
    total = first + shift
    return total - size if total >= size else total
