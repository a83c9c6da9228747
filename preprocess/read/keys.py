"""Keys of users and items: 64-bit words in place of raw ids, their texts, and the index of each key in a set.

An integer is its own key, and a text has the hash of its UTF-8 bytes as key. So events can be distributed over buckets,
and rows be ordered by user, before any id is known. Two texts with the same hash are an error, never one id.
"""

import glob
import secrets
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import DataError
from evenrank.core.files import replacing
from evenrank.core.hashing import hash_texts, mix_word

_BUFFERED_ROWS = 2_000_000  # of distinct texts, all columns each
_KEY, _VALUE = "key", "value"


def text_keys(texts: pl.Series) -> NDArray[np.int64]:
    """Return the keys of texts [n], none of which is null: int64 [n]."""
    if not len(texts):
        return np.empty(0, dtype=np.int64)
    array = texts.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return hash_texts(np.frombuffer(data or b"", dtype=np.uint8), ends)


def keys_of(values: pl.Series) -> NDArray[np.int64]:
    """Return the keys of ids [n] of type Int64, UInt64 or String, none of which is null: int64 [n]."""
    if values.dtype == pl.String:
        return text_keys(values)
    keys: NDArray[np.int64] = values.to_numpy().view(np.int64)
    return keys


class TextValues:
    """The distinct texts of a column and their keys, on disk, in parts by key.

    Args:
        folder: of the files, which exists.
        num_bits: leading bits of a key's hash that are the index of its part.
        piece: number of the piece of the log whose texts are added.
    """

    def __init__(self, folder: Path, num_bits: int, piece: int = 0) -> None:
        self._folder, self._num_bits, self._piece = folder, num_bits, piece
        self._frames: list[pl.DataFrame] = []
        self._num_files = 0

    def of_piece(self, number: int) -> "TextValues":
        """Return what registers the texts of a piece."""
        return TextValues(self._folder, self._num_bits, number)

    def add(self, texts: pl.Series) -> NDArray[np.int64]:
        """Register texts [n], and return their keys: int64 [n]."""
        keys = text_keys(texts)
        self._frames.append(pl.DataFrame({_KEY: keys, _VALUE: texts}).unique())
        if sum(map(len, self._frames)) > _BUFFERED_ROWS:
            self._frames = [pl.concat(self._frames).unique()]
            if 2 * len(self._frames[0]) > _BUFFERED_ROWS:
                self.flush()
        return keys

    def flush(self) -> None:
        """Write the texts that were added."""
        if self._frames:
            frame = pl.concat(self._frames).unique()
            order, offsets = by_bucket(frame.get_column(_KEY).to_numpy(), self._num_bits)
            path = self._folder / f"{self._piece:05d}-{self._num_files:05d}.arrow"
            with replacing(path) as new:
                frame[order].write_ipc(new)
            with replacing(path.with_suffix(".ends")) as new:
                new.write_bytes(offsets.data)
            self._frames, self._num_files = [], self._num_files + 1

    def part(self, index: int) -> pl.DataFrame:
        """Return `key` (int64) and `value` of all texts of a part; raises a DataError if two texts have one key."""
        rows = pl.DataFrame(schema={_KEY: pl.Int64, _VALUE: pl.String})
        for path in sorted(self._folder.glob("*.ends")):
            begin, end = np.fromfile(path, dtype=np.int64, count=2, offset=8 * index).tolist()
            texts = glob.escape(str(path.with_suffix(".arrow")))  # `glob=False` is newer than the oldest Polars
            rows.extend(pl.scan_ipc(texts).slice(begin, end - begin).collect())
        rows = rows.unique()
        if rows.get_column(_KEY).is_duplicated().any():
            equal = rows.filter(pl.col(_KEY).is_duplicated()).sort(_KEY, _VALUE).get_column(_VALUE).head(2).to_list()
            raise DataError(f"the ids {equal[0]!r} and {equal[1]!r} have the same 64-bit hash; rename one of them")
        return rows


