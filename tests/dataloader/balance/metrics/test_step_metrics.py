import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.dataloader.balance.metrics.step_metrics import (
    SHOWN,
    MetricsSummary,
    StepMetrics,
    Unit,
    combine,
    measure_step,
    shown_numbers,
    summarize,
)
from evenrank.dataloader.balance.partition.strategies import Assignment, partition
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, step, timed

COUNTS = st.integers(0, 1000)


@st.composite
def steps(draw: st.DrawFn) -> StepMetrics:
    loads: dict[str, Any] = {name: np.array([draw(COUNTS), draw(COUNTS)]) for name in ("before", "after")}
    numbers: dict[str, Any] = {name: draw(COUNTS) for name in ("samples", "tokens", "sample_bytes")}
    numbers |= {f"moved_{name.removeprefix('sample_')}": draw(st.integers(0, high)) for name, high in numbers.items()}
    numbers |= {f"{part}_seconds": draw(st.floats(0, 10)) for part in ("gather", "plan", "exchange", "waited")}
    numbers |= {name: draw(COUNTS) for name in ("lower_bound", "longest")}
    if draw(st.booleans()):
        times = st.floats(1e-3, 10)
        numbers |= {f"{part}_seconds": np.array([draw(times), draw(times)]) for part in ("compute", "wait")}
    return step(0, **loads, **numbers, is_balanced=draw(st.booleans()))


@given(st.lists(st.lists(steps(), min_size=1, max_size=4), min_size=1, max_size=4))
def test_combined_summaries_equal_the_summary_of_all_their_steps_whose_idle_time_is_that_of_all_rank_time(
    chunks: list[list[StepMetrics]],
) -> None:
    every = [one for chunk in chunks for one in chunk]
    combined, summary = combine([summarize(chunk) for chunk in chunks]), summarize(every)
    assert dataclasses.asdict(combined) == pytest.approx(dataclasses.asdict(summary))
    assert shown_numbers(combined) == pytest.approx(shown_numbers(summary))
    totals = []
    for loads, idle in (("before", summary.idle_before), ("after", summary.idle_after)):
        of_steps = [getattr(one, loads) for one in every if one.is_balanced]
        totals.append(sum(int(of_step.max()) for of_step in of_steps))
        waiting = sum(int((of_step.max() - of_step).sum()) for of_step in of_steps)
        assert idle == pytest.approx(waiting / (2 * totals[-1]) if totals[-1] else 0, abs=1e-12)
    assert summary.speedup == pytest.approx(totals[0] / totals[1] if totals[1] else 1)


def test_a_summary_of_two_steps() -> None:
    second = step(1, before=(0, 10), after=(6, 4), samples=12, moved_samples=12, gather_seconds=0.75, longest=32)
    summary = summarize([step(0), second])
    expected: dict[str, Any] = {"steps": 2, "idle_before": 1 - 9 / 16, "idle_after": 1 - 9 / 10, "speedup": 16 / 10}
    expected |= {"ratio_before": (6 / 4 + 10 / 4) / 2, "ratio_after": (1 + 6 / 4) / 2, "worst_after": 1.5}
    expected |= {"moved_samples": 13 / 16, "moved_tokens": 20 / 80, "moved_bytes": 80, "gather_seconds": 0.5}
    expected |= {"heaviest_before": 8, "heaviest_after": 5, "longest": 24, "samples": 8, "tokens": 40}
    expected |= {"sample_bytes": 320, "measured_steps": 0, "compared_steps": 0, "measured_speedup": 0}
    assert {name: getattr(summary, name) for name in expected} == pytest.approx(expected)


def test_a_summary_of_measured_steps() -> None:
    summary = summarize(TIMED_STEPS)
    assert (summary.steps, summary.measured_steps, summary.compared_steps) == (3, 2, 1)
    assert (summary.step_seconds, summary.compared_step_seconds, summary.measured_speedup) == (1, 2, 2)
    assert summary.measured_idle_after == (0.875 - 0.8125) / 1
    assert summary.measured_idle_before == (1.5 - 0.875) / 2
    assert (summary.idle_before, summary.speedup) == (1 - 4 / 6, 1.5)  # promised, by the balanced steps alone


