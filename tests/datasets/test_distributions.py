import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.datasets import distributions as of
from evenrank.datasets import open_store


def _draw(distribution: of.Distribution, size: int = 100_000) -> NDArray[np.int64]:
    return distribution.sample(np.random.default_rng(0), size)


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 1.0 + 1e-9, 2.0, 7.0])
def test_zipf_draws_have_the_exact_probabilities(exponent: float) -> None:
    for first, last in ((1, 1), (1, 2), (1, 3000), (1000, 4000)):
        drawn = of.draw_zipf(np.random.default_rng(5), 200_000, exponent=exponent, first=first, span=last - first)
        mass = (np.arange(first, last + 1) / first) ** -exponent
        expected = 200_000 * mass.cumsum() / mass.sum()
        found = np.bincount(drawn.astype(np.int64), minlength=last - first + 1).cumsum()
        assert np.abs(found - expected).max() < 5 * math.sqrt(200_000) / 2  # five standard deviations at most


def test_draws_have_the_probabilities_or_the_mean_and_std_that_were_given() -> None:
    values, mass = _draw(of.ClippedZipf(exponent=2, high=4)), np.array([1, 1 / 4, 1 / 9]) / (math.pi**2 / 6)
    assert np.bincount(values, minlength=5)[1:] / len(values) == pytest.approx([*mass, 1 - mass.sum()], abs=0.005)
    for of_items in (of.Zipf, of.ClippedZipf):
        from_zero = _draw(of_items(exponent=2, low=0, high=49, shift=1))
        assert np.array_equal(from_zero + 1, _draw(of_items(exponent=2, high=50)))
    assert np.bincount(_draw(of.Uniform(low=2, high=3))) / 100_000 == pytest.approx([0, 0, 0.5, 0.5], abs=0.01)
    for kind in (of.Normal, of.Lognormal):
        values = _draw(kind(mean=512, std=128, low=0, high=10**6))
        assert (values.mean(), values.std()) == (pytest.approx(512, rel=0.01), pytest.approx(128, rel=0.03))
    drawn = of.draw_actions(of.Uniform(low=3, high=5), np.random.default_rng(0), 100)
    assert (str(drawn.dtype), {*drawn.tolist()}) == ("int32", {3, 4, 5})


IN_RANGE = {
    "lognormal:mean=512,std=256.5,high=4096": (1, 4096),
    "normal:mean=1e308,std=1e308,high=9": (1, 9),
    "lognormal:mean=1e-300,std=1e-200,high=9": (1, 9),
    "zipf:exponent=100,low=9223372036854774784,high=none": (9223372036854774784, 2**63 - 1024),
    "zipf:low=0,high=none,shift=1": (0, 2**63 - 1024),
    "clipped-zipf:exponent=1.0000000001,high=9": (1, 9),
    "uniform:low=0,high=9223372036854774784": (0, 9223372036854774784),
}


def test_text_is_parsed_and_draws_are_reproducible_and_in_range() -> None:
    for text, (low, high) in IN_RANGE.items():
        values = _draw(of.parse_distribution(text), 100)
        assert values.dtype == np.int64
        assert low <= values.min() <= values.max() <= high
        assert values.tolist() == _draw(of.parse_distribution(text), 100).tolist()


def test_a_column_of_a_dataset_becomes_a_distribution(small_dataset: Path) -> None:
    store = open_store(small_dataset)
    for column, observed in {"length": store.lengths, **store.columns}.items():
        histogram = of.Histogram.read(small_dataset, column)
        assert np.array_equal(np.repeat(histogram.values, histogram.counts), np.sort(observed))
    of_column = f"histogram:path={small_dataset},column={column},split=train"
    assert repr(of.parse_distribution(of_column)) == repr(histogram)
    copied = pickle.loads(pickle.dumps(of.Histogram.read(small_dataset)))
    values, counts = np.unique(_draw(copied), return_counts=True)
    expected = [np.mean(store.lengths == value) for value in values]
    assert counts / 100_000 == pytest.approx(expected, abs=0.01)
