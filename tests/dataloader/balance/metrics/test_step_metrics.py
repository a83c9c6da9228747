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
def test_combined_summaries_equal_the_summary_of_all_their_steps(chunks: list[list[StepMetrics]]) -> None:
    combined = combine([summarize(chunk) for chunk in chunks])
    together = summarize([step for chunk in chunks for step in chunk])
    assert dataclasses.asdict(combined) == pytest.approx(dataclasses.asdict(together))
    assert shown_numbers(combined) == pytest.approx(shown_numbers(together))


@given(st.lists(steps(), min_size=1, max_size=8))
def test_idle_time_and_speedup_are_those_of_all_rank_time(some: list[StepMetrics]) -> None:
    summary, balanced = summarize(some), [step for step in some if step.is_balanced]
    for loads, idle in (("before", summary.idle_before), ("after", summary.idle_after)):
        of_steps = [getattr(step, loads) for step in balanced]
        rank_time = sum(2 * int(of_step.max()) for of_step in of_steps)
        waiting = sum(int((of_step.max() - of_step).sum()) for of_step in of_steps)
        assert idle == pytest.approx(waiting / rank_time if rank_time else 0, abs=1e-12)
    before, after = (sum(int(getattr(step, name).max()) for step in balanced) for name in ("before", "after"))
    assert summary.speedup == pytest.approx(before / after if after else 1)


def test_a_summary_of_two_steps() -> None:
    second = step(1, before=(0, 10), after=(6, 4), samples=12, moved_samples=12, gather_seconds=0.75, longest=32)
    summary = summarize([step(0), second])
    assert summary.steps == 2
    assert (summary.idle_before, summary.idle_after) == pytest.approx((1 - 9 / 16, 1 - 9 / 10))
    assert summary.speedup == pytest.approx(16 / 10)
    assert summary.ratio_before == pytest.approx((6 / 4 + 10 / 4) / 2)
    assert summary.ratio_after == pytest.approx((1 + 6 / 4) / 2)
    assert summary.worst_after == 1.5
    assert (summary.moved_samples, summary.moved_tokens) == pytest.approx((13 / 16, 20 / 80))
    assert (summary.moved_bytes, summary.gather_seconds) == (80, 0.5)
    assert (summary.heaviest_before, summary.heaviest_after, summary.longest) == (8, 5, 24)
    assert (summary.samples, summary.tokens, summary.sample_bytes) == (8, 40, 320)
    assert (summary.measured_steps, summary.compared_steps, summary.measured_speedup) == (0, 0, 0)


def test_a_summary_of_measured_steps() -> None:
    summary = summarize(TIMED_STEPS)
    assert (summary.steps, summary.measured_steps, summary.compared_steps) == (3, 2, 1)
    assert (summary.step_seconds, summary.compared_step_seconds) == (1, 2)
    assert summary.measured_idle_after == (0.875 - 0.8125) / 1
    assert summary.measured_idle_before == (1.5 - 0.875) / 2
    assert summary.measured_speedup == 2
    assert (summary.idle_before, summary.speedup) == (1 - 4 / 6, 1.5)  # promised, by the balanced steps alone


def test_only_what_is_known_is_shown() -> None:
    promised = [shown.name for shown in SHOWN if shown.counted_by == "steps"]
    assert list(shown_numbers(summarize(STEPS))) == promised
    assert list(shown_numbers(summarize(TIMED_STEPS))) == [shown.name for shown in SHOWN]
    unbalanced = summarize([timed(0, compute=(1, 2), wait=(1, 0), is_balanced=False)])
    assert shown_numbers(unbalanced) == {"measured_idle_before": 0.25, "compared_step_seconds": 2}
    assert shown_numbers(summarize([step(0, is_balanced=False)])) == {}


