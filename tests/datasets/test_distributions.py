import math
import pickle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
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

_EXPONENTS = (0.0, 0.3, 1.0, 1.0 + 1e-9, 1.2, 2.0, 7.0)


def _draw(distribution: Distribution, size: int = 200_000) -> NDArray[np.int64]:
    return distribution.sample(np.random.default_rng(0), size)


def test_clipped_zipf_sets_larger_draws_to_the_largest_value() -> None:
    values = _draw(ClippedZipf(exponent=2, high=4))
    mass = np.array([1, 1 / 4, 1 / 9]) / (math.pi**2 / 6)
    assert np.bincount(values, minlength=5)[1:] / len(values) == pytest.approx([*mass, 1 - mass.sum()], abs=0.005)


@pytest.mark.parametrize("kind", [Zipf, ClippedZipf])
def test_zipf_can_start_from_zero_with_the_same_probabilities(kind: type[Zipf | ClippedZipf]) -> None:
    from_zero = _draw(kind(exponent=2, low=0, high=49, shift=1))
    assert np.array_equal(from_zero + 1, _draw(kind(exponent=2, high=50)))


def test_uniform_draws_both_bounds_and_actions_are_int32() -> None:
    counts = np.bincount(_draw(Uniform(low=2, high=5)), minlength=6)
    assert counts[:2].sum() == 0
    assert counts[2:] / counts.sum() == pytest.approx(np.full(4, 0.25), abs=0.01)
    drawn = draw_actions(Uniform(low=3, high=5), np.random.default_rng(0), 100)
    assert drawn.dtype == np.int32
    assert set(drawn.tolist()) == {3, 4, 5}
    with pytest.raises(ConfigError, match="actions must be between 0 and 2147483647, got 2147483648 to 2147483648"):
        draw_actions(Uniform(low=1 << 31, high=1 << 31), np.random.default_rng(0), 2)


