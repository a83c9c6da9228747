"""The 64-bit hash function behind the order of rows, the split by user and the shuffled order of samples.

It is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): a
bijection of 64-bit words, the same on every machine and in every release, unlike the hashes of data-frame libraries.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled

MIX_SHIFTS = 30, 27, 31
MIX_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of SplitMix64


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit words: uint64 of any shape to the same shape. An input bit affects about half of the output bits."""
    mixed = values.astype(np.uint64)
    for shift, multiplier in zip(MIX_SHIFTS, MIX_MULTIPLIERS, strict=False):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(multiplier)
    mixed ^= mixed >> np.uint64(MIX_SHIFTS[-1])
    return mixed


@compiled
def mix_word(word: np.uint64) -> np.uint64:
    """Hash one word inside a compiled loop; the same function as `mix64`."""
    word = (word ^ (word >> np.uint64(MIX_SHIFTS[0]))) * np.uint64(MIX_MULTIPLIERS[0])
    word = (word ^ (word >> np.uint64(MIX_SHIFTS[1]))) * np.uint64(MIX_MULTIPLIERS[1])
    return word ^ (word >> np.uint64(MIX_SHIFTS[2]))


@compiled
def draw_unit(word: np.uint64, number: int) -> float:
    """Return draw `number`, from 0, of the generator with the state `word`, in [0, 1), inside a compiled loop."""
    return float(np.int64(mix_word(word + np.uint64(number + 1) * GOLDEN) >> np.uint64(11))) * 2.0**-53


@compiled
def hash_texts(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Hash n texts, of which number i has the bytes data[offsets[i] : offsets[i + 1]]: int64 [n].

    Words of 8 bytes, the first byte lowest, are mixed one after the other, beginning with the number of bytes.
    """
    hashes = np.empty(len(offsets) - 1, dtype=np.int64)
    for text in range(len(hashes)):
        begin, end = offsets[text], offsets[text + 1]
        hashed = mix_word(np.uint64(end - begin))
        word, shift = np.uint64(0), np.uint64(0)
        for position in range(begin, end):
            word |= np.uint64(data[position]) << shift
            shift += np.uint64(8)
            if shift == np.uint64(64):
                hashed = mix_word(hashed ^ word)
                word, shift = np.uint64(0), np.uint64(0)
        if shift > np.uint64(0):
            hashed = mix_word(hashed ^ word)
        hashes[text] = np.int64(hashed)
    return hashes
