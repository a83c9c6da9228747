import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import Distribution, Lognormal, Normal, Uniform, Zipf, parse_distribution


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


def test_uniform_draws_both_bounds() -> None:
    counts = np.bincount(_draw(Uniform(low=2, high=5)), minlength=6)
    assert counts[:2].sum() == 0
    assert counts[2:] / counts.sum() == pytest.approx(np.full(4, 0.25), abs=0.01)


@pytest.mark.parametrize("kind", [Uniform, Normal, Lognormal, Zipf])
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma", "unknown distribution 'gamma'.*known: uniform, normal, zipf, lognormal"),
        ("zipf:alpha=2", "zipf has no parameter 'alpha'.*known: exponent, low, high"),
        ("zipf:low=x", "low must be int, got 'x'"),
        ("uniform:low=5,high=4", "low=5 high=4"),
        ("lognormal:mean=0", "mean must be positive"),
    ],
)
def test_invalid_text_is_refused_with_the_known_names(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_distribution(text)
