import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.dataloader.balance.metrics.step_metrics import (
    MetricsSummary,
    StepMetrics,
    combine,
    measure_step,
    summarize,
)
from evenrank.dataloader.balance.partition.strategies import Assignment
from tests.dataloader.balance.test_writers import step


@st.composite
def steps(draw: st.DrawFn) -> StepMetrics:
    counts, seconds = st.integers(0, 1000), st.floats(0, 10)
    before = np.array([draw(counts), draw(counts)])
    even = -(-int(before.sum()) // 2)
    numbers: dict[str, Any] = {name: draw(counts) for name in ("samples", "tokens", "sample_bytes")}
    numbers |= {f"moved_{name.removeprefix('sample_')}": draw(st.integers(0, high)) for name, high in numbers.items()}
    numbers |= {f"{part}_seconds": draw(seconds) for part in ("gather", "plan", "exchange", "waited")}
    loads: dict[str, Any] = {"before": before, "after": np.array([even, before.sum() - even]), "lower_bound": even}
    return StepMetrics(epoch=0, step=0, **loads, **numbers)


@given(st.lists(st.lists(steps(), min_size=1, max_size=4), min_size=1, max_size=4))
def test_combined_summaries_equal_the_summary_of_all_their_steps(chunks: list[list[StepMetrics]]) -> None:
    combined = combine([summarize(chunk) for chunk in chunks])
    together = summarize([step for chunk in chunks for step in chunk])
    assert dataclasses.asdict(combined) == pytest.approx(dataclasses.asdict(together))


def test_a_summary_of_two_steps() -> None:
    counts: dict[str, Any] = {"samples": 12, "moved_samples": 12, "gather_seconds": 0.75}
    second = dataclasses.replace(step(1, before=(0, 10), after=(6, 4)), **counts)
    summary = summarize([step(0), second])
    assert summary.steps == 2
    assert summary.ratio_before == pytest.approx((6 / 4 + 10 / 4) / 2)
    assert summary.ratio_after == pytest.approx((1 + 6 / 4) / 2)
    assert summary.worst_after == 1.5
    assert summary.speedup == pytest.approx(16 / 10)
    assert (summary.moved_samples, summary.moved_tokens) == pytest.approx((13 / 16, 20 / 80))
    assert (summary.moved_bytes, summary.gather_seconds) == (80, 0.5)
    assert (summary.heaviest_before, summary.heaviest_after) == (8, 5)
    assert (summary.samples, summary.tokens, summary.sample_bytes) == (8, 40, 320)


def test_no_steps_and_steps_that_cost_nothing_are_balanced_perfectly() -> None:
    assert summarize([]) == MetricsSummary()
    zeros = np.zeros((2, 1), dtype=np.int64)
    nothing = Assignment(rank_of=np.full((2, 1), -1, dtype=np.int32))
    free = summarize([measure_step(nothing, costs=zeros, tokens=zeros, sample_bytes=zeros)])
    for number, summary in enumerate((MetricsSummary(), free)):
        assert (summary.steps, summary.ratio_before, summary.ratio_after, summary.worst_after) == (number, 1, 1, 1)
        assert (summary.speedup, summary.moved_samples, summary.moved_tokens, summary.plan_seconds) == (1, 0, 0, 0)


def test_a_step_is_measured_before_and_after() -> None:
    # Row 1 of rank 0 goes to rank 1; row 0 of rank 1 to rank 0; the last row of rank 1 is padding.
    assignment = Assignment(rank_of=np.array([[0, 1], [0, -1]], dtype=np.int32))
    costs = np.array([[5, 3], [2, 0]])
    metrics = measure_step(assignment, costs=costs, tokens=costs * 10, sample_bytes=costs * 100, epoch=3, step=7)
    assert (metrics.epoch, metrics.step) == (3, 7)
    assert (metrics.before.tolist(), metrics.after.tolist()) == ([8, 2], [7, 3])
    assert metrics.lower_bound == 5
    assert (metrics.samples, metrics.moved_samples) == (3, 2)
    assert (metrics.tokens, metrics.moved_tokens) == (100, 50)
    assert (metrics.sample_bytes, metrics.moved_bytes) == (1000, 500)
    assert metrics.ratio_before == 8 / 5