@pytest.mark.parametrize("kind", [Uniform, Normal, Lognormal, Zipf, ClippedZipf])
def test_draws_are_reproducible_in_range_and_have_the_given_mean_and_std(kind: type[Distribution]) -> None:
    distribution = kind(low=3, high=90)  # type: ignore[call-arg]
    values = _draw(distribution, 1000)
    assert values.dtype == np.int64
    assert (values >= 3).all()
    assert (values <= 90).all()
    assert np.array_equal(values, _draw(distribution, 1000))
    if kind in (Normal, Lognormal):
        values = _draw(kind(mean=512, std=128, low=0, high=10**6))
        assert values.mean() == pytest.approx(512, rel=0.01)
        assert values.std() == pytest.approx(128, rel=0.03)


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
def test_extreme_parameters_give_values_in_range(text: str) -> None:
    distribution = parse_distribution(text)
    values = distribution.sample(np.random.default_rng(0), 100)
    assert values.min() >= vars(distribution)["low"]
    assert values.max() <= (vars(distribution)["high"] or 2**63 - 1024)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma", "unknown distribution 'gamma'.*known: uniform, normal, zipf, clipped-zipf, lognormal, histogram"),
        ("zipf:low=1,high=5,low=2", "zipf has low twice .*; give it once"),
        ("zipf:alpha=2", "zipf has no parameter 'alpha'.*known: exponent, low, high, shift"),
        ("zipf:low=x", "low must be int, got 'x'"),
        ("uniform:low=5,high=4", "Uniform: low must be at most high, got low=5 and high=4"),
        (
            "uniform:high=9223372036854775807",
            "Uniform: high must be at least 0 and at most 9223372036854774784, got 9223372036854775807",
        ),
        ("zipf:low=0", "low . shift must be at least 1, got low=0 shift=0; pass shift=1 for values from 0"),
        ("zipf:exponent=-1", "Zipf: exponent must be at least 0 and at most 100, got -1.0"),
        ("clipped-zipf:exponent=1", "ClippedZipf: exponent must be above 1 and at most 100, got 1.0"),
        ("clipped-zipf:high=none", "high must be int, got 'none'"),
        ("histogram:column=length", "histogram needs path .*; write histogram:path="),
        ("lognormal:mean=nan", "Lognormal: mean must be above 0 and finite, got nan"),
        ("lognormal:std=inf", "Lognormal: std must be at least 0 and finite, got inf"),
        (
            "lognormal:mean=1e-308,std=1e308",
            "std must be at most 10.100 times the mean, got mean=1e-308 and std=1e.308",
        ),
        ("normal:mean=nan", "Normal: mean must be finite, got nan"),
        ("zipf:exponent=nan", "Zipf: exponent must be at least 0 and at most 100, got nan"),
    ],
)
def test_invalid_text_is_refused_with_the_known_names(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_distribution(text)


def _chi_square_deviation(counts: NDArray[np.int64], mass: NDArray[np.float64]) -> float:
    """Return by how many standard deviations the chi-square statistic is above its mean, given one count per mass."""
    expected = counts.sum() * mass / mass.sum()
    is_common = expected >= 5  # the rest is one category
    observed = np.append(counts[is_common], counts[~is_common].sum())
    expected = np.append(expected[is_common], expected[~is_common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(len(observed) - 1, 1)
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("exponent", _EXPONENTS)
@pytest.mark.parametrize(("first", "span"), [(1, 0), (1, 1), (1, 3000), (2, 40), (1000, 3000)])
def test_zipf_draws_have_the_exact_probabilities(exponent: float, first: int, span: int) -> None:
    drawn = draw_zipf(np.random.default_rng(5), 200_000, exponent=exponent, first=first, span=span)
    counts = np.bincount(drawn.astype(np.int64), minlength=span + 1)
    assert len(counts) == span + 1
    assert _chi_square_deviation(counts, ((first + np.arange(span + 1)) / first) ** -exponent) < 5


@pytest.mark.parametrize("exponent", [1.2, 2.0, 7.0])
def test_unbounded_zipf_draws_have_the_exact_probabilities(exponent: float) -> None:
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
def test_zipf_draws_are_integers_in_the_range(exponent: float, first: int, span: float, seed: int) -> None:
    exponent = max(exponent, 1.01) if span == math.inf else exponent
    drawn = draw_zipf(np.random.default_rng(seed), 50, exponent=exponent, first=first, span=span)
    assert drawn.shape == (50,)
    assert (drawn == np.rint(drawn)).all()
    assert drawn.min() >= 0
    assert drawn.max() <= span


@pytest.mark.parametrize("exponent", _EXPONENTS)
def test_zipf_rejects_few_points(exponent: float) -> None:
    rng = Mock(wraps=np.random.default_rng(0))
    draw_zipf(rng, 100_000, exponent=exponent, first=1, span=10**6)
    assert 100_000 <= sum(call.args[0] for call in rng.random.call_args_list) < 120_000


def test_values_are_drawn_as_often_as_they_were_observed() -> None:
    histogram = Histogram.of(np.array([9, 2, 2, 2, 9, 0]))
    assert histogram.values.tolist() == [0, 2, 9]
    assert histogram.counts.tolist() == [1, 3, 2]
    drawn = histogram.sample(np.random.default_rng(0), 60_000)
    assert drawn.dtype == np.int64
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [0, 2, 9]
    assert counts / 60_000 == pytest.approx([1 / 6, 3 / 6, 2 / 6], abs=0.01)
    assert np.array_equal(drawn, pickle.loads(pickle.dumps(histogram)).sample(np.random.default_rng(0), 60_000))


@pytest.mark.parametrize("column", ["length", "item_id", "action", "segment", "user_id"])
def test_a_column_of_a_dataset_becomes_a_distribution(small_dataset: Path, column: str) -> None:
    store = open_store(small_dataset)
    observed = {"length": store.lengths, **store.columns}[column]
    histogram = Histogram.read(small_dataset, column)
    assert np.array_equal(np.repeat(histogram.values, histogram.counts), np.sort(observed))
    parsed = parse_distribution(f"histogram:path={small_dataset},column={column},split=train")
    assert repr(parsed) == repr(histogram)
    if column == "length":
        assert repr(parse_distribution(f"histogram:path={small_dataset}")) == repr(histogram)
    assert repr(histogram) == (
        f"Histogram(source='{column} of {small_dataset}, train', low={observed.min()}, high={observed.max()}, "
        f"distinct={len(np.unique(observed))}, observations={len(observed)})"
    )


def test_a_column_without_a_distribution_is_refused(small_dataset: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no integer column 'genre'; known: length, user_id, segment, item_id, action, timestamp_ms"
    ):
        Histogram.read(small_dataset, "genre")
    with pytest.raises(DataError, match="has no split 'test'; known: eval, train"):
        Histogram.read(small_dataset, split="test")
    with pytest.raises(ConfigError, match="a histogram needs observations of at least 0, got -2"):
        Histogram.of(np.array([3, -2]))
    with pytest.raises(ConfigError, match="a histogram needs observations of at least 0, got none"):
        Histogram.of(np.array([], dtype=np.int64))
    with pytest.raises(ConfigError, match="must ascend from at least 0 and its counts be at least 1"):
        Histogram(values=np.array([2, 1]), counts=np.array([1, 1]))
    with pytest.raises(ConfigError, match="as many counts as values and at least one, got 2 values and 1 counts"):
        Histogram(values=np.array([1, 2]), counts=np.array([1]))
