import numpy as np
import pytest

from end_to_end.results import EVEN, LIVE, Spread, ratio
from tests.scripts.bench.end_to_end import made_up


def test_a_disturbed_round_counts_in_means_alone() -> None:
    live = [made_up.segment(LIVE, number, [milliseconds]) for number, milliseconds in enumerate([20.0, 10.0, 12.0])]
    result = made_up.result("a", [*live, *(made_up.segment(EVEN, number, [10]) for number in range(3))])
    for average, expected in ((np.median, 1.2), (np.mean, 1.4)):
        spread = made_up.given(ratio(result, (LIVE, EVEN), average))
        assert (spread.value, spread.low, spread.high) == pytest.approx((expected, 1, 2))


def test_ratio_leaves_out_rounds_and_batches_without_a_partner() -> None:
    live = [made_up.segment(LIVE, 0, [10, 50, 50], batch=[0, 1, 1]), made_up.segment(LIVE, 1, [7])]
    even = made_up.segment(EVEN, 0, [5, 5], batch=[0, 2])
    spread = made_up.given(ratio(made_up.result("a", [*live, even]), (LIVE, EVEN)))
    assert (spread.value, spread.low, spread.high) == pytest.approx((2, 2, 2))
    assert ratio(made_up.result("a", [live[1], even]), (LIVE, EVEN)) is None
    assert Spread.of_rounds([]) is None
