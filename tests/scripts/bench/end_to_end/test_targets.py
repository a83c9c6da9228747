from collections.abc import Sequence

import pytest

from end_to_end.reports.columns import Row, make_rows
from end_to_end.reports.table import Verdict, check, markdown_table
from end_to_end.results import EVEN, LIVE, PREPARED, RunResult
from tests.scripts.bench.end_to_end import made_up


def run(
    strategy: str, live: Sequence[float], *, prepared: float = 10, even: float = 10, peak: float = 2e9
) -> RunResult:
    """Return a run with one step in each round, of `live` ms."""
    segments = [
        made_up.segment(kind, number, [ms])
        for number, own in enumerate(live)
        for kind, ms in ((LIVE, own), (PREPARED, prepared), (EVEN, 10))
    ]
    return made_up.result(strategy, segments, settings={"strategy": strategy}, peak_flops=peak)


def rows(*results: RunResult) -> tuple[Row, ...]:
    return make_rows(results)


def outcomes(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.outcome for verdict in verdicts]


def test_targets_that_are_met() -> None:
    # 400 tokens, 10,000 pairs and 20 predictions: 502,000 FLOPs of two GPUs in 10 ms.
    verdicts = check(
        rows(
            run("karmarkar-karp", [10.3]),
            run("lpt-swap", [10.02, 10.02], peak=502_000 / 2 / 0.01002 / 0.4),
            run("min-move", [10.04], prepared=10.03),
        )
    )

    assert all(verdict.met for verdict in verdicts)
    assert [(verdict.target, verdict.measured, verdict.outcome) for verdict in verdicts] == [
        ("lpt-swap: step at most 1.01 of a perfectly even one", "1.0020", "met, 0.80 percentage points to spare"),
        ("min-move: step at most 1.02 of a perfectly even one", "1.0040", "met, 1.60 percentage points to spare"),
        ("lpt-swap: at least as fast as karmarkar-karp", "1.0279", "met, 2.79 percentage points to spare"),
        ("lpt-swap: balancing exposes at most 0.5 % of a step", "0.20 %", "met, 0.30 percentage points to spare"),
        ("min-move: balancing exposes at most 0.5 % of a step", "0.10 %", "met, 0.40 percentage points to spare"),
        ("MFU of the best run at least 30 %", "40.0 % (lpt-swap)", "met, 10.00 percentage points to spare"),
    ]


def test_targets_that_are_missed_say_by_how_much() -> None:
    verdicts = check(
        rows(
            run("karmarkar-karp", [10]),
            run("lpt-swap", [10.2], peak=502_000 / 2 / 0.01 / 0.25),
            run("min-move", [10.3], peak=1e12),
        )
    )

    assert not any(verdict.met for verdict in verdicts)
    assert outcomes(verdicts) == [
        "missed by 1.00 percentage points",
        "missed by 1.00 percentage points",
        "missed by 1.96 percentage points",
        "missed by 1.50 percentage points",
        "missed by 2.50 percentage points",
        "missed by 5.49 percentage points",
    ]


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        ((9.9, 10.5), "within the noise, 1.96 percentage points short"),
        ((10.19, 10.21), "missed by 1.96 percentage points"),
    ],
)
def test_the_noise_of_rounds_is_allowed_for_between_runs(live: Sequence[float], expected: str) -> None:
    verdict = check(rows(run("karmarkar-karp", [10]), run("lpt-swap", live)))[2]

    assert verdict.outcome == expected


def test_the_noise_of_rounds_excuses_no_ratio_to_even() -> None:
    verdict = check(rows(run("lpt-swap", [10.0, 10.4])))[0]

    assert (verdict.measured, verdict.outcome) == ("1.0200 ±0.0200", "missed by 1.00 percentage points")


def test_targets_without_measurements_are_neither_met_nor_missed() -> None:
    failed = made_up.result("lpt-swap", settings={"strategy": "lpt-swap"}, failure="out of memory")

    verdicts = check(rows(failed))

    assert outcomes(verdicts) == ["not measured"] * 6
    assert not any(verdict.met for verdict in verdicts)


def test_verdicts_in_markdown() -> None:
    text = markdown_table([Verdict(target="fast", measured="1.20", margin=0.2), Verdict(target="even")])

    assert text == (
        "| target | measured | outcome |\n| --- | ---: | ---: |\n"
        "| fast | 1.20 | met, 20.00 percentage points to spare |\n| even | - | not measured |\n"
    )
