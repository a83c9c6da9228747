import dataclasses
from pathlib import Path

import numpy as np
import pytest

from end_to_end.cost_fit import fit_cost
from end_to_end.reports import scaling
from end_to_end.reports.columns import UNBALANCED
from end_to_end.reports.scaling import scale, scaled_runs, simulated_compute
from end_to_end.reports.scaling_section import write_section
from end_to_end.results import EVEN
from evenrank.cli.reports.simulation import LengthSource, simulate
from evenrank.dataloader.balance import BalanceConfig, summarize
from evenrank.datasets.distributions import Lognormal
from tests.scripts.bench.end_to_end import made_up
from tests.scripts.bench.end_to_end.made_up_times import LENGTHS, OVERHEAD, compute_ms, timed


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "RANKS", (1, 2, 4, 8))
    monkeypatch.setattr(scaling, "_SAMPLED_RANKS", 200)


def test_without_noise_the_speedup_is_that_of_the_simulator() -> None:
    cost = dataclasses.replace(fit_cost(timed("baseline")), seconds_per_step=0.0)
    source = LengthSource(distribution=Lognormal(mean=512, std=512))
    heaviest = {}
    for strategy in (UNBALANCED, "karmarkar-karp", "min-move"):
        compute, tokens = simulated_compute(cost, source, 8, batch_size=4, strategy=strategy, steps=30)
        assert compute.shape == (30, 8)
        heaviest[strategy] = compute.max(axis=1).mean()
        planned = "none" if strategy == UNBALANCED else strategy
        summary = summarize(simulate(source, BalanceConfig(cost=cost, strategy=planned), 8, batch_size=4, steps=30))
        assert heaviest[UNBALANCED] / heaviest[strategy] == pytest.approx(summary.speedup, rel=1e-9)
        assert tokens == pytest.approx(summary.tokens / 8)
    drawn, even = (simulated_compute(cost, source, 4, batch_size=4, strategy=s, steps=5)[0] for s in (UNBALANCED, EVEN))
    assert even == pytest.approx(np.repeat(drawn.mean(axis=1, keepdims=True), 4, axis=1))
    # The longest sample costs about 2^60, 32 of them 2^65, which does not fit.
    cost, source = fit_cost(timed("baseline")), LengthSource(lengths=np.full(64, 4096))
    compute, tokens = simulated_compute(cost, source, 2, batch_size=32, strategy="lpt-swap", steps=1)
    assert compute == pytest.approx(compute_ms(np.full((1, 2, 32), 8193)) / 1e3, rel=1e-3)
    assert tokens == 32 * 8193


def test_what_was_measured_is_predicted_by_another_number_of_gpus() -> None:
    # On two GPUs all computes 1.2 times as slowly as on four.
    runs = [
        timed("two", gpus=2, factors=(1.2, 1.2)),
        timed("four"),
        timed("two, lpt", gpus=2, strategy="lpt-swap", factors=(1.2, 1.2)),
    ]
    points = {(point.ranks, point.strategy): point for point in scale(runs).points}
    predicted_by = {ranks: point.calibration.run for (ranks, _), point in points.items()}
    assert predicted_by == {1: "four", 2: "four", 4: "two", 8: "four"}
    measured_by = {key: point.measured.run for key, point in points.items() if point.measured}
    assert measured_by.pop((2, "lpt-swap")) == "two, lpt"
    assert measured_by == {(2, UNBALANCED): "two", (2, EVEN): "two", (4, UNBALANCED): "four", (4, EVEN): "four"}
    for key, work, measured_factor, predicted_factor in (
        ((2, UNBALANCED), runs[0].balanced, 1.2, 1),
        ((2, "lpt-swap"), runs[2].balanced, 1.2, 1),
        ((4, EVEN), runs[1].even, 1, 1.2),
    ):
        slowest = compute_ms(made_up.given(work).sample_tokens).max(axis=0).mean()
        measured, errors = made_up.given(points[key].measured), made_up.given(points[key].errors)
        expected, predicted = (factor * slowest + OVERHEAD for factor in (measured_factor, predicted_factor))
        assert measured.seconds * 1e3 == pytest.approx(expected)
        assert measured.predicted * 1e3 == pytest.approx(predicted, rel=1e-3)
        assert errors[1] == pytest.approx(predicted / expected - 1, abs=1e-3)
        assert errors[0] == pytest.approx(points[key].seconds / measured.seconds - 1)


