"""Radix sort of slots by descending cost.

A least-significant-digit radix sort with digits of 8 or 11 bits, and insertion sort for short inputs (Knuth, The Art of
Computer Programming, volume 3, sections 5.2.5 and 5.2.1). Every strategy starts from this order.

Cost: O(n) for each digit of max(costs) - min(costs), with n = W * B, several times faster than a comparison sort.
Trade-off: two more arrays of n words, and the time depends on the range of the costs.
"""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled

_INSERTION_SORT_BELOW = 64  # slots, by measurement: shorter inputs do not pay for counting digits


@compiled
def argsort_descending(costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slots by descending cost, equal costs by ascending slot.

    Args:
        costs: int64 [n], n at least 1; may be negative.

    Returns:
        int64 [n], equal to `numpy.argsort(-costs, kind="stable")`.

    """
    size = len(costs)
    order = np.arange(size)
    if size <= _INSERTION_SORT_BELOW:
        for i in range(1, size):
            slot, j = order[i], i
            while j > 0 and costs[order[j - 1]] < costs[slot]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = slot
        return order
    highest, lowest = costs.max(), costs.min()
    digit_bits = 8 if size < 4096 else 11  # more bits mean fewer passes, but more counters to clear in each
    radix = 1 << digit_bits
    keys = highest - costs
    next_keys, next_order = np.empty_like(keys), np.empty_like(order)
    next_index = np.empty(radix, dtype=np.int64)  # per digit: where its next key goes
    shift = 0
    while shift < 63 and (highest - lowest) >> shift:  # shifting an int64 by 64 or more is undefined
        next_index[:] = 0
        for key in keys:
            next_index[(key >> shift) & (radix - 1)] += 1
        total = 0
        for digit in range(radix):
            count = next_index[digit]
            next_index[digit] = total
            total += count
        for i in range(size):
            digit = (keys[i] >> shift) & (radix - 1)
            index = next_index[digit]
            next_index[digit] = index + 1
            next_keys[index] = keys[i]
            next_order[index] = order[i]
        keys, next_keys = next_keys, keys
        order, next_order = next_order, order
        shift += digit_bits
    return order
