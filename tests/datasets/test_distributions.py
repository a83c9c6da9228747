import math
import pickle
from pathlib import Path

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


def _draw(distribution: Distribution, size: int = 100_000) -> NDArray[np.int64]:
    return distribution.sample(np.random.default_rng(0), size)


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 1.0 + 1e-9, 1.2, 2.0, 7.0])
@pytest.mark.parametrize(("first", "span"), [(1, 0), (1, 1), (1, 3000), (1000, 3000), (1, math.inf)])
def test_zipf_draws_have_the_exact_probabilities(exponent: float, first: int, span: float) -> None:
    if span == math.inf and exponent < 1.1:
        pytest.skip("has no distribution")
    last = int(min(span, 10_000))
    drawn = draw_zipf(np.random.default_rng(5), 200_000, exponent=exponent, first=first, span=span)
    counts = np.bincount(np.minimum(drawn, last).astype(np.int64), minlength=last + 1)
    mass = ((first + np.arange(last + 1)) / first) ** -exponent
    if span == math.inf:  # of all from there on, by Euler and Maclaurin
        mass[-1] = (last + first - 0.5) ** (1 - exponent) / (exponent - 1)
    expected = counts.sum() * mass / mass.sum()
    is_common = expected >= 5  # the rest is one category
    observed = np.append(counts[is_common], counts[~is_common].sum())
    expected = np.maximum(np.append(expected[is_common], expected[~is_common].sum()), 1e-9)
    # By how many standard deviations the chi-square statistic is above its mean.
    degrees = max(np.count_nonzero(expected > 1e-9) - 1, 1)
    assert (((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees) < 5


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
    assert parse_distribution("lognormal:mean=512,std=256.5,high=4096") == Lognormal(mean=512, std=256.5, high=4096)
    assert parse_distribution("zipf:low=0,high=none,shift=1") == Zipf(low=0, high=None, shift=1)


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


@pytest.mark.parametrize("column", ["length", "item_id", "segment"])
def test_a_column_of_a_dataset_becomes_a_distribution(small_dataset: Path, column: str) -> None:
    store = open_store(small_dataset)
    observed = {"length": store.lengths, **store.columns}[column]
    histogram = Histogram.read(small_dataset, column)
    assert np.array_equal(np.repeat(histogram.values, histogram.counts), np.sort(observed))
    of_column = "" if column == "length" else f",column={column},split=train"
    assert repr(parse_distribution(f"histogram:path={small_dataset}{of_column}")) == repr(histogram)
    assert f"'{column} of {small_dataset}, train', low={observed.min()}, high={observed.max()}" in repr(histogram)
    copy = pickle.loads(pickle.dumps(histogram))
    assert _draw(copy).tolist() == _draw(histogram).tolist()
    values, counts = np.unique(_draw(copy), return_counts=True)
    expected = histogram.counts[np.searchsorted(histogram.values, values)] / len(observed)
    assert counts / 100_000 == pytest.approx(expected, abs=0.01)
