"""`even_lengths`: the perfectly even batch, the same lengths on every rank, of the same cost as the mean."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_HALVINGS = 32  # of an interval: what is left is far less than the half event by which lengths are rounded
_MAX_POWER = 16.0


def even_lengths(lengths: Ints, num_ranks: int, cost: Callable[[Ints], Ints], *, max_length: int) -> Ints:
    """Return lengths that all ranks can have, with as many events and the same cost as a rank has on average.

    The lengths of the step are sorted, and every `num_ranks`-th of them is taken. Then these q become s q^g, where g,
    the skew, and s, the scale, are such that both sums agree. Rounding leaves a difference of about half an event per
    sample.

    Args:
        lengths: int64 [ranks x B]: events of all samples of a step, all ranks together.
        num_ranks: data-parallel ranks.
        cost: cost of samples with these numbers of events, of the same shape; increasing.
        max_length: no sample gets longer.

    Returns:
        int64 [B], longest first.

    """
    quantiles = np.sort(lengths)[::-1][num_ranks // 2 :: num_ranks].astype(np.float64)
    mean_events = lengths.sum() / num_ranks
    mean_cost = float(cost(lengths).sum(dtype=np.float64)) / num_ranks

    def shaped(power: float, scale: float) -> Floats:
        # Relative to the longest, so that large powers do not overflow.
        values: Floats = np.clip(scale * (quantiles / quantiles[0]) ** power, 1, max_length)
        return values

    def cost_of(values: Floats) -> float:
        below = np.floor(values).astype(np.int64)
        low, high = cost(below).astype(np.float64), cost(below + 1).astype(np.float64)
        return float((low + (values - below) * (high - low)).sum())  # between whole numbers of events

    def scale_for(power: float, total: Callable[[Floats], float], wanted: float) -> float:
        # By its logarithm, because the scale at which all samples have the maximal length may be 4096^16.
        largest = np.log(max_length) - power * np.log(quantiles[-1] / quantiles[0])
        return float(np.exp(_root(lambda log: total(shaped(power, np.exp(log))) - wanted, 0.0, largest)))

    def excess(power: float) -> float:  # with as many events, more skew costs more
        return cost_of(shaped(power, scale_for(power, np.sum, mean_events))) - mean_cost

    power = _root(excess, 0.0, _MAX_POWER)
    # Where no skew fits, such as for a single sample, the cost counts.
    even = shaped(power, scale_for(power, cost_of, mean_cost))
    return np.rint(even).astype(np.int64)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function is 0, or the end of the interval that is nearest to that."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return (low + high) / 2