class KeyTable:
    """The index of each key in an array of distinct ones: a hash table of 5 to 11 bytes per key besides the keys."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self.keys = keys
        self._seed = random_seed()
        num_slots = 1 << max(4, (len(keys) + len(keys) // 3).bit_length())  # at most three quarters are used
        self._slots = np.full(num_slots, -1, dtype=np.int32)
        _insert(keys, self._slots, self._seed)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each key [n], or -1: int64 [n]."""
        return _find(self.keys, self._slots, self._seed, keys)


@compiled
def _insert(keys: NDArray[np.int64], slots: NDArray[np.int32], seed: np.uint64) -> None:
    mask = len(slots) - 1
    for index in range(len(keys)):
        slot = slot_of(keys[index], seed, mask)
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = index


@compiled
def _find(
    keys: NDArray[np.int64], slots: NDArray[np.int32], seed: np.uint64, queries: NDArray[np.int64]
) -> NDArray[np.int64]:
    mask = len(slots) - 1
    found = np.empty(len(queries), dtype=np.int64)
    for query in range(len(queries)):
        slot = slot_of(queries[query], seed, mask)
        while slots[slot] >= 0 and keys[slots[slot]] != queries[query]:
            slot = (slot + 1) & mask
        found[query] = slots[slot]
    return found


def random_seed() -> np.uint64:
    """Return a seed for a hash table.

    For a given one, keys could be chosen such that all of them are in one run of slots, in quadratic time.
    """
    return np.uint64(secrets.randbits(64))


@compiled
def slot_of(key: int, seed: np.uint64, mask: int) -> np.int64:
    """Return where the search for a key begins in a table of `mask + 1` slots, a power of two."""
    return np.int64(mix_word(np.uint64(key) ^ seed) & np.uint64(mask))


@compiled
def encode_keys(keys: NDArray[np.int64], seed: np.uint64) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Number keys in order of first appearance, with an open-addressing hash table.

    Return the distinct keys, int64 [distinct], and for each event the index of its key among them, int32 [events].

    The result does not depend on the seed; see `random_seed`.
    """
    capacity = 1 << 12
    table = np.full(capacity, -1, dtype=np.int32)
    distinct = np.empty(len(keys), dtype=np.int64)
    codes = np.empty(len(keys), dtype=np.int32)
    count = 0
    for event in range(len(keys)):
        key = keys[event]
        if event > 0 and key == keys[event - 1]:  # many logs are already grouped by user
            codes[event] = codes[event - 1]
            continue
        slot = slot_of(key, seed, capacity - 1)
        while table[slot] >= 0 and distinct[table[slot]] != key:
            slot = (slot + 1) & (capacity - 1)
        if table[slot] < 0:
            table[slot] = count
            distinct[count] = key
            count += 1
            if 2 * count > capacity:
                capacity *= 2
                table = np.full(capacity, -1, dtype=np.int32)
                _insert(distinct[:count], table, seed)
            codes[event] = count - 1
        else:
            codes[event] = table[slot]
    return distinct[:count].copy(), codes


@compiled
def by_bucket(keys: NDArray[np.int64], num_bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort events by the bucket of their key, which is stable.

    Return their indices, int64 [events], and where each bucket begins, then their number: int64 [buckets + 1].
    """
    buckets = np.zeros(len(keys), dtype=np.uint16)
    offsets = np.zeros((1 << num_bits) + 1, dtype=np.int64)
    for event in range(len(keys)):
        if num_bits > 0:  # as by `user_hash`
            buckets[event] = mix_word(np.uint64(keys[event])) >> np.uint64(64 - num_bits)
        offsets[buckets[event] + 1] += 1
    offsets = np.cumsum(offsets)
    next_position = offsets[:-1].copy()
    order = np.empty(len(keys), dtype=np.int64)
    for event in range(len(keys)):
        order[next_position[buckets[event]]] = event
        next_position[buckets[event]] += 1
    return order, offsets