def test_only_what_is_known_is_shown() -> None:
    promised = [shown.name for shown in SHOWN if shown.counted_by == "steps"]
    assert list(shown_numbers(summarize(STEPS))) == promised
    assert list(shown_numbers(summarize(TIMED_STEPS))) == [shown.name for shown in SHOWN]
    unbalanced = summarize([timed(0, compute=(1, 2), wait=(1, 0), is_balanced=False)])
    assert shown_numbers(unbalanced) == {"measured_idle_before": 0.25, "compared_step_seconds": 2}
    assert shown_numbers(summarize([step(0, is_balanced=False)])) == {}
    assert [unit.show(1.234567) for unit in Unit] == ["1.235", "1.23x", "123.5%", "1", "1,234.57 ms"]


def test_no_steps_and_steps_that_cost_nothing_are_balanced_perfectly() -> None:
    assert summarize([]) == MetricsSummary()
    zeros = np.zeros((2, 1), dtype=np.int64)
    nothing = Assignment(rank_of=np.full((2, 1), -1, dtype=np.int32))
    free = summarize([measure_step(nothing, costs=zeros, tokens=zeros, sample_bytes=zeros)])
    assert free == dataclasses.replace(MetricsSummary(), steps=1)
    assert (free.ratio_before, free.worst_after, free.speedup, free.idle_before, free.idle_after) == (1, 1, 1, 0, 0)


def test_a_step_is_measured_before_and_after() -> None:
    # Row 1 of rank 0 goes to rank 1; row 0 of rank 1 to rank 0; the last row of rank 1 is padding.
    assignment = Assignment(rank_of=np.array([[0, 1], [0, -1]], dtype=np.int32))
    costs = np.array([[5, 3], [2, 0]])
    metrics = measure_step(assignment, costs=costs, tokens=costs * 10, sample_bytes=costs * 100, epoch=3, step=7)
    expected: dict[str, Any] = {"epoch": 3, "step": 7, "is_balanced": True, "before": [8, 2], "after": [7, 3]}
    expected |= {"lower_bound": 5, "rank_tokens": [70, 30], "rank_squares": [2900, 900], "loaded_tokens": [50, 30]}
    expected |= {"longest": 50, "samples": 3, "moved_samples": 2, "tokens": 100, "moved_tokens": 50}
    expected |= {"sample_bytes": 1000, "moved_bytes": 500, "ratio_before": 8 / 5, "lasts_one_sample": False}
    assert {name: np.asarray(getattr(metrics, name)).tolist() for name in expected} == expected
    # Every row of a padded rank counts as its longest, the padding too.
    padded = partition(costs, 2, num_real=np.array([2, 1]), padded=True)
    metrics = measure_step(padded, costs=costs, tokens=costs * 10, sample_bytes=costs)
    expected = {"before": [10, 4], "after": [10, 4], "lower_bound": 10, "rank_tokens": [100, 40], "samples": 3}
    expected |= {"rank_squares": [5000, 800], "tokens": 100, "moved_samples": 0, "lasts_one_sample": True}
    assert {name: np.asarray(getattr(metrics, name)).tolist() for name in expected} == expected


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([[9, 1], [1, 1]], True),  # 9 + 1 are above the mean, 6
        ([[1, 1], [1, 2]], False),  # 2 and 3: the bound, 3, is a mean of 2.5 rounded up
        ([[50_030, 0], [50_000, 0]], False),  # above the mean by less than a thousandth
        ([[50_200, 0], [50_000, 0]], True),
    ],
)
def test_one_sample_sets_the_time_of_a_step(costs: list[list[int]], expected: bool) -> None:
    array = np.array(costs)
    metrics = measure_step(partition(array, 2), costs=array, tokens=array, sample_bytes=array)
    assert metrics.lasts_one_sample == expected
    assert summarize([metrics, step(0)]).one_sample == expected / 2
