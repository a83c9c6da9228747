import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.dataloader.balance import BalanceConfig, LinearCost, MeasuredCost, PaddedCost, StepMetrics, partition
from evenrank.dataloader.balance.costs.model_costs import counted_tokens
from evenrank.dataloader.balance.metrics.step_metrics import measure_step
from evenrank.dataloader.balance.metrics.writers import JsonLines
from tests.cli.programs import Evenrank
from tests.dataloader.balance.metrics.example_steps import write

PER_STEP, PER_TOKEN, PER_SQUARE = 0.02, 1e-5, 4e-9  # seconds

# Of a run whose cost counts the items alone.
RUN: dict[str, Any] = {"options": {"tokens": counted_tokens(LinearCost(interleave_actions=False))}}


def _timed_steps(*, padded: bool = False, noise: float = 0.0) -> list[StepMetrics]:
    """Return unbalanced steps of 2 ranks whose times follow from their tokens, with a relative noise."""
    rng = np.random.default_rng(0)
    steps = []
    for number in range(50):
        tokens = rng.lognormal(6, 0.8, (2, 8)).astype(np.int64)
        assignment = partition(tokens, 2, strategy="none", padded=padded)
        metrics = measure_step(assignment, costs=tokens, tokens=tokens, sample_bytes=tokens, step=number)
        counted = 8 * tokens.max(axis=1) if padded else tokens.sum(axis=1)
        squares = 8 * tokens.max(axis=1) ** 2 if padded else (tokens**2).sum(axis=1)
        seconds = (PER_STEP + PER_TOKEN * counted + PER_SQUARE * squares) * (1 + noise * rng.standard_normal(2))
        measured = {"compute_seconds": seconds, "wait_seconds": seconds.max() - seconds}
        steps.append(
            measure_step(assignment, costs=tokens, tokens=tokens, sample_bytes=tokens, step=number, **measured)
        )
        assert steps[-1].rank_tokens.tolist() == metrics.rank_tokens.tolist() == counted.tolist()
    return steps


def _fitted(here: Path, evenrank: Evenrank, *options: object) -> tuple[list[str], MeasuredCost]:
    run = evenrank("fit", "log.jsonl", *options)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    return lines, MeasuredCost.load(here / lines[-1].removeprefix("cost: "))


def _coefficients(cost: MeasuredCost) -> list[float]:
    return [cost.seconds_per_step, cost.linear * cost.seconds_per_unit, cost.quadratic * cost.seconds_per_unit]


@pytest.mark.parametrize("padded", [False, True])
def test_known_costs_are_recovered(here: Path, evenrank: Evenrank, padded: bool) -> None:
    with JsonLines("log.jsonl") as log:
        row = LinearCost(interleave_actions=True, contextual=("user_id",), history_key="item_id", max_tokens=4096)
        observe = BalanceConfig(cost=PaddedCost(row) if padded else row, strategy="none", on_step=log).observer(
            0, exchanges=False, data=dict
        )
        assert observe is not None
        for metrics in _timed_steps(padded=padded):
            observe(metrics)
    lines, cost = _fitted(here, evenrank)
    assert _coefficients(cost) == pytest.approx([PER_STEP, PER_TOKEN, PER_SQUARE], rel=1e-6)
    assert (cost.interleave_actions, cost.contextual, cost.history_key) == (True, ("user_id",), "item_id")
    assert (cost.max_tokens, cost.steps) == (4096, 100)
    assert lines == [
        "100 times of 50 steps: 20 ms per step, 10 us per token, 4 ns per squared token",
        "error of a time: 0.0% in the median, 0.0% at the 95th percentile",
        "cost: log-cost.json",
    ]


def test_the_error_is_that_of_the_times(here: Path, evenrank: Evenrank) -> None:
    write(here / "log.jsonl", *_timed_steps(noise=0.02), **RUN)
    (here / "costs").mkdir()
    lines, cost = _fitted(here, evenrank, "--out", "costs/measured.json")
    assert _coefficients(cost)[1] == pytest.approx(PER_TOKEN, rel=0.3)
    assert lines[-1] == "cost: costs/measured.json"
    median, percentile_95 = (float(word.removesuffix("%")) for word in lines[1].split() if word.endswith("%"))
    assert 1 < median < 2.5
    assert 2 < percentile_95 < 4
    assert (cost.interleave_actions, cost.max_tokens) == (False, 131_072)
    document = json.loads(evenrank("fit", "log.jsonl", "--json").stdout)
    assert document == {
        "times": 100,
        "steps": 50,
        "seconds_per_step": cost.seconds_per_step,
        "seconds_per_token": _coefficients(cost)[1],
        "seconds_per_squared_token": _coefficients(cost)[2],
        "error_p50": pytest.approx(median / 100, abs=1e-3),
        "error_p95": pytest.approx(percentile_95 / 100, abs=1e-3),
        "cost": "log-cost.json",
    }


def test_records_count_with_their_last_step_and_the_cost_is_for_the_next_simulation(
    here: Path, evenrank: Evenrank
) -> None:
    write(here / "log.jsonl", *_timed_steps(), every=2, **RUN)
    lines, cost = _fitted(here, evenrank)
    assert _coefficients(cost) == pytest.approx([PER_STEP, PER_TOKEN, PER_SQUARE], rel=1e-6)
    assert lines[0].startswith("50 times of 25 steps: ")
    common = ("--ranks", 2, "--batch-size", 8, "--strategy", "lpt-swap", "--cost", "log-cost.json")
    run = evenrank("simulate", "log.jsonl", *common)
    assert run.returncode == 0, run.stderr
    (row,) = [line.split() for line in run.stdout.splitlines() if line.split()[:1] == ["2"]]
    expected = [step.compute_seconds for step in _timed_steps() if step.compute_seconds is not None]
    idle = 1 - np.mean(expected) / np.mean([seconds.max() for seconds in expected])
    assert float(row[2].removesuffix("%")) / 100 == pytest.approx(idle, rel=0.25)  # other steps of these samples


def test_times_that_say_nothing_are_refused(here: Path, evenrank: Evenrank) -> None:
    tokens = np.full((2, 8), 100)
    times = {"compute_seconds": np.full(2, 0.1), "wait_seconds": np.zeros(2)}
    even = measure_step(partition(tokens, 2), costs=tokens, tokens=tokens, sample_bytes=tokens, **times)
    uncounted = (
        "log.jsonl does not say which tokens its cost counts; record the run with a cost of the package, such as"
    )
    for steps, options, message in (
        (
            [even] * 20,
            RUN["options"],
            "the timed steps are too similar: their tokens vary by 0.0%, at least 2% is needed",
        ),
        *((_timed_steps(), options, uncounted) for options in ({}, {"tokens": None}, {"tokens": {"foo": 1}})),
    ):
        write(here / "log.jsonl", *steps, options=options)
        run = evenrank("fit", "log.jsonl")
        assert (run.returncode, run.stderr.count("\n")) == (2, 1)
        assert run.stderr.startswith(f"error: {message}")
        assert [path.name for path in here.iterdir()] == ["log.jsonl"]
        (here / "log.jsonl").unlink()
