from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.testing import assert_allclose
from rendering.figures import WIDTH, save

from end_to_end.reports import plots
from end_to_end.reports.columns import make_rows
from end_to_end.reports.plots import typical_step
from end_to_end.results import EVEN, LIVE, RunResult
from tests.scripts.bench.end_to_end import made_up

FLOPS = 502_000  # of a made-up batch 0, on both GPUs
BIG = {"per_token": 10**9, "per_pair": 10**7, "per_prediction": 10**8}  # a million times those of other results


def run(name: str, ms: float, **fields: Any) -> RunResult:
    segments = [made_up.segment(LIVE, 0, [ms]), made_up.segment(EVEN, 0, [10])]
    return made_up.result(name, segments, peak_flops=1e12, flops=BIG, **fields)


def of_ranks(compute: Any, loads: Any, **settings: Any) -> RunResult:
    """Return a run whose ranks wait 1 ms for embeddings, and at the end for the slowest of them and 1 ms more."""
    compute = np.asarray(compute, dtype=float)
    ones = np.ones_like(compute)
    segment = made_up.marked(LIVE, 0, ones, compute, compute.max(axis=0) - compute + ones)
    return made_up.result("a", [segment], settings=settings, balanced=made_up.work(loads=np.array(loads)))


UNBALANCED = of_ranks([[30, 10, 6], [10, 30, 6]], [[9, 3, 2], [3, 9, 2]], balance="none")
BALANCED = of_ranks([[25, 21, 6], [25, 19, 6]], [[6, 6, 2], [6, 6, 2]], strategy="lpt-swap")


def bars(axes: Axes, of: str = "width") -> list[float]:
    return [getattr(patch, f"get_{of}")() for patch in axes.patches if isinstance(patch, Rectangle)]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_throughput_has_a_bar_for_each_run_and_the_reason_of_those_that_failed(tmp_path: Path) -> None:
    runs = [
        made_up.result("padded", failure="expected 4 processes, but one of them has ended before the first step " * 3),
        run("plain", 12.5),
        run("+ balance", 10, adds_to="plain", settings={"strategy": "lpt-swap"}),
        run("+ recompute, embedding lookups overlapped with everything", 8, adds_to="plain"),
    ]
    figure = plots.throughput(make_rows(runs))
    axes = figure.axes[0]
    assert bars(axes) == pytest.approx([FLOPS / 2 / ms * 1e-3 for ms in (12.5, 10, 8)])
    assert texts(axes)[0].startswith("failed: expected 4 processes")
    assert texts(axes)[1:] == ["20", "25  +25.0%", "31  +56.2% over plain"]
    # Long texts are inside the figure.
    figure.draw_without_rendering()
    assert max(text.get_window_extent().x1 for text in axes.texts) <= figure.bbox.width
    # The peak is 1 TFLOP/s, of which the longest bar is MFU 31.4.
    assert np.array(axes.child_axes[0].get_xlim()) == pytest.approx(100 * np.array(axes.get_xlim()))
    save(figure, tmp_path / "plots" / "throughput.png")
    assert matplotlib.image.imread(tmp_path / "plots" / "throughput.png").shape[1] == round(WIDTH * 150)


def test_timeline_has_the_same_batch_before_and_after_balancing_on_one_axis() -> None:
    figure = plots.timeline(UNBALANCED, BALANCED)
    before, after = figure.axes
    assert before.get_xlim() == after.get_xlim()
    # That of the balanced run is not its median step. Of each part, the bars of ranks 0 and 1.
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["unbalanced: 32.0 ms", "lpt-swap: 27.0 ms"]
    starts, widths = (np.array(bars(before, of)).reshape(4, 2) for of in ("x", "width"))
    assert_allclose(starts[0], 0)
    assert_allclose(widths, np.array([[1, 1], [10, 10 / 3], [20, 20 / 3], [1, 21]]))
    assert_allclose(starts[1:], (starts + widths)[:-1])
    segment = made_up.segment(LIVE, 0, [1, 2, 3, 4, 30], batch=[7, 7, 9, 9, 9])
    segment.marks[0] += 105
    segment.marks[1] += 100
    steps = [typical_step(made_up.result("a", [segment]), batch=batch) for batch in (9, 5)]
    assert [step.milliseconds for step in steps] == pytest.approx([4, 3])
    assert_allclose(steps[0].marks[:, 0], [5, 0])
