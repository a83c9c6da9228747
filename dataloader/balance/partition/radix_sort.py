"""Slots in descending order of what they cost: a radix sort, several times faster than a comparison sort."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled

_FEW = 64  # slots; below, inserting them one by one is quicker than counting digits


@compiled
def descending(costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slots by descending cost, equal costs by ascending slot.

    Args:
        costs: int64 [n], at least one; they may be negative.

    Returns:
        int64 [n], as `numpy.argsort(-costs, kind="stable")`.

    """
    size = len(costs)
    order = np.arange(size)
    if size <= _FEW:
        for i in range(1, size):
            slot, j = order[i], i
            while j > 0 and costs[order[j - 1]] < costs[slot]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = slot
        return order
    highest, lowest = costs.max(), costs.min()
    digit_bits = 8 if size < 4096 else 11  # the counts of all digits have to be worth clearing
    radix = 1 << digit_bits
    keys = highest - costs
    next_keys, next_order = np.empty_like(keys), np.empty_like(order)
    places = np.empty(radix, dtype=np.int64)
    shift = 0
    while shift < 63 and (highest - lowest) >> shift:  # a shift by 64 or more is one by less
        places[:] = 0
        for key in keys:
            places[(key >> shift) & (radix - 1)] += 1
        place = 0
        for digit in range(radix):
            count = places[digit]
            places[digit] = place
            place += count
        for i in range(size):
            digit = (keys[i] >> shift) & (radix - 1)
            place = places[digit]
            places[digit] = place + 1
            next_keys[place] = keys[i]
            next_order[place] = order[i]
        keys, next_keys = next_keys, keys
        order, next_order = next_order, order
        shift += digit_bits
    return order
