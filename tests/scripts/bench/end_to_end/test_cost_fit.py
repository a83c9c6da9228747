import dataclasses
from typing import Any

import numpy as np
import pytest

from end_to_end.cost_fit import Calibration, Fit, fit_cost, predict
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import HSTUCost, MeasuredCost
from tests.scripts.bench.end_to_end import made_up
from tests.scripts.bench.end_to_end.made_up_times import OVERHEAD, A, B, C, compute_ms, timed


def coefficients(cost: MeasuredCost) -> Any:
    unit = 2.0**-cost.fraction_bits
    return cost.seconds_per_step * 1e3, cost.linear * unit * 1e3, cost.quadratic * unit * 1e3


def test_a_cost_is_found_in_the_times_of_a_run() -> None:
    run = timed("baseline")
    cost = fit_cost(run)
    assert coefficients(cost) == pytest.approx((A, B, C), rel=1e-3)
    assert cost.r2 == pytest.approx(1)
    assert cost.steps == 4 * 50  # ranks and batches
    assert (cost.interleave_actions, cost.contextual, cost.max_tokens) == (True, ("user_id",), 1 + 2 * 4096)
    tokens = made_up.given(run.balanced).sample_tokens
    assert predict(cost, tokens) == pytest.approx(compute_ms(tokens) / 1e3, rel=1e-3)
    without = fit_cost(timed("no user id", settings={"user_id": False, "max_history_length": 5000}))
    assert (without.contextual, without.max_tokens) == ((), 10_000)


def test_one_slow_repeat_of_each_batch_changes_nothing() -> None:
    run = timed("baseline", repeats=3)
    (live, even) = run.segments
    marks = live.marks.copy()
    marks[:, :50, 3] += 1000.0  # the first repeat of every batch
    slow = dataclasses.replace(run, segments=(dataclasses.replace(live, marks=marks), even))
    assert repr(fit_cost(slow)) == repr(fit_cost(run))


def test_runs_that_are_balanced_or_failed_are_refused() -> None:
    with pytest.raises(ConfigError, match="'balanced', whose ranks are balanced: all take about as long; name a run"):
        fit_cost(timed("balanced", strategy="lpt-swap"))
    with pytest.raises(ConfigError, match="'a', which failed: out of memory; run it again"):
        fit_cost(made_up.result("a", failure="out of memory"))
    with pytest.raises(ConfigError, match="'baseline' has no perfectly even steps; run it again"):
        Calibration.of(dataclasses.replace(timed("baseline"), even=None))
    # One rank has nobody to exchange samples with.
    assert coefficients(fit_cost(timed("one", gpus=1, strategy="lpt-swap"))) == pytest.approx((A, B, C), rel=1e-3)


def test_hstu_cost_is_scaled_by_least_squares() -> None:
    run = timed("baseline")
    fit = Fit.of(run)
    batches = made_up.given(run.balanced).sample_tokens
    operations = 24 * (10 * batches * 1024**2 + 2 * batches**2 * 1024).sum(axis=-1)
    milliseconds = compute_ms(batches)
    factor = (operations * milliseconds).sum() / (operations.astype(float) ** 2).sum()
    assert fit.seconds_per_operation == pytest.approx(factor / 1e3)
    assert fit.predict(batches)[1] == pytest.approx(operations * factor / 1e3)
    assert fit.hstu_break_even == 5 * 1024  # 10 t d^2 = 2 t^2 d
    shape: dict[str, Any] = {"hidden": 1024, "heads": 4, "head_dim": 256, "layers": 8}
    assert fit.hstu == HSTUCost(**shape, interleave_actions=True, contextual=("user_id",), max_tokens=1 + 2 * 4096)


def test_factors_noise_and_overhead_are_found_in_the_times_of_a_run() -> None:
    calibration = Calibration.of(timed("baseline", noise=0.02, factors=(1, 1, 1.1, 1), batches=100, repeats=5))
    assert (calibration.run, calibration.gpus) == ("baseline", 4)
    assert calibration.factors / calibration.factors[0] == pytest.approx([1, 1, 1.1, 1], rel=0.01)
    assert calibration.noise.shape == (4 * 500,)
    assert np.median(calibration.noise) == pytest.approx(1, rel=1e-3)
    assert np.std(calibration.noise) == pytest.approx(0.02, rel=0.15)
    assert calibration.overhead == pytest.approx(OVERHEAD / 1e3)


def test_that_ranks_which_wait_are_slower_says_nothing_about_even_steps() -> None:
    run = timed("baseline", slowdown=0.3, batches=100)
    calibration = Calibration.of(run)
    tokens = made_up.given(run.even).sample_tokens
    fitted = predict(calibration.cost, tokens).T
    assert fitted.mean() > 1.05 * compute_ms(tokens).mean() / 1e3
    assert calibration.step_seconds(fitted) == pytest.approx((compute_ms(tokens).mean() + OVERHEAD) / 1e3, rel=0.02)


def test_a_step_takes_the_overhead_and_its_slowest_rank_with_factors_and_noise_drawn_for_each_rank() -> None:
    exact = dataclasses.replace(Calibration.of(timed("baseline")), factors=np.ones(4), noise=np.ones(1), overhead=0.5)
    compute = np.array([[1.0, 3.0], [4.0, 2.0]])
    assert exact.step_seconds(compute) == 0.5 + 3.5
    slow = dataclasses.replace(exact, factors=np.full(4, 2.0), noise=np.array([1.5]))
    assert slow.step_seconds(compute) == 0.5 + 3.5 * 3
    noisy = dataclasses.replace(exact, factors=np.array([1.0, 2.0]), noise=np.array([1.0, 1.5]), overhead=0.0)
    # Products are 1, 1.5, 2 and 3, each with probability 1/4; the larger of two is 3 with 7/16, 2 with 5/16, ...
    for num_ranks, expected in ((1, (1 + 1.5 + 2 + 3) / 4), (2, (7 * 3 + 5 * 2 + 3 * 1.5 + 1) / 16)):
        assert noisy.step_seconds(np.ones((100_000, num_ranks))) == pytest.approx(expected, rel=0.01)
