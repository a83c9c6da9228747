import dataclasses

import numpy as np
import pytest

from end_to_end.cost_fit import Calibration, predict
from evenrank.core.errors import ConfigError
from tests.scripts.bench.end_to_end.made_up_times import OVERHEAD, compute_ms, timed


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
    assert run.even is not None
    tokens = run.even.sample_tokens
    fitted = predict(calibration.cost, tokens).T
    assert fitted.mean() > 1.05 * compute_ms(tokens).mean() / 1e3
    assert calibration.step_seconds(fitted) == pytest.approx((compute_ms(tokens).mean() + OVERHEAD) / 1e3, rel=0.02)


def test_without_even_steps_there_is_no_calibration() -> None:
    with pytest.raises(ConfigError, match="'baseline' has no perfectly even steps; run it again"):
        Calibration.of(dataclasses.replace(timed("baseline"), even=None))


def test_a_step_takes_the_overhead_and_its_slowest_rank() -> None:
    exact = dataclasses.replace(Calibration.of(timed("baseline")), factors=np.ones(4), noise=np.ones(1), overhead=0.5)
    compute = np.array([[1.0, 3.0], [4.0, 2.0]])
    assert exact.step_seconds(compute) == 0.5 + 3.5
    slow = dataclasses.replace(exact, factors=np.full(4, 2.0), noise=np.array([1.5]))
    assert slow.step_seconds(compute) == 0.5 + 3.5 * 3


def test_factors_and_noise_are_drawn_for_each_rank() -> None:
    exact = Calibration.of(timed("baseline"))
    noisy = dataclasses.replace(exact, factors=np.array([1.0, 2.0]), noise=np.array([1.0, 1.5]), overhead=0.0)
    alone, pair = noisy.step_seconds(np.ones((100_000, 1))), noisy.step_seconds(np.ones((100_000, 2)))
    # Products are 1, 1.5, 2 and 3, each with probability 1/4; the larger of two is 3 with 7/16, 2 with 5/16, ...
    assert alone == pytest.approx((1 + 1.5 + 2 + 3) / 4, rel=0.01)
    assert pair == pytest.approx((7 * 3 + 5 * 2 + 3 * 1.5 + 1) / 16, rel=0.01)
