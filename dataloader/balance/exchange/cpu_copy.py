"""Copies of byte ranges between buffers: their description, and the compiled loop that runs them on the CPU."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled


class ByteCopies(NamedTuple):
    """n ranges of one or more source buffers, and where they go in one target buffer; int64 [n] each, in bytes."""

    source: NDArray[np.int64]  # number of the source buffer of each range
    source_starts: NDArray[np.int64]  # where each range begins in its source buffer
    target_starts: NDArray[np.int64]  # where each range begins in the target buffer
    num_bytes: NDArray[np.int64]  # length of each range, positive

    @classmethod
    def from_source(cls, source: int, *ranges: NDArray[np.int64]) -> Self:
        """Return the non-empty copies, given `source_starts`, `target_starts` and `num_bytes` of any one shape."""
        non_empty = np.flatnonzero(ranges[-1])
        return cls(np.full(len(non_empty), source), *(array.reshape(-1)[non_empty] for array in ranges))

    @classmethod
    def concatenate(cls, copies: Sequence["ByteCopies"]) -> Self:
        """Return the ranges of several copies, one after the other."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*copies, strict=True)))


def copy_on_cpu(copies: ByteCopies, sources: Sequence[NDArray[np.uint8]], target: NDArray[np.uint8]) -> None:
    """Run copies between uint8 arrays."""
    for number, source in enumerate(sources):
        of_source = copies.source == number
        copy_ranges(source, target, *(array[of_source] for array in copies[1:]))


@compiled
def copy_ranges(
    source: NDArray[np.uint8],
    target: NDArray[np.uint8],
    source_starts: NDArray[np.int64],
    target_starts: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
) -> None:
    """Copy n ranges of `source` to `target`, which do not overlap."""
    for i in range(len(num_bytes)):
        count = num_bytes[i]
        # Indexing slices from 0 on tells the compiler that no index is negative, so it can vectorize the loop.
        source_range = source[source_starts[i] : source_starts[i] + count]
        target_range = target[target_starts[i] : target_starts[i] + count]
        for offset in range(count):
            target_range[offset] = source_range[offset]
