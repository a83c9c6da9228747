import math
import pickle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.datasets import open_store
from evenrank.datasets.distributions import (
    ClippedZipf,
    Distribution,
    Histogram,
    Lognormal,
    Normal,
    Uniform,
    Zipf,
    draw_actions,
    draw_zipf,
    parse_distribution,
)

EXPONENTS = (0.0, 0.3, 1.0, 1.0 + 1e-9, 1.2, 2.0, 7.0)


def _draw(distribution: Distribution, size: int = 100_000) -> NDArray[np.int64]:
    return distribution.sample(np.random.default_rng(0), size)


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
@pytest.mark.parametrize(("first", "span"), [(1, 0), (1, 1), (1, 3000), (1000, 3000), (1, math.inf)])
def test_zipf_draws_have_the_exact_probabilities_and_few_are_rejected(exponent: float, first: int, span: float) -> None:
    if span == math.inf and exponent < 1.1:
        pytest.skip("has no distribution")
    rng, last = Mock(wraps=np.random.default_rng(5)), int(min(span, 10_000))
    drawn = draw_zipf(rng, 200_000, exponent=exponent, first=first, span=span)
    assert sum(call.args[0] for call in rng.random.call_args_list) < 240_000 or span <= 1
    assert (drawn == np.rint(drawn)).all()
    counts = np.bincount(np.minimum(drawn, last).astype(np.int64), minlength=last + 1)
    mass = ((first + np.arange(last + 1)) / first) ** -exponent
    if span == math.inf:  # of all from there on, by Euler and Maclaurin
        mass[-1] = (last + first - 0.5) ** (1 - exponent) / (exponent - 1)
    assert _chi_square_deviation(counts, mass) < 5


def test_draws_have_the_probabilities_or_the_mean_and_std_that_were_given() -> None:
    values = _draw(ClippedZipf(exponent=2, high=4))
    mass = np.array([1, 1 / 4, 1 / 9]) / (math.pi**2 / 6)
    assert np.bincount(values, minlength=5)[1:] / len(values) == pytest.approx([*mass, 1 - mass.sum()], abs=0.005)
    for of_items in (Zipf, ClippedZipf):
        from_zero = _draw(of_items(exponent=2, low=0, high=49, shift=1))
        assert np.array_equal(from_zero + 1, _draw(of_items(exponent=2, high=50)))
    counts = np.bincount(_draw(Uniform(low=2, high=5)), minlength=6)
    assert counts[2:] / counts.sum() == pytest.approx(np.full(4, 0.25), abs=0.01)
    for kind in (Normal, Lognormal):
        values = _draw(kind(mean=512, std=128, low=0, high=10**6))
        assert (values.mean(), values.std()) == (pytest.approx(512, rel=0.01), pytest.approx(128, rel=0.03))
    drawn = draw_actions(Uniform(low=3, high=5), np.random.default_rng(0), 100)
    assert (drawn.dtype, {*drawn.tolist()}) == (np.int32, {3, 4, 5})


def test_text_is_parsed_into_a_distribution() -> None:
    assert parse_distribution("zipf") == Zipf()
    assert parse_distribution("lognormal:mean=512,std=256.5,high=4096") == Lognormal(mean=512, std=256.5, high=4096)
    assert parse_distribution("zipf:low=0,high=none,shift=1") == Zipf(low=0, high=None, shift=1)
    assert parse_distribution("clipped-zipf:exponent=1.5") == ClippedZipf(exponent=1.5)


@pytest.mark.parametrize(
    "text",
    [
        *("normal:mean=1e308,std=1e308", "normal:mean=-1e308", "lognormal:mean=1e-300,std=1e-200"),
        *("lognormal:mean=1e308", "zipf:exponent=100,high=none", "zipf:exponent=100,low=9223372036854774784,high=none"),
        *("clipped-zipf:exponent=100", "clipped-zipf:exponent=1.0000000001", "uniform:low=0,high=9223372036854774784"),
    ],
)
def test_draws_are_reproducible_and_in_range_also_with_extreme_parameters(text: str) -> None:
    distribution = parse_distribution(text)
    values = _draw(distribution, 100)
    assert values.dtype == np.int64
    assert values.min() >= vars(distribution)["low"]
    assert values.max() <= (vars(distribution)["high"] or 2**63 - 1024)
    assert values.tolist() == _draw(distribution, 100).tolist()


def test_values_are_drawn_as_often_as_they_were_observed() -> None:
    histogram = Histogram.of(np.array([9, 2, 2, 2, 9, 0]))
    assert (histogram.values.tolist(), histogram.counts.tolist()) == ([0, 2, 9], [1, 3, 2])
    values, counts = np.unique(_draw(histogram), return_counts=True)
    assert values.tolist() == [0, 2, 9]
    assert counts / 100_000 == pytest.approx([1 / 6, 3 / 6, 2 / 6], abs=0.01)
    assert np.array_equal(_draw(histogram), _draw(pickle.loads(pickle.dumps(histogram))))


@pytest.mark.parametrize("column", ["length", "item_id", "segment", "user_id"])
def test_a_column_of_a_dataset_becomes_a_distribution(small_dataset: Path, column: str) -> None:
    store = open_store(small_dataset)
    observed = {"length": store.lengths, **store.columns}[column]
    histogram = Histogram.read(small_dataset, column)
    assert np.array_equal(np.repeat(histogram.values, histogram.counts), np.sort(observed))
    of_column = "" if column == "length" else f",column={column},split=train"
    assert repr(parse_distribution(f"histogram:path={small_dataset}{of_column}")) == repr(histogram)
    assert repr(histogram) == (
        f"Histogram(source='{column} of {small_dataset}, train', low={observed.min()}, high={observed.max()}, "
        f"distinct={len(np.unique(observed))}, observations={len(observed)})"
    )
