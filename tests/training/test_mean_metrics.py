import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.training.metrics import MeanMetrics

TERMS = st.one_of(
    st.floats(0, allow_infinity=False, allow_nan=False), st.sampled_from([0.0, 5e-324, 2.0**-1022, 1.0, 2.0**52 - 1])
)


def _means(columns: Sequence[tuple[float, ...]], weights: Sequence[float] | None = None) -> list[float]:
    metric = MeanMetrics(["a", "b"], {}, None, "cpu")
    terms = torch.tensor(columns, dtype=torch.float64).view(-1, 2)
    metric.add_terms(terms, None if weights is None else torch.tensor(weights, dtype=torch.float64))
    return list(metric.compute().values())


def _exact(terms: Sequence[float]) -> float:
    return float(sum(map(Fraction, terms)) / len(terms)) if terms else math.nan


@given(samples=st.lists(st.tuples(TERMS, TERMS), max_size=50))
@example(samples=[(2.0**1023, 5e-324), (2.0**1023, 5e-324), (1.7e308, 1e-323)])  # whose sum overflows, or is subnormal
def test_a_mean_is_the_exact_one_rounded_once(samples: list[tuple[float, float]]) -> None:
    expected = [_exact([sample[column] for sample in samples]) for column in range(2)]
    assert _means(samples) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


WEIGHTS = st.floats(0, 1e3, allow_subnormal=False)


@given(samples=st.lists(st.tuples(st.floats(0, 1e9), WEIGHTS), max_size=30), random=st.randoms())
def test_weighted_means_have_equal_bits_in_any_order(samples: list[tuple[float, float]], random: random.Random) -> None:
    def means() -> list[float]:
        return _means([(term, 1.0) for term, _ in samples], [weight for _, weight in samples])

    expected = means()
    total = sum(Fraction(weight) for _, weight in samples)
    exact = float(sum(Fraction(term * weight) for term, weight in samples) / total) if total else math.nan
    assert expected == pytest.approx([exact, 1.0 if total else math.nan], rel=0, abs=0, nan_ok=True)
    random.shuffle(samples)
    assert str(means()) == str(expected)


@pytest.mark.parametrize(
    ("terms", "mean"),
    [
        ([math.inf, 1.0], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.copysign(math.nan, -1), 1.0], math.nan),
        ([math.inf, math.nan], math.nan),
    ],
)
def test_infinity_and_nan_stay_in_their_column(terms: list[float], mean: float) -> None:
    assert _means([(term, 2.0) for term in terms]) == pytest.approx([mean, 2.0], nan_ok=True)


def test_samples_are_added_by_several_calls_and_forgotten_by_reset() -> None:
    metric = MeanMetrics(["a"], {}, None, "cpu")
    for term in (1.0, 2.0, 6.0):
        metric.add_terms(torch.tensor([[term]], dtype=torch.float64, requires_grad=True))
        metric.add_terms(torch.empty(0, 1, dtype=torch.float64))
    assert metric.compute() == metric.compute() == {"a": 3.0}
    metric.reset()
    assert math.isnan(metric.compute()["a"])


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights must be \[2\], one per sample, got \[1\]"):
        _means([(1.0, 1.0), (1.0, 1.0)], [1.0])
