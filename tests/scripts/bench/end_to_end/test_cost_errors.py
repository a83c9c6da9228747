import numpy as np
import pytest

from end_to_end import cost_errors
from end_to_end.reports.cost_section import BALANCED, FITTED, Comparison, Errors


def test_errors_of_predictions() -> None:
    errors = Errors.of(np.array([11.0, 20.0, 24.0]), np.array([10.0, 20.0, 30.0]))
    assert errors.median == pytest.approx(0.1)  # of 0.1, 0, 0.2
    assert errors.p95 == pytest.approx(0.19)
    assert errors.r2 == pytest.approx(1 - 37 / 200)
    assert Errors.of(np.array([3.0, 5.0]), np.array([3.0, 5.0])) == Errors(r2=1, median=0, p95=0)
    assert np.isnan(Errors.of(np.array([3.0, 5.0]), np.array([4.0, 4.0])).r2)


def test_points_are_drawn_for_both_costs() -> None:
    times = np.linspace(10, 90, 5000)
    made = [
        Comparison(name=kind, lengths="a", kind=kind, measured=times, by_fit=times, by_hstu=times * 2)
        for kind in (FITTED, BALANCED)
    ]
    figure = cost_errors.draw(made, title="a $ sign")
    for axes, factor in zip(figure.axes, (1, 2), strict=True):
        for points in axes.collections:
            measured, predicted = np.asarray(points.get_offsets()).T
            assert len(measured) <= 2000
            assert predicted == pytest.approx(factor * measured)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [FITTED, BALANCED, "exact"]
