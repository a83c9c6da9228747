from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from end_to_end import plots
from end_to_end.reports.columns import Row, make_rows
from end_to_end.results import EVEN, LIVE, RunResult
from evenrank.cli.reports import svg
from rendering.figures import WIDTH, save
from tests.scripts.bench.end_to_end import made_up

FLOPS = 502_000  # of a made-up batch 0, on both GPUs


def run(name: str, ms: float, *, even: float = 10, **fields: Any) -> RunResult:
    segments = [made_up.segment(LIVE, 0, [ms]), made_up.segment(EVEN, 0, [even])]
    return made_up.result(name, segments, peak_flops=1e12, flops=BIG, **fields)


BIG = {"per_token": 10**9, "per_pair": 10**7, "per_prediction": 10**8}  # a million times those of other results


def rows() -> tuple[Row, ...]:
    return make_rows(
        [
            made_up.result("padded", failure="out of memory"),
            run("plain", 12.5),
            run("+ balance", 10, adds_to="plain", settings={"strategy": "lpt-swap"}),
            run("+ recompute", 8, adds_to="plain", settings={"balance": "none", "recompute": True}),
        ]
    )


def bars(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def is_inside(figure: Figure, axes: Axes) -> bool:
    """Return whether all texts of the axes are inside the figure."""
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    boxes = [text.get_window_extent() for text in axes.texts]
    return all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)


def test_throughput_has_a_bar_for_each_run_and_the_reason_of_those_that_failed() -> None:
    figure = plots.throughput(rows())
    axes = figure.axes[0]

    tflops = [FLOPS / 2 / ms * 1e-3 for ms in (12.5, 10, 8)]
    assert [bar.get_width() for bar in bars(axes)] == pytest.approx(tflops)
    assert [bar.get_y() + bar.get_height() / 2 for bar in bars(axes)] == pytest.approx([1, 2, 3])
    assert texts(axes) == ["failed: out of memory", "20", "25  +25.0%", "31  +56.2% over plain"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["padded", "plain", "+ balance", "+ recompute"]
    assert is_inside(figure, axes)


def test_the_other_axis_of_throughput_is_mfu() -> None:
    figure = plots.throughput(rows())
    figure.draw_without_rendering()
    axes = figure.axes[0]
    other = axes.child_axes[0]

    # The peak is 1 TFLOP/s, of which the longest bar is MFU 31.4.
    assert np.array(other.get_xlim()) == pytest.approx(100 * np.array(axes.get_xlim()))
    assert other.get_xlabel() == "MFU (%)"


def test_long_names_are_not_cut_off() -> None:
    long = "+ embedding lookups overlapped with everything"
    failed = made_up.result("d", failure="expected 4 processes, but one of them has ended before the first step " * 3)
    chain = [failed, run("a", 10), run(long, 5, adds_to="a"), run("b", 5, adds_to="a"), run("c", 2, adds_to=long)]

    figure = plots.throughput(make_rows(chain))

    assert is_inside(figure, figure.axes[0])


def test_headline_splits_bars_at_the_perfectly_even_batch() -> None:
    balanced = {"strategy": "lpt-swap"}
    tables = {
        "lognormal": make_rows([run("a", 12.5), run("b", 10.02, settings=balanced)]),
        "zipf": make_rows([run("a", 13), run("b", 9.9, settings=balanced), made_up.result("c", failure="no")]),
    }

    figure = plots.headline(tables)

    first, second = figure.axes
    assert [bar.get_width() for bar in bars(first)] == pytest.approx([1, 0.25, 1, 0.002])
    assert [bar.get_width() for bar in bars(second)] == pytest.approx([1, 0.3, 0.99, 0])
    assert [bar.get_x() for bar in bars(first)] == [0, 1, 0, 1]
    assert [label.get_text() for label in first.get_yticklabels()] == ["unbalanced", "lpt-swap"]
    assert texts(first) == ["1.250", "", "1.002", "1.25x as fast"]
    assert texts(second) == ["1.300", "", "0.990", "1.31x as fast"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["lognormal", "zipf"]
    assert np.array_equal(first.lines[0].get_xdata(), [1, 1])
    assert is_inside(figure, first)
    assert is_inside(figure, second)


def test_headline_says_what_was_not_measured() -> None:
    tables = {
        "lognormal": make_rows([run("a", 12.5), run("b", 10.02, settings={"strategy": "min-move"})]),
        "zipf": make_rows([run("a", 13)]),
    }

    assert texts(plots.headline(tables).axes[1])[-1] == "not measured"


def test_written_plots_are_as_wide_as_others_and_have_bars(tmp_path: Path) -> None:
    path = tmp_path / "plots" / "throughput.png"

    save(plots.throughput(rows()), path)

    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] == round(WIDTH * 150)
    blue = np.array([int(svg.BLUE[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    assert (np.abs(pixels[..., :3] - blue).max(axis=-1) < 0.01).sum() > 1000
    assert (pixels[0, 0, :3] == 1).all()