def test_units_show_values() -> None:
    shown = {
        Unit.RATIO: "1.235",
        Unit.SPEEDUP: "1.23x",
        Unit.SHARE: "123.5%",
        Unit.COUNT: "1",
        Unit.SECONDS: "1,234.57 ms",
    }
    assert {unit: unit.show(1.234567) for unit in Unit} == shown


def test_no_steps_and_steps_that_cost_nothing_are_balanced_perfectly() -> None:
    assert summarize([]) == MetricsSummary()
    zeros = np.zeros((2, 1), dtype=np.int64)
    nothing = Assignment(rank_of=np.full((2, 1), -1, dtype=np.int32))
    free = summarize([measure_step(nothing, costs=zeros, tokens=zeros, sample_bytes=zeros)])
    for number, summary in enumerate((MetricsSummary(), free)):
        assert (summary.steps, summary.ratio_before, summary.ratio_after, summary.worst_after) == (number, 1, 1, 1)
        assert (summary.speedup, summary.moved_samples, summary.moved_tokens, summary.plan_seconds) == (1, 0, 0, 0)
        assert (summary.idle_before, summary.idle_after, summary.one_sample) == (0, 0, 0)


def test_a_step_is_measured_before_and_after() -> None:
    # Row 1 of rank 0 goes to rank 1; row 0 of rank 1 to rank 0; the last row of rank 1 is padding.
    assignment = Assignment(rank_of=np.array([[0, 1], [0, -1]], dtype=np.int32))
    costs = np.array([[5, 3], [2, 0]])
    metrics = measure_step(assignment, costs=costs, tokens=costs * 10, sample_bytes=costs * 100, epoch=3, step=7)
    assert (metrics.epoch, metrics.step, metrics.is_balanced) == (3, 7, True)
    assert (metrics.before.tolist(), metrics.after.tolist()) == ([8, 2], [7, 3])
    assert metrics.lower_bound == 5
    assert (metrics.rank_tokens.tolist(), metrics.rank_squares.tolist()) == ([70, 30], [2900, 900])
    assert (metrics.loaded_tokens.tolist(), metrics.longest) == ([50, 30], 50)
    assert (metrics.samples, metrics.moved_samples) == (3, 2)
    assert (metrics.tokens, metrics.moved_tokens) == (100, 50)
    assert (metrics.sample_bytes, metrics.moved_bytes) == (1000, 500)
    assert metrics.ratio_before == 8 / 5


def test_every_row_of_a_padded_rank_counts_as_its_longest() -> None:
    costs = np.array([[5, 3], [2, 0]])  # the last row is padding, and computed all the same
    assignment = partition(costs, 2, num_real=np.array([2, 1]), padded=True)
    metrics = measure_step(assignment, costs=costs, tokens=costs * 10, sample_bytes=costs)
    assert (metrics.before.tolist(), metrics.after.tolist(), metrics.lower_bound) == ([10, 4], [10, 4], 10)
    assert (metrics.rank_tokens.tolist(), metrics.rank_squares.tolist()) == ([100, 40], [5000, 800])
    assert (metrics.tokens, metrics.samples, metrics.moved_samples) == (100, 3, 0)
    assert metrics.lasts_one_sample


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([[9, 1], [1, 1]], True),  # 9 + 1 are above the mean, 6
        ([[5, 4], [3, 2]], False),  # 7 each
        ([[1, 1], [1, 2]], False),  # 2 and 3: the bound, 3, is a mean of 2.5 rounded up
        ([[50_030, 0], [50_000, 0]], False),  # above the mean by less than a thousandth
        ([[50_200, 0], [50_000, 0]], True),
        ([[0, 0], [0, 0]], False),
    ],
)
def test_one_sample_sets_the_time_of_a_step(costs: list[list[int]], expected: bool) -> None:
    array = np.array(costs)
    metrics = measure_step(partition(array, 2), costs=array, tokens=array, sample_bytes=array)
    assert metrics.lasts_one_sample == expected
    assert summarize([metrics, step(0)]).one_sample == expected / 2
