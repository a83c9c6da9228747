from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.testing import assert_allclose

from end_to_end import rank_plots
from end_to_end.reports.plots import typical_step
from end_to_end.results import LIVE, RunResult
from tests.scripts.bench.end_to_end import made_up


def run(compute: Any, loads: Any, **settings: Any) -> RunResult:
    """Return a run whose ranks wait 1 ms for embeddings, and at the end for the slowest of them and 1 ms more."""
    compute = np.asarray(compute, dtype=float)
    ones = np.ones_like(compute)
    segment = made_up.marked(LIVE, 0, ones, compute, compute.max(axis=0) - compute + ones)
    return made_up.result("a", [segment], settings=settings, balanced=made_up.work(loads=np.array(loads)))


def drawn(axes: Axes) -> Any:
    return np.asarray(axes.images[0].get_array())


def bars(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def unbalanced() -> RunResult:
    return run([[30, 10, 6], [10, 30, 6]], [[9, 3, 2], [3, 9, 2]], balance="none")


def balanced() -> RunResult:
    return run([[25, 21, 6], [25, 19, 6]], [[6, 6, 2], [6, 6, 2]], strategy="lpt-swap")


def test_ranks_are_drawn_relative_to_the_mean_of_the_step_on_one_scale() -> None:
    figure = rank_plots.ranks(unbalanced(), balanced())

    panels = figure.axes[:4]
    assert_allclose(drawn(panels[0]), [[1.5, 0.5, 1], [0.5, 1.5, 1]])
    assert_allclose(drawn(panels[1]), [[1.5, 0.5, 1], [0.5, 1.5, 1]])
    assert_allclose(drawn(panels[2]), np.ones((2, 3)))
    assert_allclose(drawn(panels[3]), [[1, 1.05, 1], [1, 0.95, 1]])
    assert [axes.images[0].get_clim() for axes in panels] == [pytest.approx((0.5, 1.5))] * 4
    assert [axes.get_title(loc="left") for axes in panels] == [
        "load, unbalanced: heaviest 1.33",
        "compute time, unbalanced: heaviest 1.33",
        "load, lpt-swap: heaviest 1.00",
        "compute time, lpt-swap: heaviest 1.02",
    ]


def test_only_the_first_steps_are_drawn() -> None:
    steps = rank_plots.SHOWN_STEPS + 5
    batch = np.arange(steps) % 2
    segment = made_up.segment(LIVE, 0, [10] * steps, batch=list(batch))
    result = made_up.result("a", [segment])

    axes = rank_plots.ranks(result, result).axes[0]

    assert_allclose(drawn(axes), np.array([[1.5, 1], [0.5, 1]])[:, batch[: rank_plots.SHOWN_STEPS]])


def test_equal_ranks_have_the_colour_of_the_mean() -> None:
    result = run([[10], [10]], [[5, 5], [5, 5]])

    image = rank_plots.ranks(result, result).axes[0].images[0]

    assert image.get_clim() == pytest.approx((0.99, 1.01))


def test_typical_step_is_that_of_the_median_time() -> None:
    # Steps take 12, 22 and 8 ms.
    step = typical_step(run([[10, 20, 6], [10, 20, 6]], np.ones((2, 3))))

    assert (step.batch, step.milliseconds) == (0, 12)
    assert_allclose(step.marks, [[0, 1, 1 + 10 / 3, 11, 12]] * 2)


def test_typical_step_of_a_batch() -> None:
    segment = made_up.segment(LIVE, 0, [1, 2, 3, 4, 30], batch=[7, 7, 9, 9, 9])
    result = made_up.result("a", [segment])

    assert typical_step(result, batch=9).milliseconds == pytest.approx(4)
    assert typical_step(result, batch=5).milliseconds == pytest.approx(3)


def test_timeline_has_the_same_batch_before_and_after_balancing_on_one_axis() -> None:
    figure = rank_plots.timeline(unbalanced(), balanced())

    before, after = figure.axes
    assert before.get_xlim() == after.get_xlim()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["unbalanced: 32.0 ms", "lpt-swap: 27.0 ms"]
    # That of the balanced run is not its median step. Of each part, the bars of ranks 0 and 1.
    starts = np.array([bar.get_x() for bar in bars(before)]).reshape(4, 2)
    widths = np.array([bar.get_width() for bar in bars(before)]).reshape(4, 2)
    assert_allclose(starts[0], 0)
    assert_allclose(widths, np.array([[1, 1], [10, 10 / 3], [20, 20 / 3], [1, 21]]))
    assert_allclose(starts[1:], (starts + widths)[:-1])
    widths = np.array([bar.get_width() for bar in bars(after)]).reshape(4, 2)
    assert_allclose(widths[3], [1, 1])
    assert figure.legends[0].get_texts()[3].get_text() == "waiting for gradients, optimizer"


def test_timeline_begins_when_the_first_rank_does() -> None:
    segment = made_up.segment(LIVE, 0, [10])
    segment.marks[0] += 105
    segment.marks[1] += 100

    step = typical_step(made_up.result("a", [segment]))

    assert_allclose(step.marks[:, 0], [5, 0])
