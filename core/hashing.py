"""The one 64-bit mixing function, behind the order of rows, the split by user and the order of samples."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit words so that each input bit changes about half of the output bits.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection on 64-bit words, the same on every machine
    and in every release, which the hashes of data-frame libraries are not.
    """
    mixed = values.astype(np.uint64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


@compiled
def mix_word(word: np.uint64) -> np.uint64:
    """Mix one word, for compiled loops: as `mix64`."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
