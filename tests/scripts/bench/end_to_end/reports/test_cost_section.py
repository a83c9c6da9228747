from pathlib import Path

import numpy as np
import pytest

from end_to_end.cost_fit import Fit, fit_cost
from end_to_end.reports.cost_section import BALANCED, FITTED, OTHER_LENGTHS, Errors, compare, fitted_runs, write_section
from evenrank.dataloader.balance import MeasuredCost
from tests.scripts.bench.end_to_end import made_up
from tests.scripts.bench.end_to_end.made_up_times import timed


def test_predictions_are_compared_by_rank_and_step() -> None:
    fit = Fit.of(timed("baseline"))
    for run, kind in (
        (fit.run, FITTED),
        (timed("balanced", strategy="karmarkar-karp"), BALANCED),
        (timed("baseline", lengths="clipped Zipf"), OTHER_LENGTHS),
    ):
        comparison = compare(fit, run)
        assert comparison.kind == kind
        assert comparison.measured.shape == (4 * 50 * 2,)
        assert comparison.by_fit == pytest.approx(comparison.measured, rel=2e-3)
        # The times grow faster with length than HSTUCost does.
        of_hstu = Errors.of(comparison.by_hstu, comparison.measured)
        assert of_hstu.median > 5 * Errors.of(comparison.by_fit, comparison.measured).median
    errors = Errors.of(np.array([11.0, 20.0, 24.0]), np.array([10.0, 20.0, 30.0]))
    assert (errors.median, errors.p95, errors.r2) == pytest.approx((0.1, 0.19, 1 - 37 / 200))  # of 0.1, 0, 0.2
    assert np.isnan(Errors.of(np.array([3.0, 5.0]), np.array([4.0, 4.0])).r2)


def test_each_unbalanced_run_on_most_gpus_is_compared_with_what_it_can_predict() -> None:
    runs = [
        timed("one", gpus=1),
        timed("four"),
        timed("kk", strategy="karmarkar-karp"),
        timed("kk two", gpus=2, strategy="karmarkar-karp"),
        timed("zipf", lengths="clipped Zipf"),
        timed("zipf kk", lengths="clipped Zipf", strategy="karmarkar-karp"),
        timed("recompute kk", strategy="karmarkar-karp", settings={"recompute": True}),
        timed("recompute", gpus=2, settings={"recompute": True}),
        made_up.result("failed", failure="out of memory"),
    ]
    assert {run.name: [one.name for one in compared] for run, compared in fitted_runs(runs)} == {
        "four": ["four", "kk", "zipf"],
        "zipf": ["zipf", "four", "zipf kk"],
        "recompute": ["recompute"],
    }


def test_the_section_has_costs_errors_plots_and_steps_by_either_cost(tmp_path: Path) -> None:
    runs = [
        timed("Baseline", noise=0.01),
        timed("lpt", strategy="lpt-swap", noise=0.01),
        timed("+ fitted", strategy="lpt-swap", noise=0.01, cost={"name": "MeasuredCost"}),
        timed("Baseline", lengths="clipped Zipf", noise=0.01),
    ]
    section = write_section(tmp_path, runs)
    assert MeasuredCost.load(tmp_path / "lognormal" / "measured_cost-baseline.json") == fit_cost(runs[0])
    assert "![Predicted and measured compute times](plots/cost-lognormal-baseline.png)" in section
    assert (tmp_path / "plots" / "cost-clipped-zipf-baseline.png").exists()
    (cost,) = [line for line in section.splitlines() if line.startswith("| lognormal | Baseline |")]
    assert cost.split(" | ")[6] == "5,120"  # HSTUCost: 10 t d^2 = 2 t^2 d
    predicted = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| Baseline, lognormal")]
    assert predicted == ["Baseline, lognormal", "lpt, lognormal", "+ fitted, lognormal", "Baseline, clipped Zipf"]
    (pair,) = [line for line in section.splitlines() if line.startswith("| lognormal | + fitted | 4 | lpt-swap |")]
    assert pair.split(" | ")[6] == "+0.0%"


def test_a_fit_that_is_refused_is_reported_and_without_unbalanced_runs_there_is_no_section(tmp_path: Path) -> None:
    section = write_section(tmp_path, [timed("short", batches=3)])
    assert "No cost was fitted to short (lognormal): 12 times are too few" in section
    assert "| fitted to |" not in section
    assert write_section(tmp_path, [timed("lpt", strategy="lpt-swap")]) == ""
    assert not list(tmp_path.iterdir())
