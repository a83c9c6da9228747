import math

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import (
    ClippedZipf,
    Distribution,
    Lognormal,
    Normal,
    Uniform,
    Zipf,
    draw_actions,
    parse_distribution,
)


def _draw(distribution: Distribution, size: int = 200_000) -> NDArray[np.int64]:
    return distribution.sample(np.random.default_rng(0), size)


def test_lognormal_has_the_given_mean_and_std() -> None:
    values = _draw(Lognormal(mean=512, std=512, low=0, high=10**6))
    assert values.mean() == pytest.approx(512, rel=0.01)
    assert values.std() == pytest.approx(512, rel=0.03)


def test_normal_has_the_given_mean_and_std() -> None:
    values = _draw(Normal(mean=500, std=50, high=1000))
    assert values.mean() == pytest.approx(500, rel=0.01)
    assert values.std() == pytest.approx(50, rel=0.02)


def test_zipf_has_the_defined_probabilities() -> None:
    values = _draw(Zipf(exponent=1.2, low=1, high=5))
    mass = np.arange(1, 6) ** -1.2
    assert np.bincount(values, minlength=6)[1:] / len(values) == pytest.approx(mass / mass.sum(), abs=0.005)


def test_zipf_can_start_from_zero_with_the_same_probabilities() -> None:
    from_one, from_zero = _draw(Zipf(high=50)), _draw(Zipf(low=0, high=49, shift=1))
    assert np.array_equal(from_one - 1, from_zero)


def test_zipf_can_be_unbounded() -> None:
    values = _draw(Zipf(exponent=1.05, high=None))
    assert values.min() == 1
    assert values.max() > 2**60
    # The first masses and the zeta function of 1.05, less what is above 2^63: 20.58084 - 20 * 2^(-63 * 0.05).
    total = 20.58084 - 20 * 2 ** (-63 * 0.05)
    for value in (1, 2, 3):
        assert (values == value).mean() == pytest.approx(value**-1.05 / total, abs=0.002)


def test_clipped_zipf_sets_larger_draws_to_the_largest_value() -> None:
    values = _draw(ClippedZipf(exponent=2, high=4))
    mass = np.array([1, 1 / 4, 1 / 9]) / (math.pi**2 / 6)
    assert np.bincount(values, minlength=5)[1:] / len(values) == pytest.approx([*mass, 1 - mass.sum()], abs=0.005)
    assert (values - 1).tolist() == _draw(ClippedZipf(exponent=2, low=0, high=3, shift=1)).tolist()


def test_clipped_zipf_equals_clipped_draws_of_numpy() -> None:
    ours, theirs = _draw(ClippedZipf()), np.minimum(np.random.default_rng(1).zipf(1.2, 200_000), 4096)
    for value in (1, 10, 4096):
        assert (ours == value).mean() == pytest.approx((theirs == value).mean(), abs=0.004)


def test_actions_are_int32_and_in_range() -> None:
    rng = np.random.default_rng(0)
    drawn = draw_actions(Uniform(low=3, high=5), rng, 100)
    assert drawn.dtype == np.int32
    assert set(drawn.tolist()) == {3, 4, 5}
    with pytest.raises(ConfigError, match="actions must be between 0 and 2147483647, got 2147483648 to 2147483648"):
        draw_actions(Uniform(low=1 << 31, high=1 << 31), rng, 2)


def test_uniform_draws_both_bounds() -> None:
    counts = np.bincount(_draw(Uniform(low=2, high=5)), minlength=6)
    assert counts[:2].sum() == 0
    assert counts[2:] / counts.sum() == pytest.approx(np.full(4, 0.25), abs=0.01)


@pytest.mark.parametrize("kind", [Uniform, Normal, Lognormal, Zipf, ClippedZipf])
def test_draws_are_reproducible_and_in_range(kind: type[Distribution]) -> None:
    distribution = kind(low=3, high=90)  # type: ignore[call-arg]
    values = _draw(distribution, 1000)
    assert values.dtype == np.int64
    assert (values >= 3).all()
    assert (values <= 90).all()
    assert np.array_equal(values, _draw(distribution, 1000))


def test_text_is_parsed_into_a_distribution() -> None:
    assert parse_distribution("zipf") == Zipf()
    assert parse_distribution("lognormal:mean=512,std=256.5,high=4096") == Lognormal(mean=512, std=256.5, high=4096)
    assert parse_distribution("zipf:low=0,high=none,shift=1") == Zipf(low=0, high=None, shift=1)
    assert parse_distribution("clipped-zipf:exponent=1.5") == ClippedZipf(exponent=1.5)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "normal:mean=1e308,std=1e308",
            "normal:mean=-1e308",
            "lognormal:mean=1e-300,std=1e-200",
            "lognormal:mean=1e308",
        ),
        *("zipf:exponent=100", "zipf:exponent=100,high=none", "zipf:exponent=100,low=9223372036854774784,high=none"),
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
        ("uniform:low=5,high=4", "low=5 high=4"),
        ("uniform:high=9223372036854775807", "high at most 2.63 - 1024"),
        ("zipf:low=0", "low . shift must be at least 1 .*, got low=0 shift=0; pass shift=1 for values from 0"),
        ("zipf:exponent=-1", "exponent must be at least 0, and at most 100, got -1.0"),
        ("zipf:exponent=inf", "exponent must be at least 0, and at most 100, got inf"),
        ("clipped-zipf:exponent=1", "exponent must be above 1, .* got 1.0"),
        ("clipped-zipf:high=none", "high must be int, got 'none'"),
        ("histogram:column=length", "histogram needs path .*; write histogram:path="),
        ("lognormal:mean=0", "mean must be positive"),
        ("lognormal:mean=nan", "mean must be positive, .*; got mean=nan and std=256.0"),
        ("lognormal:std=inf", "mean must be positive, .*; got mean=128.0 and std=inf"),
        ("lognormal:mean=1e-308,std=1e308", "std at least 0 and at most 10.100 times the mean"),
        ("normal:mean=nan", "mean and std must be finite and std at least 0, got mean=nan and std=64.0"),
        ("normal:std=inf", "mean and std must be finite and std at least 0, got mean=128.0 and std=inf"),
        ("zipf:exponent=nan", "exponent must be at least 0, and at most 100, got nan"),
    ],
)
def test_invalid_text_is_refused_with_the_known_names(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_distribution(text)
