import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.dataloader.balance import BalanceConfig, LinearCost, MeasuredCost, PaddedCost, StepMetrics, partition
from evenrank.dataloader.balance.costs.model_costs import counted_tokens
from evenrank.dataloader.balance.metrics.step_metrics import measure_step
from evenrank.dataloader.balance.metrics.writers import JsonLines
from tests.cli.programs import evenrank, printed
from tests.dataloader.balance.metrics.example_steps import write

PER_STEP, PER_TOKEN, PER_SQUARE = 0.02, 1e-5, 4e-9  # seconds
EXACT = pytest.approx([PER_STEP, PER_TOKEN, PER_SQUARE], rel=1e-6)
# Of a run whose cost counts the items alone.
RUN: dict[str, Any] = {"options": {"tokens": counted_tokens(LinearCost(interleave_actions=False))}}


def _timed_steps(*, padded: bool = False, noise: float = 0.0) -> list[StepMetrics]:
    """Return 50 unbalanced steps of 2 ranks whose times follow from their tokens, with a relative noise."""
    rng, steps = np.random.default_rng(0), []
    for number in range(50):
        tokens = rng.lognormal(6, 0.8, (2, 8)).astype(np.int64)
        counted = 8 * tokens.max(axis=1) if padded else tokens.sum(axis=1)
        squares = 8 * tokens.max(axis=1) ** 2 if padded else (tokens**2).sum(axis=1)
        seconds = (PER_STEP + PER_TOKEN * counted + PER_SQUARE * squares) * (1 + noise * rng.standard_normal(2))
        assignment = partition(tokens, 2, strategy="none", padded=padded)
        measured: dict[str, Any] = {"compute_seconds": seconds, "wait_seconds": seconds.max() - seconds}
        measured |= dict.fromkeys(("costs", "tokens", "sample_bytes"), tokens)
        steps.append(measure_step(assignment, step=number, **measured))
        assert steps[-1].rank_tokens.tolist() == counted.tolist()
    return steps


def _fitted(*options: str) -> tuple[list[str], MeasuredCost, list[float]]:
    """Return the lines that are printed, the cost, and its seconds per step, token and squared token."""
    lines = printed("fit", "log.jsonl", *options).splitlines()
    cost = MeasuredCost.load(Path(lines[-1].removeprefix("cost: ")))
    per_unit = cost.seconds_per_unit
    return lines, cost, [cost.seconds_per_step, cost.linear * per_unit, cost.quadratic * per_unit]


@pytest.mark.parametrize("padded", [False, True])
def test_known_costs_are_recovered(here: Path, padded: bool) -> None:
    with JsonLines("log.jsonl") as log:
        row = LinearCost(interleave_actions=True, contextual=("user_id",), history_key="item_id", max_tokens=4096)
        balance = BalanceConfig(cost=PaddedCost(row) if padded else row, strategy="none", on_step=log)
        observe = balance.observer(0, exchanges=False, data=dict)
        assert observe is not None
        for metrics in _timed_steps(padded=padded):
            observe(metrics)
    lines, cost, coefficients = _fitted()
    assert coefficients == EXACT
    assert (cost.interleave_actions, cost.contextual, cost.history_key) == (True, ("user_id",), "item_id")
    assert (cost.max_tokens, cost.steps) == (4096, 100)
    assert lines == [
        "100 times of 50 steps: 20 ms per step, 10 us per token, 4 ns per squared token",
        "error of a time: 0.0% in the median, 0.0% at the 95th percentile",
        "cost: log-cost.json",
    ]


def test_the_error_is_that_of_the_times(here: Path) -> None:
    write(here / "log.jsonl", *_timed_steps(noise=0.02), **RUN)
    (here / "costs").mkdir()
    lines, cost, coefficients = _fitted("--out", "costs/measured.json")
    assert coefficients[1] == pytest.approx(PER_TOKEN, rel=0.3)
    assert (lines[-1], cost.interleave_actions, cost.max_tokens) == ("cost: costs/measured.json", False, 131_072)
    median, percentile_95 = (float(word.removesuffix("%")) for word in lines[1].split() if word.endswith("%"))
    assert 1 < median < 2.5
    assert 2 < percentile_95 < 4
    names = ("seconds_per_step", "seconds_per_token", "seconds_per_squared_token")
    errors = {"error_p50": pytest.approx(median / 100, abs=1e-3), "error_p95": pytest.approx(percentile_95 / 100, 1e-2)}
    expected = {"times": 100, "steps": 50, **dict(zip(names, coefficients, strict=True)), **errors}
    assert json.loads(printed("fit", "log.jsonl", "--json")) == {**expected, "cost": "log-cost.json"}


def test_records_count_with_their_last_step_and_the_cost_is_for_the_next_simulation(here: Path) -> None:
    steps = _timed_steps()
    write(here / "log.jsonl", *steps, every=2, **RUN)
    lines, _, coefficients = _fitted()
    assert coefficients == EXACT
    assert lines[0].startswith("50 times of 25 steps: ")
    common = ("--ranks", 2, "--batch-size", 8, "--strategy", "lpt-swap", "--cost", "log-cost.json")
    text = printed("simulate", "log.jsonl", *common)
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["2"]]
    seconds = np.array([step.compute_seconds for step in steps])
    idle = 1 - seconds.mean() / seconds.max(axis=1).mean()
    assert float(row[2].removesuffix("%")) / 100 == pytest.approx(idle, rel=0.25)  # other steps of these samples


def test_times_that_say_nothing_are_refused(here: Path) -> None:
    tokens = np.full((2, 8), 100)
    times = {"compute_seconds": np.full(2, 0.1), "wait_seconds": np.zeros(2)}
    even = measure_step(partition(tokens, 2), costs=tokens, tokens=tokens, sample_bytes=tokens, **times)
    similar = "the timed steps are too similar: their tokens vary by 0.0%, at least 2% is needed"
    uncounted = "log.jsonl does not say which tokens its cost counts; record the run with a cost of the package, such"
    of_costs: list[dict[str, Any]] = [{}, {"tokens": None}, {"tokens": {"foo": 1}}]
    for steps, options, message in (
        ([even] * 20, RUN["options"], similar),
        *((_timed_steps(), options, uncounted) for options in of_costs),
    ):
        write(here / "log.jsonl", *steps, options=options)
        run = evenrank("fit", "log.jsonl")
        assert (run.returncode, run.stderr.count("\n")) == (2, 1)
        assert run.stderr.startswith(f"error: {message}")
        assert [path.name for path in here.iterdir()] == ["log.jsonl"]
        (here / "log.jsonl").unlink()