def test_ratios_and_efficiency_follow_from_times() -> None:
    result = scale([timed("one", gpus=1), timed("four"), timed("lpt", strategy="lpt-swap")])
    point, unbalanced, even = (result.find(4, strategy) for strategy in ("lpt-swap", UNBALANCED, EVEN))
    assert result.speedup(point) == unbalanced.seconds / point.seconds > 1.1
    assert result.to_even(point) == point.seconds / even.seconds
    of_one = made_up.given(result.find(1, "lpt-swap").measured)
    assert result.efficiency(point) == point.tokens_per_second / of_one.tokens_per_second
    assert result.speedup(result.find(8, "lpt-swap"), measured=True) is None


def test_a_run_with_a_fitted_cost_is_preferred_and_none_is_predicted_by_itself() -> None:
    runs = [timed("four"), timed("hstu", strategy="lpt-swap")]
    fitted = timed("fitted", strategy="lpt-swap", cost={"name": "MeasuredCost"})
    for order in ([*runs, fitted], [fitted, *runs]):
        points = {point.strategy: point for point in scale(order).points if point.measured is not None}
        assert points.keys() == {UNBALANCED, EVEN, "lpt-swap"}
        assert made_up.given(points["lpt-swap"].measured).run == "fitted"
        assert points[UNBALANCED].errors is points[EVEN].errors is None
        assert made_up.given(points["lpt-swap"].errors)[1] == pytest.approx(0, abs=1e-3)


def test_the_configuration_measured_in_most_ways_is_scaled_and_of_equals_the_fastest() -> None:
    recompute = {"recompute": True}
    runs = [
        timed("four"),
        timed("again"),
        timed("recompute", settings=recompute),
        timed("recompute, two", gpus=2, settings=recompute),
        timed("zipf lpt", lengths="clipped Zipf", strategy="lpt-swap"),
        timed("heads", data_ranks=2, settings={"tensor_parallel": 2}),
        made_up.result("failed", failure="out of memory"),
    ]
    slow, fast = timed("slow", factors=(1.3,) * 4), timed("fast", settings=recompute)
    small = timed("small", gpus=2, workload={"lengths": LENGTHS, "item_rows": 10, "user_rows": 10})
    for given, expected in (
        (runs, ["recompute", "recompute, two"]),
        ([slow, fast], ["fast"]),
        ([fast, slow], ["fast"]),
        ([timed("one", gpus=1), timed("four"), small], ["one", "four"]),  # tables of other sizes are not comparable
    ):
        assert [[run.name for run in group] for group in scaled_runs(given)] == [expected]


def test_the_section_states_errors_and_has_a_row_for_each_number_of_ranks(tmp_path: Path) -> None:
    runs = [timed("two", gpus=2, factors=(1.2, 1.2)), timed("four")]
    section = write_section(tmp_path, runs)
    worst = max(abs(point.errors[1]) for point in scale(runs).points if point.errors)
    assert f"instead of others of the same distribution, at most {worst:.1%}." in section
    assert "Tried on 4 measured points" in section
    assert "More ranks than measured are predicted by the run 'four' on 4 GPUs" in section
    rows = [line.split()[1] for line in section.splitlines() if line[2:3].isdigit()]
    assert rows == ["2", "2", "4", "4", "1", "2", "4", "8"]
    assert (tmp_path / "plots" / "scaling-lognormal.png").read_bytes().startswith(b"\x89PNG")


def test_one_number_of_gpus_or_balanced_runs_have_no_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_section(tmp_path, [timed("lpt", strategy="lpt-swap")]) == ""
    section = write_section(tmp_path, [timed(f"few on {gpus}", gpus=gpus, batches=3) for gpus in (2, 4)])
    assert "No cost was fitted to few on 2 (lognormal): 6 times are too few" in section
    monkeypatch.setattr(scaling, "scale", lambda runs, on_point: pytest.fail(f"simulated {runs}"))
    section = write_section(tmp_path, [timed("one", gpus=1), timed("one, lpt", gpus=1, strategy="lpt-swap")])
    assert "lognormal: measured on 1 GPU alone." in section
    assert not list(tmp_path.iterdir())
