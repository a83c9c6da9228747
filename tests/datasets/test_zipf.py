"""Draws follow the exact probabilities, for all exponents and ranges."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.datasets.distributions import draw_zipf

EXPONENTS = (0.0, 0.3, 1.0, 1.0 + 1e-9, 1.2, 2.0, 7.0)


def _chi_square_deviation(counts: NDArray[np.int64], mass: NDArray[np.float64]) -> float:
    """Return by how many standard deviations the chi-square statistic is above its mean, given one count per mass."""
    expected = counts.sum() * mass / mass.sum()
    is_common = expected >= 5  # the rest is one category
    observed = np.append(counts[is_common], counts[~is_common].sum())
    expected = np.append(expected[is_common], expected[~is_common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(len(observed) - 1, 1)
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("first", [1, 2, 1000])
@pytest.mark.parametrize("span", [0, 1, 40, 3000])
def test_draws_have_the_exact_probabilities(exponent: float, first: int, span: int) -> None:
    drawn = draw_zipf(np.random.default_rng(5), 200_000, exponent=exponent, first=first, span=span)
    counts = np.bincount(drawn.astype(np.int64), minlength=span + 1)
    assert len(counts) == span + 1
    assert _chi_square_deviation(counts, ((first + np.arange(span + 1)) / first) ** -exponent) < 5


@pytest.mark.parametrize("exponent", [1.2, 2.0, 7.0])
def test_unbounded_draws_have_the_exact_probabilities(exponent: float) -> None:
    drawn = draw_zipf(np.random.default_rng(5), 200_000, exponent=exponent, first=1, span=math.inf)
    mass = np.arange(1, 10_001) ** -exponent
    # Euler-Maclaurin: what is beyond the last mass is between the integrals from there and from one step earlier.
    tail = (10_000.5 ** (1 - exponent)) / (exponent - 1)
    counts = np.bincount(np.minimum(drawn, 10_000).astype(np.int64), minlength=10_001)
    assert _chi_square_deviation(counts, np.append(mass, tail)) < 5


@given(
    exponent=st.floats(0, 50),
    first=st.integers(1, 10**15),
    span=st.one_of(st.integers(0, 2**62), st.just(math.inf)),
    seed=st.integers(0, 1000),
)
def test_draws_are_integers_in_the_range(exponent: float, first: int, span: float, seed: int) -> None:
    exponent = max(exponent, 1.01) if span == math.inf else exponent
    drawn = draw_zipf(np.random.default_rng(seed), 50, exponent=exponent, first=first, span=span)
    assert drawn.shape == (50,)
    assert (drawn == np.rint(drawn)).all()
    assert drawn.min() >= 0
    assert drawn.max() <= span


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_few_points_are_rejected(exponent: float) -> None:
    class CountingGenerator:
        num_points = 0

        def random(self, size: int) -> NDArray[np.float64]:
            self.num_points += size
            return np.random.default_rng(self.num_points).random(size)

    rng = CountingGenerator()
    draw_zipf(rng, 100_000, exponent=exponent, first=1, span=10**6)  # type: ignore[arg-type]
    assert rng.num_points < 120_000
