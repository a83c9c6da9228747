"""Zipf variates by rejection-inversion: any exponent and any range, in constant memory.

For k = 0, 1, ..., span, the mass of k is a bar of width 1 and height f(k) = ((first + k) / first)^-exponent. As f is
convex, the area below it from k - 1/2 to k + 1/2 is at least that of the bar:

    k - 1/2        k        k + 1/2
       |-----|-----------------|        a point of the area below f, uniformly distributed, is x
       reject|      accept              k is x rounded; it is accepted if x is in the last part, whose area is f(k)

Points are drawn by inverting the integral of f. The area of k = 0 begins where its last part does. A draw takes at most
1.2 points on average, and no array of the support, so ranges of 10^12 and unbounded ones take the same time.

W. Hoermann and G. Derflinger, "Rejection-inversion to generate variates from monotone discrete distributions", ACM
Transactions on Modeling and Computer Simulation 6(3), 1996. Here areas are measured from k = 0, and divided by `first`,
so that neither a large `first` nor an exponent close to 1 cancels digits.
"""

import numpy as np
from numpy.typing import NDArray

_FAR = 1e300  # stands for draws that are too large for float64


def draw_zipf(rng: np.random.Generator, size: int, *, exponent: float, first: int, span: float) -> NDArray[np.float64]:
    """Draw values of 0..span with probabilities proportional to (first + k)^-exponent: float64 [size], integral.

    Values above 2^53 are multiples of powers of 2.

    Args:
        rng: where random numbers come from.
        size: how many values to draw.
        exponent: at least 0; above 1 if `span` is infinite.
        first: at least 1.
        span: the largest value, or infinity.

    """
    power = 1 - exponent
    end = float(_box_cox(np.log1p((span + 0.5) / first), power))
    begin = float(_box_cox(np.log1p(0.5 / first), power)) - 1 / first
    drawn = np.empty(size)
    num_drawn = 0
    with np.errstate(divide="ignore", over="ignore"):  # where a draw is infinite
        while num_drawn < size:
            areas = end - (end - begin) * (1 - rng.random(size - num_drawn))
            points = first * np.expm1(_log_inverse_box_cox(areas, power))
            values = np.clip(np.rint(points), 0, min(span, _FAR))
            # Relative to the upper end of the interval, where digits do not cancel even for large values.
            upper = first + values + 0.5
            masses = np.exp(-exponent * np.log1p(-0.5 / upper)) / upper
            accepted = values[values + 0.5 - points <= -upper * np.expm1(_log_inverse_box_cox(-masses, power))]
            drawn[num_drawn : num_drawn + len(accepted)] = accepted
            num_drawn += len(accepted)
    return drawn


def _box_cox(log_x: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Return (x^power - 1) / power, the integral of t^(power - 1) from 1 to x, or its limit log(x) at power 0."""
    return log_x if power == 0 else np.expm1(power * log_x) / power


def _log_inverse_box_cox(values: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Return the logarithms of the x whose `_box_cox` are these values."""
    return values if power == 0 else np.log1p(power * values) / power
