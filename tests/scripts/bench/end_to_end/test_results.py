import numpy as np
import pytest

from end_to_end.results import EVEN, LIVE, Spread, compute_ms, job_ms, ratio, step_ms
from tests.scripts.bench.end_to_end import made_up


def test_times_come_from_marks() -> None:
    segment = made_up.marked(LIVE, 0, before=[[1, 1], [1, 2]], compute=[[6, 3], [2, 2]], after=[[1, 1], [5, 2]])

    np.testing.assert_allclose(step_ms(segment), [[8, 5], [8, 6]])
    np.testing.assert_allclose(compute_ms(segment), [[6, 3], [2, 2]])
    np.testing.assert_allclose(job_ms(segment), [8, 5.5])


def test_ratio_is_of_medians_of_batches_and_then_the_mean_over_rounds() -> None:
    result = made_up.result(
        "a",
        [
            made_up.segment(LIVE, 0, [10, 12, 100, 24], batch=[0, 0, 0, 1]),
            made_up.segment(EVEN, 0, [10, 10, 20], batch=[0, 0, 1]),
            made_up.segment(EVEN, 1, [20, 20]),
            made_up.segment(LIVE, 1, [20, 20]),
        ],
    )

    spread = made_up.given(ratio(result, (LIVE, EVEN)))
    assert (spread.value, spread.low, spread.high) == pytest.approx((1.1, 1.0, 1.2))
    assert spread.noise == pytest.approx(0.1)


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
